"""The replicas of a model as people see them, in the admin and by REST."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from django.db.models import Sum

from models_admin.models import ModelConfig, ModelServer, ReplicaSample
from models_admin.policy.replicas import ServerState, summary

_HOUR: Final = timedelta(hours=1)


def in_words(model: ModelConfig, servers: Sequence[ModelServer]) -> str:
    """Return how many are ready of those wanted, and the states of all."""
    states = [ServerState(server.state) for server in servers]
    ready = states.count(ServerState.READY)
    return f"{ready} of {model.target_replicas} ready: {summary(states)}"


def busy_share(server: ModelServer) -> float | None:
    """Return the share of its time since it was ready in which a replica's device computed.

    None while that is not known.
    """
    if server.ready_at is None or server.heartbeat_at is None:
        return None
    lived = (server.heartbeat_at - server.ready_at).total_seconds()
    return min(server.busy_seconds / lived, 1.0) if lived > 0 else None


def shares_of_hour(model_id: str, now: datetime) -> Mapping[tuple[str, int], float]:
    """Return the share of the last hour in which each replica's device computed.

    By agent and number, through all runs; what was not sampled is not there.
    """
    sums = (
        ReplicaSample.objects.filter(model_id=model_id, at__gt=now - _HOUR, at__lte=now)
        .values_list("agent", "ordinal")
        .order_by()
        .annotate(busy=Sum("busy_s"), lived=Sum("lived_s"))
    )
    return {
        (agent, ordinal): min(busy / lived, 1.0) for agent, ordinal, busy, lived in sums if lived
    }


def restarts(server: ModelServer) -> int:
    """Return how often a replica was started again."""
    return max(server.starts - 1, 0)


def age_s(server: ModelServer, now: datetime) -> float | None:
    """Return the seconds since a replica last answered; None if it never did."""
    if server.heartbeat_at is None:
        return None
    return max((now - server.heartbeat_at).total_seconds(), 0.0)
