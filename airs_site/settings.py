"""Settings: the only place that reads the environment.

Our own settings start with AIRS_, have a default that works on a laptop, and say their unit.
Wrong ones fail here, at start, with the name of the variable and a remedy.
"""

import json
import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

BASE_DIR = Path(__file__).resolve().parent.parent


def _integer(name: str, default: int, *, least: int = 0) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ImproperlyConfigured(f"{name}={text!r} must be a whole number of at least {least}")
    return value


_SECONDS = {"m": 60, "h": 3_600, "d": 86_400}


def _period(name: str, default: str, *, least: str = "1m") -> timedelta:
    """Return a span written as whole minutes, hours or days: `90m`, `24h`, `14d`."""
    text = os.environ.get(name, "") or default
    number, unit = text[:-1], text[-1:]
    if not (number.isascii() and number.isdigit() and unit in _SECONDS):
        raise ImproperlyConfigured(f"{name}={text!r} must be minutes, hours or days: 90m, 24h, 14d")
    value = timedelta(seconds=int(number) * _SECONDS[unit])
    if value < timedelta(seconds=int(least[:-1]) * _SECONDS[least[-1]]):
        raise ImproperlyConfigured(f"{name}={text!r} must be at least {least}")
    return value


def _ports(name: str, default: str) -> frozenset[int]:
    text = os.environ.get(name, "") or default
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 65_536 for part in parts):
        raise ImproperlyConfigured(f"{name}={text!r} must be ports: 443,8443")
    return frozenset(map(int, parts))


def _share(name: str, default: float, *, most: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise ImproperlyConfigured(f"{name}={text!r} must be a number from 0 to {most}")
    return value


def _secret(path: Path) -> str:
    """Return the installation's secret key, made on first use (mode 0600)."""
    try:
        return path.read_text()
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return path.read_text()
        with os.fdopen(handle, "w") as file:
            file.write(key := os.urandom(48).hex())
        return key


def _database(url: str) -> dict[str, Any]:
    """Turn `postgresql://user:pw@host:port/name?host=/socket/dir` into Django's dictionary."""
    parts = urlsplit(url)
    if parts.scheme not in {"postgresql", "postgres"}:
        raise ImproperlyConfigured(
            f"DATABASE_URL must start with postgresql://, not {parts.scheme}"
        )
    options = dict(parse_qsl(parts.query))
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": unquote(parts.path.lstrip("/")) or "airs",
        "USER": unquote(parts.username or options.pop("user", "")),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": options.pop("host", None) or parts.hostname or "",
        "PORT": options.pop("port", None) or (str(parts.port) if parts.port else ""),
        "CONN_MAX_AGE": 600,
        "CONN_HEALTH_CHECKS": True,
        "OPTIONS": {
            # A process that stops inside a transaction must not hold its locks (design: no lock
            # may stop the dispatcher); the dispatcher adds an idle_session_timeout of its own.
            # No statement may take other cores: with old statistics the planner would scan the
            # archive on all of them.
            "options": "-c idle_in_transaction_session_timeout=5000 -c jit=off"
            " -c max_parallel_workers_per_gather=0",
            "connect_timeout": 5,
            **options,
        },
    }


AIRS_HOME = Path(os.environ.get("AIRS_HOME") or BASE_DIR / ".airs").resolve()
"""Where embedded servers, logs, spool files, caches and secrets of this installation live."""

_servers: dict[str, str] = {}
if (_servers_file := AIRS_HOME / "run" / "servers.json").is_file():
    _servers = json.loads(_servers_file.read_text())

DATABASE_URL = os.environ.get("DATABASE_URL") or _servers.get("database_url", "postgresql:///airs")
REDIS_URL = os.environ.get("REDIS_URL") or _servers.get("redis_url", "redis://127.0.0.1:6379/0")

