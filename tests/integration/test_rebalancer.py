"""The rebalancer: what is wanted of models follows the work, whatever is said and killed."""

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import count
from math import inf, nan
from typing import Any

import pytest
from django.conf import settings
from django.db import OperationalError
from hypothesis import given
from hypothesis import settings as laws
from hypothesis import strategies as st
from pytest_django import Settings

from airs_site.celery import app
from models_admin import decisions, rebalancer, services, tasks
from models_admin.directory import directory
from models_admin.models import (
    AcceleratorPool,
    ModelConfig,
    ModelServer,
    ModelVersion,
    Outcome,
    PoolOutlook,
    RebalanceDecision,
    Rebalancing,
)
from models_admin.policy.rebalancing import START_UP
from models_admin.policy.replicas import ServerState
from models_admin.policy.rollout import VersionState
from tests import demand_source
from tests.demand_source import SOURCE, Due, Work
from tests.rating_queue import threads

pytestmark = pytest.mark.django_db
with_commits = pytest.mark.django_db(transaction=True)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
HOUR_S = 3600.0


@pytest.fixture(autouse=True)
def _demand(settings: Settings) -> Iterator[None]:
    settings.AIRS_DEMAND = demand_source.NAME
    yield
    SOURCE.reset()


def pool(devices: int = 4, mode: Rebalancing = Rebalancing.ON, name: str = "box") -> None:
    services.register_pool(AcceleratorPool(id=name, devices=devices, rebalancing=mode))


def model(name: str, replicas: int = 1, *, devices: int = 1, **changes: Any) -> ModelConfig:
    """Register and start a model that wants so many replicas; it may have none, or four."""
    fields: dict[str, Any] = {"replicas_default": 1, "replicas_max": 4, "pool": "box", **changes}
    services.register_model(
        name, now=NOW, kind="hosted", checkpoint="tiny:0", devices_per_replica=devices, **fields
    )
    ModelConfig.objects.filter(pk=name).update(wanted_replicas=replicas, started=True)
    return services.find_model(name)


def server(of: ModelConfig, ordinal: int = 0, **changes: Any) -> ModelServer:
    fields: dict[str, Any] = {
        "state": ServerState.READY,
        "address": "http://x",
        "version": of.version,
        "started_at": NOW,
        "ready_at": NOW + timedelta(seconds=20),
        "heartbeat_at": NOW,
        **changes,
    }
    return ModelServer.objects.create(model=of, agent="local", ordinal=ordinal, **fields)


def work(name: str, hours: float, *, left_s: float = HOUR_S, **changes: Any) -> Work:
    """So many replica-hours, due so long after a replica that moves now has started."""
    due = Due(deadline_at=NOW + START_UP + timedelta(seconds=left_s), work_s=hours * HOUR_S)
    return Work(model_id=name, dues=[due], **changes)


def wanted() -> dict[str, int]:
    return dict(ModelConfig.objects.values_list("pk", "wanted_replicas"))


def decided() -> list[RebalanceDecision]:
    return list(RebalanceDecision.objects.order_by("pk"))


def test_replicas_follow_the_work_and_the_decision_is_kept() -> None:
    pool()
    model("busy", 1)
    model("idle", 3)
    SOURCE.works = [work("busy", 4)]

    assert rebalancer.run_once(NOW) == 1

    assert wanted() == {"busy": 4, "idle": 0}
    (decision,) = decided()
    assert (decision.pool_id, decision.at, decision.mode) == ("box", NOW, "on")
    assert (decision.outcome, decision.applied) == (Outcome.MOVES, True)
    assert decision.moves == [
        {"model": "busy", "before": 1, "after": 4},
        {"model": "idle", "before": 3, "after": 0},
    ]
    assert decision.needs == {"busy": 4.0, "idle": 0.0}
    assert decision.signal_age_s == 30
    assert "busy 1 → 4, idle 3 → 0" in decision.reason
    assert PoolOutlook.objects.get().needs == decision.needs


def test_beat_has_the_task() -> None:
    app.loader.import_default_modules()

    assert settings.CELERY_BEAT_SCHEDULE["rebalancing"]["task"] in app.tasks


