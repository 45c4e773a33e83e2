"""The history of the rebalancer: what is kept of its rounds, and for how long."""

import re
from datetime import datetime, timedelta
from typing import Final

from django.conf import settings

from models_admin.models import RebalanceDecision

REPEATED_AFTER: Final = timedelta(minutes=10)
"""A round that moves nothing and says the same as the last one is kept so often."""
_CHUNK: Final = 5_000
_NUMBER: Final = re.compile(r"\d+(\.\d+)?")


def keep(decision: RebalanceDecision) -> bool:
    """Store a decision if it is news; say whether it was."""
    last = RebalanceDecision.objects.filter(pool_id=decision.pool_id).order_by("-pk").first()
    if last is not None and not _is_news(decision, last):
        return False
    decision.save(force_insert=True)
    return True


def erase(now: datetime) -> int:
    """Erase a chunk of what is old: more than all pools add in a minute; return rows."""
    old = RebalanceDecision.objects.filter(at__lt=now - settings.AIRS_KEEP_DECISIONS)
    ids = list(old.order_by("at").values_list("pk", flat=True)[:_CHUNK])
    return RebalanceDecision.objects.filter(pk__in=ids).delete()[0] if ids else 0


def _is_news(decision: RebalanceDecision, last: RebalanceDecision) -> bool:
    if decision.applied:
        return True
    if not timedelta(0) <= decision.at - last.at < REPEATED_AFTER:
        return True
    return _said(decision) != _said(last)


def _said(decision: RebalanceDecision) -> tuple[object, ...]:
    # Needs and ages in the words differ each minute; that is no other reason.
    words = _NUMBER.sub("", decision.reason)
    return decision.mode, decision.outcome, decision.applied, decision.moves, words
