from django.apps import AppConfig
from django.contrib.admin.apps import AdminConfig


class AirsSiteConfig(AppConfig):
    name = "airs_site"
    verbose_name = "AIRS"

    def ready(self) -> None:
        # Loads the Celery app for producers; not in __init__, which the simulator imports.
        from airs_site import celery  # noqa: F401


class AirsAdminConfig(AdminConfig):
    default_site = "airs_site.admin_site.AirsAdminSite"