@with_commits
def test_the_task_does_a_round() -> None:
    pool()
    model("busy", 1)
    SOURCE.works = [work("busy", 4)]

    tasks.rebalance()

    assert PoolOutlook.objects.exists()


def test_a_pool_is_left_alone_unless_somebody_asks() -> None:
    services.register_pool(AcceleratorPool(id="box", devices=4))
    model("busy", 1)
    SOURCE.works = [work("busy", 9)]

    assert rebalancer.run_once(NOW) == 0

    assert wanted() == {"busy": 1}
    assert not SOURCE.asked
    assert not RebalanceDecision.objects.exists()
    assert not PoolOutlook.objects.exists()


def test_a_dry_run_says_what_would_move_and_moves_nothing() -> None:
    pool(mode=Rebalancing.DRY_RUN)
    model("busy", 1)
    model("idle", 3)
    SOURCE.works = [work("busy", 4)]

    rebalancer.run_once(NOW)

    assert wanted() == {"busy": 1, "idle": 3}
    (decision,) = decided()
    assert (decision.outcome, decision.applied) == (Outcome.MOVES, False)
    assert {move["model"]: move["after"] for move in decision.moves} == {"busy": 4, "idle": 0}


def test_a_stopped_model_and_another_pools_are_no_part_of_it() -> None:
    pool()
    pool(name="other")
    model("busy", 1)
    model("far", 2, pool="other")
    model("stopped", 3)
    services.stop_model("stopped", now=NOW)
    SOURCE.works = [work("busy", 9), work("stopped", 9)]

    rebalancer.run_once(NOW)

    assert wanted() == {"busy": 4, "far": 2, "stopped": 3}


def test_a_model_without_work_may_have_no_replica_and_gets_one_for_any() -> None:
    pool(devices=1)
    model("one", 1)
    model("two", 0)

    SOURCE.works = [Work(model_id="two", other_s=1.0)]
    rebalancer.run_once(NOW)
    assert wanted() == {"one": 0, "two": 1}

    SOURCE.works = [Work(model_id="one", other_s=1.0)]
    rebalancer.run_once(NOW + MINUTE)
    assert wanted() == {"one": 1, "two": 0}


def test_a_maximum_is_kept() -> None:
    pool(devices=6)
    model("busy", 1, replicas_max=2)
    model("idle", 4)
    SOURCE.works = [work("busy", 9)]

    rebalancer.run_once(NOW)

    assert wanted() == {"busy": 2, "idle": 4}


def test_a_minimum_is_kept() -> None:
    pool(devices=6)
    model("busy", 1)
    model("idle", 4, replicas_min=3, replicas_default=3)
    SOURCE.works = [work("busy", 9)]

    rebalancer.run_once(NOW)

    assert wanted() == {"busy": 3, "idle": 3}


def test_replicas_of_several_devices_move_whole() -> None:
    pool()
    model("large", 1, devices=4, replicas_max=1)
    model("small", 0)
    SOURCE.works = [work("small", 4)]

    rebalancer.run_once(NOW)

    assert wanted() == {"large": 0, "small": 4}

    SOURCE.works = [work("large", 1)]
    rebalancer.run_once(NOW + MINUTE)
    assert wanted() == {"large": 1, "small": 0}


def test_an_old_version_with_a_backlog_keeps_a_replica_and_asks_for_no_more() -> None:
    pool()
    busy, old = model("busy", 0), model("old", 4)
    for ordinal in range(4):
        server(old, ordinal, version="before" if ordinal < 2 else "now")
    for name, state in (("before", VersionState.RETIRING), ("now", VersionState.SERVING)):
        ModelVersion.objects.create(model=old, version=name, state=state, first_seen_at=NOW)
    SOURCE.works = [work("busy", 9, version=busy.version), work("old", 9, version="before")]

    rebalancer.run_once(NOW)

    assert wanted() == {"busy": 3, "old": 1}

    SOURCE.works = [work("busy", 9, version=busy.version)]
    rebalancer.run_once(NOW + MINUTE)
    assert wanted() == {"busy": 4, "old": 0}

    SOURCE.works = [work("old", 9, version="before")]
    rebalancer.run_once(NOW + 2 * MINUTE)
    assert wanted()["old"] >= 1, "it may be launched again"


