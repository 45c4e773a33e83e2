from django.apps import AppConfig


class FulfillmentConfig(AppConfig):
    name = "fulfillment"
    verbose_name = "Rating fulfillment"

    def ready(self) -> None:
        # The admin itself looks for a module named `admin` only.
        from fulfillment import (  # noqa: F401
            admin_archive,
            admin_priorities,
            admin_usage,
            admin_webhooks,
        )
