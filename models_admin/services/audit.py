"""The log of who did what: a row in the transaction of the act, a line when that is committed."""

import logging
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any, Final

from django.conf import settings
from django.db import models, transaction

from models_admin.models import ACTOR_LENGTH, AuditEntry
from models_admin.services.fields import SECRETS

logger = logging.getLogger(__package__)

HIDDEN: Final = "set"
CHANGED: Final = "changed"
"""All that is said of secrets: that there are some, and that there are others."""
_BOOKKEEPING: Final = frozenset({"created_at", "updated_at", "start_up_s"})
_CHUNK: Final = 10_000


def audit(
    action: str, name: str, actor: str, *, kind: str, detail: Mapping[str, Any] | None = None
) -> AuditEntry:
    """Record who did what to which object of which kind (model, pool, …), and what changed.

    Call it within the transaction of the act, so that neither is there without the other.
    `detail` holds no secret: take it from `changes` or `settings_of`.
    """
    actor = (actor or "system")[:ACTOR_LENGTH]
    entry = AuditEntry.objects.create(
        actor=actor, action=action, kind=kind, object_id=name, detail=dict(detail or {})
    )
    transaction.on_commit(partial(logger.info, "%s id=%s by=%s", action, name, actor))
    return entry


def state(row: models.Model) -> dict[str, Any]:
    """Return what a row holds by field, to be compared by `changes`."""
    return {
        field.name: getattr(row, field.attname)
        for field in row._meta.concrete_fields
        if not field.primary_key and field.name not in _BOOKKEEPING
    }


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{field: [before, after]}` of what differs; of a secret only that it changed."""
    return {
        name: CHANGED if name in SECRETS else [before.get(name), value]
        for name, value in after.items()
        if value != before.get(name)
    }


def settings_of(row: models.Model) -> dict[str, Any]:
    """Return what a row is set to, where it is set; of secrets only that there are some."""
    return {name: HIDDEN if name in SECRETS else v for name, v in state(row).items() if v}


def erase_old(now: datetime) -> int:
    """Erase a chunk of the entries that were kept long enough; return how many."""
    old = AuditEntry.objects.filter(at__lt=now - settings.AIRS_KEEP_AUDIT)
    ids = list(old.order_by("at").values_list("pk", flat=True)[:_CHUNK])
    return AuditEntry.objects.filter(pk__in=ids).delete()[0] if ids else 0