AIRS_PORT = _integer("AIRS_PORT", 8000, least=1)
FLOWER_PORT = _integer("FLOWER_PORT", 5555, least=1)
AIRS_API_TOKEN = os.environ.get("AIRS_API_TOKEN", "")
AIRS_ADMIN_PASSWORD = os.environ.get("AIRS_ADMIN_PASSWORD", "")
AIRS_MAX_UPLOAD_BYTES = _integer("AIRS_MAX_UPLOAD_BYTES", 1 << 30, least=1)
"""Bytes of an upload after decompression."""
AIRS_MAX_JSON_BYTES = _integer("AIRS_MAX_JSON_BYTES", 64 << 20, least=1)
"""Bytes of a JSON body, which is parsed in memory; NDJSON is not."""
AIRS_CHECKPOINT_ROOT = Path(
    os.environ.get("AIRS_CHECKPOINT_ROOT") or AIRS_HOME / "checkpoints"
).resolve()
AIRS_EXECUTOR_CONCURRENCY = _integer("AIRS_EXECUTOR_CONCURRENCY", 16, least=1)
"""Messages (of up to sixteen batches) that one executor process works on at a time."""
AIRS_ALLOWED_PRIVATE_HOSTS = tuple(
    filter(None, os.environ.get("AIRS_ALLOWED_PRIVATE_HOSTS", "").split(","))
)
"""Hosts, addresses and networks (10.1.0.0/16) that webhooks may go to though they are private."""
AIRS_WEBHOOK_PORTS = _ports("AIRS_WEBHOOK_PORTS", "80,443,8080,8443")
"""Ports of public hosts that webhooks may go to."""
AIRS_EVENT_FOLLOWERS = _integer("AIRS_EVENT_FOLLOWERS", 6)
"""Event streams that one web process serves at a time: each keeps one of its threads."""


def _half_of_free_disk() -> int:
    place = next(p for p in (AIRS_HOME, *AIRS_HOME.parents) if p.exists())
    return shutil.disk_usage(place).free // 2


AIRS_MAX_BACKLOG_BYTES = _integer("AIRS_MAX_BACKLOG_BYTES", _half_of_free_disk(), least=1)
"""Bytes of batches, payloads and requests not yet erased above which intake answers 507
`backlog_full`."""
AIRS_MIN_FREE_BYTES = _integer("AIRS_MIN_FREE_BYTES", 1 << 30)
"""Bytes that must be free where the embedded PostgreSQL has its data, else 507 `backlog_full`."""
AIRS_DATA_DIRECTORY = (
    AIRS_HOME / "postgres" if _servers.get("database_url") == DATABASE_URL else None
)
"""Where the embedded PostgreSQL has its data; None with one that somebody else runs."""

# How long things are kept; docs/operations.md has the table.
AIRS_KEEP_WORKFLOWS = _period("AIRS_KEEP_WORKFLOWS", "90d", least="1d")
"""Finished workflows with requests, events and deliveries, from their end."""
AIRS_KEEP_PAYLOADS = _period("AIRS_KEEP_PAYLOADS", "14d", least="1h")
"""What a retry needs of workflows that ended with requests not COMPLETED, from their end."""
AIRS_KEEP_DONE_PAYLOADS = _period("AIRS_KEEP_DONE_PAYLOADS", "24h", least="1h")
"""Payloads and batches of COMPLETED workflows, from their end."""
AIRS_KEEP_IDEMPOTENCY_KEYS = _period("AIRS_KEEP_IDEMPOTENCY_KEYS", "48h", least="24h")
"""Idempotency-Keys, from the answer."""
AIRS_KEEP_DELIVERIES = _period("AIRS_KEEP_DELIVERIES", "30d", least="1d")
"""Webhook deliveries that are over, with their log of attempts."""
AIRS_KEEP_FAILURES = _period("AIRS_KEEP_FAILURES", "10m")
"""Marks that an item failed for good, which equal items then fail by."""
AIRS_KEEP_BOOTS = _period("AIRS_KEEP_BOOTS", "1d", least="5m")
"""Rows of executors and services that are gone, from their last sign of life."""
AIRS_KEEP_QUEUE_SAMPLES = _period("AIRS_KEEP_QUEUE_SAMPLES", "30d", least="1h")
"""Samples of the queue's depth and age, and of how busy replicas were, two a minute."""

