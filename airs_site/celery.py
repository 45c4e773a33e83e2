"""The Celery application; loaded by `AppConfig.ready`, so that `airs_site` itself stays empty."""

import os

from celery import Celery
from kombu.transport import TRANSPORT_ALIASES

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "airs_site.settings")

TRANSPORT_ALIASES.update(dict.fromkeys(("redis", "rediss"), "airs_site.broker:Transport"))

app = Celery("airs")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["fulfillment", "models_admin", "workers"])
