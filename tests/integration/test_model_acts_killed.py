"""Whoever acts on models dies between any two statements: all of it is done, or nothing.

Where it is done it stands in the audit, and only there; done again, it comes to the same end.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from pytest_django import Settings

from models_admin import external, services, traffic_rules, window_tuning
from models_admin.checking import Checked, Target
from models_admin.directory import directory
from models_admin.errors import ModelsAdminError
from models_admin.models import (
    AcceleratorPool,
    AuditEntry,
    ExternalHealth,
    ModelConfig,
    ModelLabel,
    ModelServer,
    ModelVersion,
    TrafficRule,
    TunedWindow,
)
from models_admin.policy.health import Finding, Sign
from models_admin.policy.replicas import ServerState
from models_admin.services.looking import Seen
from tests import demand_source
from tests.chaos.fail_points import FailPoints, watched
from tests.demand_source import HELD, SOURCE, Work

pytestmark = pytest.mark.django_db(transaction=True)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LATER = NOW + timedelta(minutes=1)
TABLES = (
    *(AcceleratorPool, ModelConfig, ModelVersion, ModelLabel, TrafficRule, ExternalHealth),
    TunedWindow,
)
READS = ("SELECT", "SAVEPOINT", "RELEASE", "return")
HOSTED: Any = {"kind": "hosted", "checkpoint": "tiny:0", "replicas_max": 3}
EXTERNAL: Any = {"kind": "external", "url": "http://127.0.0.1:9", "model_name": "m"}


@pytest.fixture(autouse=True)
def _signals(settings: Settings) -> Iterator[None]:
    settings.AIRS_DEMAND, settings.AIRS_HELD = demand_source.NAME, demand_source.HELD_NAME
    yield
    SOURCE.reset()
    HELD.clear()
    connection.close()


def seen(model: ModelConfig) -> Seen:
    return Seen(version="1")


def found(targets: Sequence[Target]) -> Mapping[str, Checked]:
    finding = Finding(sign=Sign.GOOD, detail="", version="2")
    return {target.id: Checked(finding=finding, latency_s=0.1) for target in targets}


def nothing() -> None:
    """Nothing is there."""


def box() -> None:
    services.register_pool(AcceleratorPool(id="box", devices=4))


def hosted() -> None:
    box()
    services.register_model("mini", now=NOW, pool="box", **HOSTED)


def started() -> None:
    hosted()
    services.start_model("mini", now=NOW)


def replaced() -> None:
    started()
    services.update_model("mini", now=NOW, checkpoint="tiny:1")
    ModelVersion.objects.filter(checkpoint="tiny:0").update(state="retiring")
    (serves,) = ModelVersion.objects.filter(checkpoint="tiny:1")
    ModelConfig.objects.update(version=serves.version)


def full() -> None:
    """Its window was full when it was last looked at, and is now."""
    started()
    server = ModelServer.objects.create(
        model_id="mini",
        agent="local",
        ordinal=0,
        state=ServerState.READY,
        address="http://x",
        ready_at=NOW,
        heartbeat_at=NOW,
    )
    SOURCE.works = [Work(model_id="mini", other_s=3600.0)]
    HELD[server.key] = 16
    window_tuning.run_once(NOW)
    ModelServer.objects.update(heartbeat_at=LATER, busy_seconds=60.0, tokens_total=1_000)


def outside() -> None:
    services.register_model("ext", now=NOW, look=seen, **EXTERNAL)


def unknown() -> None:
    services.register_model("ext", now=NOW, look=lambda model: Seen(), **EXTERNAL)


def changed_outside() -> None:
    outside()
    directory.report_version("ext", "2", NOW)


def ruled() -> None:
    traffic_rules.create({"name": "rule", "block": True})


def rule_id() -> int:
    return TrafficRule.objects.get().pk


def first_version() -> str:
    return ModelVersion.objects.earliest("pk").version


@dataclass(frozen=True, kw_only=True, slots=True)
class Act:
    """What somebody does, upon what, and the entries that it leaves."""

    ground: Callable[[], None]
    do: Callable[[], object]
    entries: int = 1


ACTS = {
    "register a pool": Act(ground=nothing, do=box),
    "change a pool": Act(ground=box, do=lambda: services.change_pool("box", {"devices": 5})),
    "remove a pool": Act(ground=box, do=lambda: services.remove_pool("box")),
    "register": Act(
        ground=box, do=lambda: services.register_model("mini", now=NOW, pool="box", **HOSTED)
    ),
    "register an external": Act(ground=nothing, do=outside),
    "update": Act(
        ground=started, do=lambda: services.update_model("mini", now=NOW, checkpoint="tiny:1")
    ),
    "update a stopped one": Act(
        ground=hosted, do=lambda: services.update_model("mini", now=NOW, checkpoint="tiny:1")
    ),
    "start": Act(ground=hosted, do=lambda: services.start_model("mini", now=LATER)),
    "stop": Act(ground=started, do=lambda: services.stop_model("mini", now=LATER)),
    "restart": Act(ground=started, do=lambda: services.restart_model("mini", now=LATER)),
    "resize": Act(ground=started, do=lambda: services.resize_model("mini", 2, now=LATER)),
    "retire a version": Act(
        ground=replaced,
        do=lambda: services.retire_version("mini", first_version(), now=LATER),
    ),
    "remove": Act(ground=hosted, do=lambda: services.remove_model("mini")),
    "accept a version": Act(
        ground=changed_outside, do=lambda: services.accept_version("ext", now=LATER)
    ),
    "report the first version": Act(
        ground=unknown, do=lambda: directory.report_version("ext", "1", LATER), entries=0
    ),
    "report another version": Act(
        ground=outside, do=lambda: directory.report_version("ext", "2", LATER), entries=0
    ),
    "check externals": Act(
        ground=outside, do=lambda: external.run_once(LATER, check=found), entries=0
    ),
    "tune windows": Act(ground=full, do=lambda: window_tuning.run_once(LATER), entries=0),
    "create a rule": Act(
        ground=nothing, do=lambda: traffic_rules.create({"name": "rule", "block": True})
    ),
    "change a rule": Act(
        ground=ruled, do=lambda: traffic_rules.change(rule_id(), {"reason": "so"})
    ),
    "remove a rule": Act(ground=ruled, do=lambda: traffic_rules.remove(rule_id())),
}


def rows() -> list[Any]:
    """Return all that models are, by table; keys that the database counted left out."""
    counted = ("id", "first_version_id", "seen")
    found = []
    for table in TABLES:
        has_own_key = table in (AcceleratorPool, ModelConfig)
        of_table = [
            {
                name: value
                for name, value in row.items()
                if name not in counted or (has_own_key and name == "id")
            }
            for row in table.objects.order_by("pk").values()
        ]
        found.append((table.__name__, of_table))
    return found


def laid_out(act: Act) -> tuple[list[Any], int]:
    """Make the ground anew; return what is there, and the entries."""
    for table in (ModelConfig, AcceleratorPool, ModelLabel, TrafficRule, AuditEntry):
        table.objects.all().delete()
    act.ground()
    return rows(), AuditEntry.objects.count()


@pytest.mark.parametrize("name", ACTS)
def test_an_act_is_done_with_its_entry_or_not_at_all(name: str) -> None:
    act = ACTS[name]
    before, entries = laid_out(act)
    dry = FailPoints()
    with watched(dry):
        act.do()
    after = rows()
    assert after != before
    assert AuditEntry.objects.count() == entries + act.entries

    for at, boundary in enumerate(dry.passed):
        if boundary.removeprefix("after ").startswith(READS):
            continue  # nothing was written since the boundary before
        assert laid_out(act) == (before, entries)
        with watched(FailPoints(at=at)):
            act.do()
        left = rows(), AuditEntry.objects.count()
        assert left in ((before, entries), (after, entries + act.entries)), boundary
        if left[0] == before:
            act.do()
            assert rows() == after, boundary
        else:
            _again(act)
            assert AuditEntry.objects.count() >= entries + act.entries


def _again(act: Act) -> None:
    """Who does not know what became of it does it again: it is harmless, or refused."""
    try:
        act.do()
    except (ModelsAdminError, TrafficRule.DoesNotExist):
        return