AIRS_KEEP_DECISIONS = _period("AIRS_KEEP_DECISIONS", "30d", least="1d")
"""Decisions of the rebalancer."""
AIRS_KEEP_AUDIT = _period("AIRS_KEEP_AUDIT", "365d", least="1d")
"""Who did what to models and pools."""

AIRS_SHADOW_REFRESH = _share("AIRS_SHADOW_REFRESH", 0.001, most=0.01)
"""Share of archive hits that idle raters compute again, to tell how stale the archive is; 0 turns
it off."""
AIRS_KEEP_SHADOW_SCORES = _period("AIRS_KEEP_SHADOW_SCORES", "90d", least="1d")
"""What shadow refresh found, from when it was found."""

AIRS_SPOOL = AIRS_HOME / "spool"

# What fulfillment must know of plug-ins and models arrives by name: it imports neither.
AIRS_RATER_PLUGINS = "workers.autoraters.description.describe"
AIRS_MODEL_DIRECTORY = "models_admin.directory.directory"
# What models have to do arrives at model management likewise; "" where it stands alone.
AIRS_DEMAND = "fulfillment.model_demand.demand"
AIRS_BACKLOG = "fulfillment.model_demand.backlog"
AIRS_HELD = "fulfillment.model_demand.held"
# So does what raters could send now; "" where it stands alone and knows its models only.
AIRS_QUOTA_SOURCE = "fulfillment.model_quota.quota"
# How model management calls a model for somebody who tries it.
AIRS_MODEL_TRIAL = "workers.model_trial.ask"
# The ciphers of secrets at rest, which both apps use and neither owns.
AIRS_CIPHER = "airs_site.sealing.cipher"

SECRET_KEY = os.environ.get("AIRS_SECRET_KEY") or _secret(AIRS_HOME / "run" / "secret_key")
DEBUG = False
ALLOWED_HOSTS = os.environ.get("AIRS_ALLOWED_HOSTS", "127.0.0.1,localhost,[::1]").split(",")
CSRF_TRUSTED_ORIGINS = list(filter(None, os.environ.get("AIRS_TRUSTED_ORIGINS", "").split(",")))

INSTALLED_APPS = [
    # First, because its templates extend the admin's.
    "airs_site.apps.AirsSiteConfig",
    "airs_site.apps.AirsAdminConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_celery_beat",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "fulfillment.apps.FulfillmentConfig",
    "models_admin.apps.ModelsAdminConfig",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "airs_site.security.ContentSecurityPolicyMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "airs_site.request_id.RequestIdMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "airs_site.urls"
WSGI_APPLICATION = "airs_site.wsgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

DATABASES = {"default": _database(DATABASE_URL)}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]

LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_I18N = False
USE_TZ = True
FORMAT_MODULE_PATH = "airs_site.formats"

STATIC_URL = "/static/"
# The few static files are served from where their packages have them: nothing to collect.
WHITENOISE_USE_FINDERS = True
WHITENOISE_AUTOREFRESH = False

# Uploads are streamed by our own views; this bounds what Django itself would read into memory.
DATA_UPLOAD_MAX_MEMORY_SIZE = AIRS_MAX_JSON_BYTES

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": ["fulfillment.authentication.TokenAuthentication"],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "DEFAULT_CONTENT_NEGOTIATION_CLASS": "airs_site.negotiation.AlwaysJson",
    "EXCEPTION_HANDLER": "airs_site.problems.exception_handler",
    "UNAUTHENTICATED_USER": None,
    "STRICT_JSON": True,
}