def test_an_old_version_whose_rater_pauses_keeps_its_replica() -> None:
    pool()
    busy, old = model("busy", 0), model("old", 4)
    ModelVersion.objects.create(
        model=old, version="before", state=VersionState.RETIRING, replicas=1, first_seen_at=NOW
    )
    SOURCE.works = [work("busy", 9, version=busy.version)]

    rebalancer.run_once(NOW)

    assert wanted() == {"busy": 3, "old": 1}


def test_what_a_version_is_replaced_with_beside_it_is_nobody_elses() -> None:
    pool()
    busy, moving = model("busy", 1), model("moving", 2)
    for name, replicas in (("before", 2), ("now", 1)):
        ModelVersion.objects.create(
            model=moving, version=name, state="serving", replicas=replicas, first_seen_at=NOW
        )
    SOURCE.works = [work("busy", 9, version=busy.version), work("moving", 9, version="now")]

    rebalancer.run_once(NOW)

    assert services.devices_used("box") == 4
    assert sum(wanted().values()) == 3


def test_work_that_no_replica_would_do_asks_for_none() -> None:
    pool()
    model("gone", 1)
    SOURCE.works = [work("gone", 9, version="of another time")]

    rebalancer.run_once(NOW)

    assert wanted() == {"gone": 1}


def test_a_model_whose_replicas_fail_to_start_gets_no_more_of_them() -> None:
    pool()
    broken = model("broken", 1)
    model("idle", 3)
    server(
        broken, state=ServerState.FAILED, failures=2, ready_at=None, address="",
        next_start_at=NOW + MINUTE,
    )  # fmt: skip
    SOURCE.works = [work("broken", 9)]

    rebalancer.run_once(NOW)

    assert wanted() == {"broken": 1, "idle": 3}


def test_how_long_a_start_takes_is_remembered_for_when_there_is_no_replica() -> None:
    pool()
    fast = model("fast", 1, replicas_max=1)
    model("idle", 1, replicas_default=4)
    server(fast)
    rebalancer.run_once(NOW)
    ModelServer.objects.all().delete()

    fast.refresh_from_db()
    assert fast.start_up_s == 20

    # Done before a replica of unknown habits would serve, but not before this one does.
    ModelConfig.objects.filter(pk="fast").update(replicas_max=4)
    short = Work(model_id="fast", dues=[Due(deadline_at=NOW, work_s=5 * 60.0)])
    SOURCE.works = [short]
    rebalancer.run_once(NOW + MINUTE)
    assert wanted()["fast"] > 1

    ModelConfig.objects.filter(pk="fast").update(start_up_s=None, wanted_replicas=1)
    rebalancer.run_once(NOW + 2 * MINUTE)
    assert wanted()["fast"] == 1


class TestOperators:
    """What people decide stands."""

    def test_a_resize_is_not_undone_for_an_hour(self) -> None:
        pool()
        model("busy", 1)
        model("idle", 1)
        services.resize_model("idle", 3, now=NOW)
        SOURCE.works = [work("busy", 9, left_s=9 * HOUR_S)]

        rebalancer.run_once(NOW + MINUTE)
        assert wanted() == {"busy": 1, "idle": 3}
        assert "idle is pinned" in decided()[-1].reason

        rebalancer.run_once(NOW + services.PINNED_FOR)
        assert wanted() == {"busy": 4, "idle": 0}

    def test_unpinning_ends_it_early(self) -> None:
        pool()
        model("idle", 1)
        services.resize_model("idle", 3, now=NOW)

        unpinned = services.unpin_model("idle", now=NOW)

        assert not unpinned.is_pinned(NOW)

    def test_a_pinned_model_is_left_alone_for_good(self) -> None:
        pool()
        model("busy", 1)
        model("idle", 3, pinned=True)
        SOURCE.works = [work("busy", 9)]

        rebalancer.run_once(NOW + timedelta(days=9))

        assert wanted() == {"busy": 1, "idle": 3}

    def test_a_model_starts_with_what_is_free_where_replicas_move(self) -> None:
        pool(devices=2)
        model("busy", 2)
        model("late", 1)
        services.stop_model("late", now=NOW)

        started = services.start_model("late", now=NOW)

        assert (started.started, started.wanted_replicas) == (True, 0)

        SOURCE.works = [Work(model_id="late", other_s=1.0)]
        rebalancer.run_once(NOW)
        assert wanted() == {"busy": 1, "late": 1}


