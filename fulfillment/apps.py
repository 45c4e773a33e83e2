from django.apps import AppConfig


class FulfillmentConfig(AppConfig):
    name = "fulfillment"
    verbose_name = "Rating fulfillment"

    def ready(self) -> None:
        # The admin itself looks for a module named `admin` only.
        from fulfillment import admin_archive, admin_priorities, admin_webhooks  # noqa: F401