SPECTACULAR_SETTINGS = {
    "TITLE": "AIRS",
    "DESCRIPTION": "AI Rater Service: submit workflows of rating requests, read their ratings.",
    "VERSION": "1",
    "OAS_VERSION": "3.1.0",
    "SERVE_INCLUDE_SCHEMA": False,
    "SERVE_PERMISSIONS": ["rest_framework.permissions.AllowAny"],
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "ENUM_NAME_OVERRIDES": {
        "WorkflowStateEnum": "fulfillment.api_schema.WORKFLOW_STATES",
        "RatingStateEnum": "fulfillment.results.STATES",
        "ModelKindEnum": "models_admin.models.ModelKind",
        "ModelStateEnum": "models_admin.api.shapes.MODEL_STATES",
        "ServerStateEnum": "models_admin.policy.replicas.ServerState",
        "PoolKindEnum": "models_admin.models.PoolKind",
        "RebalancingEnum": "models_admin.models.Rebalancing",
        "ModeEnum": "fulfillment.models.Mode",
        "RoleEnum": "fulfillment.models.Role",
    },
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "line": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"},
    },
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    # A line a request is the access log's job, where there is one.
    "loggers": {"httpx": {"level": "WARNING"}},
    "root": {"handlers": ["stderr"], "level": os.environ.get("AIRS_LOG_LEVEL", "INFO")},
}

# Celery, as the traps of the design ask: no result backend, no ETA, late acknowledgement, a
# prefetch of one, ten real priority steps, a broker connection that notices a dead peer.
CELERY_BROKER_URL = REDIS_URL
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_CANCEL_LONG_RUNNING_TASKS_ON_CONNECTION_LOSS = False
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_WORKER_SEND_TASK_EVENTS = False
CELERY_TASK_SEND_SENT_EVENT = False
CELERY_TASK_SERIALIZER = "json"
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TASK_DEFAULT_QUEUE = "control"
# The transport takes a message without priority for the most urgent there is.
CELERY_TASK_DEFAULT_PRIORITY = 5
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None
CELERY_BROKER_TRANSPORT_OPTIONS = {
    "priority_steps": list(range(10)),
    "sep": ":",
    "queue_order_strategy": "priority",
    # Far above the longest task: leases in PostgreSQL, not the broker, give work back.
    "visibility_timeout": 6 * 3600,
    "unacked_restore_interval": 10,
    "socket_timeout": 10,
    "socket_connect_timeout": 5,
    "socket_keepalive": True,
    "health_check_interval": 10,
    "retry_on_timeout": True,
}
# A limit, not a size. Each thread of Flower that asks the workers holds two at a time: with few,
# they wait for each other for ever and it shows nothing.
CELERY_BROKER_POOL_LIMIT = 64
# Without this Celery's Django fixup closes the database connection around every task.
CELERY_DB_REUSE_MAX = 1_000_000
CELERY_TIMEZONE = "UTC"
CELERY_ENABLE_UTC = True
CELERY_BEAT_SCHEDULER = "airs_site.beat:Scheduler"
CELERY_BEAT_MAX_LOOP_INTERVAL = 5
DJANGO_CELERY_BEAT_TZ_AWARE = True
CELERY_BEAT_SCHEDULE = {
    "completion": {"task": "fulfillment.check_completion", "schedule": 5.0},
    "events": {"task": "fulfillment.publish_events", "schedule": 5.0},
    "retention": {"task": "fulfillment.erase_expired", "schedule": 60.0},
    "queue": {"task": "fulfillment.sample_queue", "schedule": 30.0},
    "purges": {"task": "fulfillment.go_on_purging", "schedule": 5.0},
    "shadow": {"task": "fulfillment.refresh_shadows", "schedule": 60.0},
    "commitments": {"task": "fulfillment.renew_forecasts", "schedule": 60.0},
    "rebalancing": {"task": "models_admin.rebalance", "schedule": 60.0},
    "windows": {"task": "models_admin.tune_windows", "schedule": 60.0},
    "externals": {"task": "models_admin.check_externals", "schedule": 10.0},
    "audit": {"task": "models_admin.erase_expired", "schedule": 600.0},
}
