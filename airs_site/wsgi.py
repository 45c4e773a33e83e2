"""WSGI entry point for gunicorn."""

import gc
import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "airs_site.settings")
application = get_wsgi_application()

# What was imported lives as long as the process: looking for garbage in it again and again took
# a tenth of an upload's time.
gc.collect()
gc.freeze()
gc.set_threshold(10_000, 10, 10)
