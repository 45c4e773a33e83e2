from django.apps import AppConfig


class AirsSiteConfig(AppConfig):
    name = "airs_site"
    verbose_name = "AIRS"

    def ready(self) -> None:
        # Loads the Celery app for producers; not in __init__, which the simulator imports.
        from airs_site import celery  # noqa: F401