class TestSignal:
    """What models have to do is hearsay."""

    @pytest.mark.parametrize(
        ("changes", "outcome"),
        [
            ({"age": timedelta(seconds=121)}, Outcome.STALE_SIGNAL),
            ({"age": timedelta(seconds=-121)}, Outcome.STALE_SIGNAL),
            ({"age": None}, Outcome.NO_SIGNAL),
            ({"failure": KeyError("x")}, Outcome.NO_SIGNAL),
        ],
    )
    def test_without_a_signal_that_counts_nothing_moves(
        self, changes: dict[str, Any], outcome: Outcome
    ) -> None:
        pool()
        model("busy", 1)
        model("idle", 3)
        SOURCE.works = [work("busy", 9)]
        for name, value in changes.items():
            setattr(SOURCE, name, value)

        rebalancer.run_once(NOW)

        assert wanted() == {"busy": 1, "idle": 3}
        (decision,) = decided()
        assert (decision.outcome, decision.applied, decision.needs) == (outcome, False, {})
        assert decision.reason.endswith("nothing moves")

    @pytest.mark.parametrize("seconds", [-1.0, nan, inf, 1e300])
    def test_a_signal_that_cannot_be_is_not_gone_by(self, seconds: float) -> None:
        pool()
        model("busy", 1)
        SOURCE.works = [Work(model_id="busy", other_s=seconds)]

        rebalancer.run_once(NOW)

        assert wanted() == {"busy": 1}
        assert decided()[0].outcome == Outcome.WRONG_SIGNAL
        assert decided()[0].reason.startswith("busy cannot have work of")

    @pytest.mark.parametrize("name", ["", "nowhere.nothing"])
    def test_model_management_alone_moves_nothing(self, settings: Settings, name: str) -> None:
        settings.AIRS_DEMAND = name
        pool()
        model("busy", 1)

        rebalancer.run_once(NOW)

        assert decided()[0].outcome == Outcome.NO_SIGNAL

    def test_that_the_database_is_away_is_no_reason_to_go_on(self) -> None:
        pool()
        SOURCE.failure = OperationalError("gone")

        with pytest.raises(OperationalError):
            rebalancer.run_once(NOW)

    def test_a_signal_that_is_off_by_half_costs_little(self) -> None:
        pool(devices=8)
        model("one", 4, replicas_max=8, replicas_default=4)
        model("two", 4, replicas_max=8, replicas_default=4)

        # Both have to do what three replicas can; one is said to have twice that, one half.
        SOURCE.works = [work("one", 6), work("two", 1.5)]
        rebalancer.run_once(NOW)
        SOURCE.works = [work("one", 3), work("two", 3)]
        rebalancer.run_once(NOW + MINUTE)

        # The next right one mends it.
        assert min(wanted().values()) >= 3


