"""Looks after external models: every ten seconds each is asked how it is, and its version.

A model that is down rests: `directory` lets one call at a time through to it instead of as many as
it may hold. That one may prove the check wrong, and no rater is paused for a check. What a server
reports as its version is noted as that of an answer would be.

Nothing is locked while servers are asked. A round that is cut off has written all or nothing of
what it found, and the next one begins anew.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Final
from zlib import crc32

from django.db import connection, transaction
from django.db.models import QuerySet

from models_admin import checking
from models_admin.checking import Checked, Target
from models_admin.directory import call_headers, directory
from models_admin.models import ExternalHealth, ModelConfig, ModelKind, health_of
from models_admin.policy.health import follow

logger = logging.getLogger(__name__)

PERIOD: Final = timedelta(seconds=10)
LEAST_APART: Final = timedelta(seconds=5)
"""Of two checks of a model: a tick that comes twice counts once."""
_SET_BACK: Final = timedelta(minutes=1)
"""A check of a nearer future is one for which this one waited."""

_LOCK: Final = crc32(b"models_admin.external")

Check = Callable[[Sequence[Target]], Mapping[str, Checked]]
"""`checking.check`, or what a test has instead."""


def run_once(now: datetime, *, check: Check = checking.check) -> int:
    """Check the external models that are due; return how many."""
    return _round(ModelConfig.objects.all(), now, check)


def check_model(model_id: str, now: datetime, *, check: Check = checking.check) -> None:
    """Check one external model unless that was just done; wait for whoever checks now."""
    _round(ModelConfig.objects.filter(pk=model_id), now, check, waits=True)


def _round(
    among: QuerySet[ModelConfig], now: datetime, check: Check, *, waits: bool = False
) -> int:
    with _alone(waits=waits) as free:
        if not free:
            return 0
        models = [
            model
            for model in among.filter(kind=ModelKind.EXTERNAL).select_related("health")
            if _is_due(model, now)
        ]
        found = check(list(map(_target, models)))
        _keep(models, found, now)
    return len(models)


def _is_due(model: ModelConfig, now: datetime) -> bool:
    health = health_of(model)
    if health is None:
        return True
    age = now - health.checked_at
    # One of a far future was made before the clock was set back.
    return age >= LEAST_APART or age <= -_SET_BACK


def _target(model: ModelConfig) -> Target:
    return Target(
        id=model.pk,
        protocol=model.protocol,
        endpoint=model.endpoint,
        url=model.url,
        model_name=model.model_name,
        headers=call_headers(model),
    )


def _keep(models: Sequence[ModelConfig], found: Mapping[str, Checked], now: datetime) -> None:
    """Write what was found of models that are as they were when their servers were asked."""
    with transaction.atomic():
        current = dict(
            ModelConfig.objects.select_for_update(no_key=True)
            .filter(pk__in=[model.pk for model in models])
            .order_by("pk")
            .values_list("pk", "updated_at")
        )
        same = [model for model in models if current.get(model.pk) == model.updated_at]
        ExternalHealth.objects.bulk_create(
            [_row(model, found[model.pk], now) for model in same],
            update_conflicts=True,
            unique_fields=["model"],
            update_fields=[
                *("up", "checked_at", "changed_at", "failures", "successes"),
                *("latency_s", "detail"),
            ],
        )
        for model in same:
            version = found[model.pk].finding.version
            if version not in ("", model.version, model.reported):
                directory.report_version(model.pk, version, now)


def _row(model: ModelConfig, checked: Checked, now: datetime) -> ExternalHealth:
    before = health_of(model)
    after = follow(before, checked.finding, latency_s=checked.latency_s, now=now)
    if after.up is not (before.up if before else None):
        logger.info(
            "external model is %s",
            {True: "up", False: "down", None: "unknown"}[after.up],
            extra={"model": model.pk, "detail": after.detail},
        )
    return ExternalHealth(model=model, **asdict(after))


@contextmanager
def _alone(*, waits: bool) -> Iterator[bool]:
    """Say whether nobody else checks, which is sure where one waits, and let nobody meanwhile."""
    lock = "pg_advisory_lock(%s) IS NOT NULL" if waits else "pg_try_advisory_lock(%s)"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {lock}", [_LOCK])
        (free,) = cursor.fetchone()
        try:
            yield free
        finally:
            if free:
                cursor.execute("SELECT pg_advisory_unlock(%s)", [_LOCK])
