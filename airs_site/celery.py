"""The Celery application; loaded by `AppConfig.ready`, so that `airs_site` itself stays empty."""

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "airs_site.settings")

app = Celery("airs")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["fulfillment", "workers"])