class TestTicks:
    """Zero, one or two ticks are the same."""

    def test_a_second_tick_within_the_period_changes_nothing(self) -> None:
        pool(devices=40)
        model("busy", 1, replicas_max=40)
        model("idle", 39, replicas_max=40)
        SOURCE.works = [work("busy", 40)]

        rebalancer.run_once(NOW)
        first = wanted()
        assert rebalancer.run_once(NOW + timedelta(seconds=1)) == 0
        assert wanted() == first
        assert rebalancer.run_once(NOW + MINUTE) == 1

        assert wanted()["busy"] == first["busy"] + 10

    def test_one_whose_clock_was_set_back_goes_on(self) -> None:
        pool()
        model("busy", 1)

        rebalancer.run_once(NOW)

        assert rebalancer.run_once(NOW - timedelta(hours=1)) == 1

    @with_commits
    def test_of_two_ticks_at_once_one_decides(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool(devices=40)
        model("busy", 1, replicas_max=40)
        model("idle", 39, replicas_max=40)
        SOURCE.works = [work("busy", 40)]
        entered, left = threading.Event(), threading.Event()
        really_apply = rebalancer._apply

        def apply(*args: Any) -> None:
            entered.set()
            left.wait(10)
            really_apply(*args)

        monkeypatch.setattr(rebalancer, "_apply", apply)
        with threads(1) as others:
            first = others.submit(rebalancer.run_once, NOW)
            assert entered.wait(10)
            second = rebalancer.run_once(NOW)
            left.set()
            rounds = (first.result(10), second)

        assert rounds == (1, 0)
        assert wanted()["busy"] == 11
        assert len(decided()) == 1

    @with_commits
    def test_killed_between_its_writes_it_has_done_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Killed(BaseException):
            pass

        def die(*args: Any) -> bool:
            raise Killed

        pool()
        model("busy", 1)
        model("idle", 3)
        SOURCE.works = [work("busy", 4)]
        monkeypatch.setattr(decisions, "keep", die)

        with pytest.raises(Killed):
            rebalancer.run_once(NOW)

        assert wanted() == {"busy": 1, "idle": 3}
        assert not PoolOutlook.objects.exists()

        monkeypatch.undo()
        assert rebalancer.run_once(NOW) == 1
        assert wanted() == {"busy": 4, "idle": 0}

    def test_a_model_that_comes_to_the_pool_meanwhile_has_its_devices(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pool(devices=3)
        model("busy", 1)
        SOURCE.works = [work("busy", 9)]
        monkeypatch.setattr(rebalancer, "_measure", lambda found: model("late", 1))

        rebalancer.run_once(NOW)

        assert wanted() == {"busy": 2, "late": 1}

    @with_commits
    def test_a_resize_beside_a_round_gets_no_device_twice(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pool()
        model("busy", 1)
        model("idle", 1)
        SOURCE.works = [work("busy", 3)]
        locked, left = threading.Event(), threading.Event()
        really_measure = rebalancer._measure

        def measure(*args: Any) -> None:
            locked.set()
            left.wait(10)
            really_measure(*args)

        monkeypatch.setattr(rebalancer, "_measure", measure)
        with threads(2) as others:
            round_ = others.submit(rebalancer.run_once, NOW)
            assert locked.wait(10)
            resize = others.submit(services.resize_model, "idle", 3, now=NOW)
            left.set()
            round_.result(10)
            refused = resize.exception(10)

        assert refused is not None
        assert wanted() == {"busy": 4, "idle": 0}


class TestHistory:
    """Decisions are kept as far as they say anything new."""

    def test_rounds_without_news_are_kept_each_ten_minutes(self) -> None:
        pool()
        model("busy", 1)
        for minute in range(21):
            SOURCE.age = timedelta(seconds=minute)
            rebalancer.run_once(NOW + minute * MINUTE)

        assert [decision.at for decision in decided()] == [
            NOW, NOW + 10 * MINUTE, NOW + 20 * MINUTE
        ]  # fmt: skip
        assert PoolOutlook.objects.get().at == NOW + 20 * MINUTE

    def test_another_reason_is_news(self) -> None:
        pool()
        model("busy", 1)
        rebalancer.run_once(NOW)
        SOURCE.age = timedelta(seconds=200)
        rebalancer.run_once(NOW + MINUTE)
        SOURCE.age = timedelta(seconds=260)
        rebalancer.run_once(NOW + 2 * MINUTE)
        SOURCE.age = timedelta(seconds=0)
        rebalancer.run_once(NOW + 3 * MINUTE)

        assert [decision.outcome for decision in decided()] == ["steady", "stale_signal", "steady"]

    def test_old_decisions_are_erased(self, settings: Settings) -> None:
        settings.AIRS_KEEP_DECISIONS = timedelta(days=2)
        pool()
        model("busy", 1)
        rebalancer.run_once(NOW)

        rebalancer.run_once(NOW + timedelta(days=1))
        rebalancer.run_once(NOW + timedelta(days=2, seconds=1))

        assert [decision.at for decision in decided()] == [
            NOW + timedelta(days=1),
            NOW + timedelta(days=2, seconds=1),
        ]

    def test_they_are_erased_where_no_pool_is_rebalanced_any_more(self) -> None:
        pool()
        model("busy", 1)
        rebalancer.run_once(NOW)
        services.change_pool("box", {"rebalancing": Rebalancing.OFF})

        rebalancer.run_once(NOW + timedelta(days=31))

        assert not RebalanceDecision.objects.exists()


class TestProspects:
    """Forecasts plan with what others do not need, where replicas move."""

    def test_what_others_do_not_need_can_be_reached(self) -> None:
        pool(devices=8)
        busy = model("busy", 1, devices=2)
        model("other", 1, devices=2)
        model("pinned", 1, pinned=True)
        server(busy)
        SOURCE.works = [work("other", 1)]
        rebalancer.run_once(NOW)

        # Of eight devices the others need two and one.
        assert directory.reachable("busy", busy.version, NOW) == 2.5

    def test_never_less_than_it_has_nor_more_than_its_maximum(self) -> None:
        pool(devices=9)
        busy = model("busy", 2)
        model("other", 2, replicas_max=9)
        server(busy, 0)
        server(busy, 1)
        SOURCE.works = [work("other", 8.5)]
        rebalancer.run_once(NOW)
        assert directory.reachable("busy", busy.version, NOW) == 2

        SOURCE.works = []
        rebalancer.run_once(NOW + MINUTE)
        assert directory.reachable("busy", busy.version, NOW) == 4

    @pytest.mark.parametrize("why", ["off", "dry_run", "pinned", "stopped", "silent", "long ago"])
    def test_where_nothing_would_move_it_is_what_there_is(self, why: str) -> None:
        pool()
        busy = model("busy", 1)
        server(busy)
        rebalancer.run_once(NOW)
        assert directory.reachable("busy", busy.version, NOW) == 4
        now = NOW
        match why:
            case "off" | "dry_run":
                services.change_pool("box", {"rebalancing": why})
            case "pinned":
                services.resize_model("busy", 1, now=NOW)
            case "stopped":
                services.stop_model("busy", now=NOW)
            case "silent":
                SOURCE.age = None
                rebalancer.run_once(NOW + MINUTE)
            case "long ago":
                now = NOW + timedelta(minutes=5)
                ModelServer.objects.update(heartbeat_at=now)

        assert directory.reachable("busy", busy.version, now) == 1

    def test_an_old_version_has_what_it_has(self) -> None:
        pool()
        busy = model("busy", 1)
        server(busy, version="before")
        rebalancer.run_once(NOW)

        assert directory.reachable("busy", "before", NOW) == 1


_pools = count()
demands = st.one_of(
    st.just(0.0), st.floats(0, 1e6), st.sampled_from([-1.0, nan, inf, 1e11])
)  # fmt: skip
_model = st.fixed_dictionaries(
    {
        "replicas": st.integers(0, 3),
        "devices": st.sampled_from([1, 1, 2, 4]),
        "least": st.integers(0, 1),
        "pinned": st.sampled_from([False, False, True]),
    }
)


@laws(max_examples=25)
@given(
    st.lists(_model, min_size=1, max_size=4),
    st.integers(0, 5),
    st.lists(st.lists(demands, min_size=4, max_size=4), min_size=1, max_size=4),
)
def test_devices_are_conserved_whatever_is_said(
    shapes: list[dict[str, Any]], free: int, rounds: list[list[float]]
) -> None:
    name = f"pool{next(_pools)}"
    # Those of the examples before are not of this one.
    AcceleratorPool.objects.update(rebalancing=Rebalancing.OFF)
    used = sum(max(each["replicas"], each["least"]) * each["devices"] for each in shapes)
    pool(devices=max(1, used + free), name=name)
    for number, shape in enumerate(shapes):
        model(
            f"{name}-{number}",
            max(shape["replicas"], shape["least"]),
            devices=shape["devices"],
            pool=None,
            replicas_min=shape["least"],
            pinned=shape["pinned"],
        )
    mine = ModelConfig.objects.filter(pk__startswith=f"{name}-")
    mine.update(pool=name)
    before = {each.pk: each.wanted_replicas for each in mine}
    for minute, said in enumerate(rounds):
        SOURCE.works = [
            Work(
                model_id=f"{name}-{number}",
                dues=[Due(deadline_at=NOW + timedelta(hours=number), work_s=work_s)],
            )
            for number, work_s in enumerate(said)
        ]

        rebalancer.run_once(NOW + minute * MINUTE)

        assert services.devices_used(name) <= max(1, used + free)
        for each in mine.all():
            assert each.replicas_min <= each.wanted_replicas <= each.replicas_max
            assert not each.pinned or each.wanted_replicas == before[each.pk]
