"""What models have to do, as fulfillment tells it: from forecasts, and from what has none."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from fulfillment import commitments, model_demand, promises, recovery
from fulfillment.clock import database_now
from fulfillment.model_demand import Due, VersionDemand
from fulfillment.models import Rater, RaterCost, Workflow, WorkflowForecast
from fulfillment.policy.lifecycle import BatchState, EndingReason, WorkflowState
from models_admin import rebalancer, services
from models_admin.models import AcceleratorPool, ModelConfig, RebalanceDecision, Rebalancing
from models_admin.policy.traffic_rules import Rule
from tests import builders
from tests.builders import DIRECTORY, MODEL, NOW, RATER
from tests.rating_queue import Replica

pytestmark = pytest.mark.django_db

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)


class Ruled(builders.Directory):
    """A directory with traffic rules."""

    def limits(self, now: datetime) -> Sequence[Rule]:
        return RULES


RULES: list[Rule] = []
RULED = Ruled()


@pytest.fixture
def rules(settings: Settings) -> Iterator[list[Rule]]:
    """Let traffic rules hold that the test says."""
    RULED.models, RULED.live = DIRECTORY.models, DIRECTORY.live
    settings.AIRS_MODEL_DIRECTORY = f"{__name__}.RULED"
    yield RULES
    RULES.clear()


@pytest.fixture(autouse=True)
def _fleet(settings: Settings, tmp_path: Path) -> Iterator[None]:
    """One live replica, and a rater of batches of ten."""
    settings.AIRS_SPOOL = tmp_path / "spool"
    builders.use_plugins(settings)
    DIRECTORY.live = [Replica()]
    builders.version(builders.rater(batch_size=10))
    yield
    DIRECTORY.live = []


def cost(seconds_a_batch: float = 1.0, rater_id: str = RATER) -> None:
    """Store what a batch of ten takes."""
    RaterCost.objects.create(
        rater_id=rater_id,
        seconds_a_request=seconds_a_batch / 10,
        call_seconds_a_request=seconds_a_batch,
        requests=1_000,
        exact=True,
        measured_at=NOW,
        read_to=NOW,
        servers=1,
        looked_at=NOW,
    )


def workflow(batches: float, *, deadline: timedelta = HOUR, **changes: Any) -> Workflow:
    """Store a workflow with so many open batches of ten."""
    fields: dict[str, Any] = {
        "stats": {"received": round(batches * 10)},
        "deadline_at": NOW + deadline,
        "batch_size": 10,
        "started_at": NOW,
        **changes,
    }
    return builders.workflow(**fields)


def demanded(now: datetime = NOW) -> dict[tuple[str, str], VersionDemand]:
    return {(each.model_id, each.version): each for each in model_demand.demand(now).versions}


def test_what_is_forecast_is_due_at_its_deadline() -> None:
    cost(2.0)
    of = workflow(100)
    for number in range(4):
        builders.batch(of, [number], state=BatchState.LEASED)
    commitments.run_once(NOW)

    (found,) = demanded().values()

    assert (found.model_id, found.version) == (MODEL, "v1")
    # Of four batches that are out, two are done on average.
    assert found.dues == [Due(deadline_at=NOW + HOUR, work_s=2 * (96 + 2))]
    assert found.other_s == 0


def test_what_is_cut_needs_somebody_but_no_speed() -> None:
    cost(1.0)
    workflow(9_000)
    commitments.run_once(NOW)

    (found,) = demanded().values()

    assert [due.work_s for due in found.dues] == [0]
    assert found.other_s == 9_000


def test_a_deadline_that_was_moved_counts_as_it_is_now() -> None:
    cost(1.0)
    of = workflow(100)
    commitments.run_once(NOW)
    Workflow.objects.filter(pk=of.pk).update(deadline_at=NOW + 2 * HOUR)

    (found,) = demanded().values()

    assert found.dues[0].deadline_at == NOW + 2 * HOUR


def test_work_is_due_when_its_workflow_ends_if_that_is_sooner() -> None:
    cost(1.0)
    workflow(100, ends_at=NOW + HOUR / 2)
    commitments.run_once(NOW)

    (found,) = demanded().values()

    assert found.dues[0].deadline_at == NOW + HOUR / 2


def test_raters_of_one_model_version_are_one_and_other_versions_apart() -> None:
    cost(1.0)
    other = builders.rater("other", batch_size=10)
    same = builders.version(other)
    newer = builders.version(other, number=2, model_version="v2\tlabel")
    cost(1.0, "other")
    DIRECTORY.live = [Replica(), Replica(key="r2", version="v2\tlabel")]
    workflow(10)
    workflow(20, of=same)
    workflow(40, of=newer)
    commitments.run_once(NOW)

    found = demanded()

    assert sorted(due.work_s for due in found[MODEL, "v1"].dues) == [10, 20]
    assert [due.work_s for due in found[MODEL, "v2\tlabel"].dues] == [40]


def test_work_without_a_forecast_is_due_as_far_as_one_replica_could_do_it() -> None:
    # No replica lives: nothing is forecast.
    DIRECTORY.live = []
    cost(2.0)
    workflow(2_000)
    workflow(100, deadline=HOUR / 2)
    commitments.run_once(NOW)

    (found,) = demanded().values()

    assert not WorkflowForecast.objects.exists()
    assert found.dues == [
        Due(deadline_at=NOW + HOUR / 2, work_s=200),
        Due(deadline_at=NOW + HOUR, work_s=3_400),
    ]
    assert found.other_s == pytest.approx(600)


def test_deadlines_decide_who_has_the_only_replica_of_a_pool() -> None:
    services.register_pool(AcceleratorPool(id="box", devices=1, rebalancing=Rebalancing.ON))
    for name in ("holds", MODEL):
        services.register_model(
            name, now=NOW, kind="hosted", checkpoint="tiny:0", pool="box", replicas_default=1
        )
        services.start_model(name, now=NOW)
    version = services.find_model(MODEL).version
    holder = builders.rater("holder", batch_size=10, model_id="holds")
    its = builders.version(holder, model_version=services.find_model("holds").version)
    waits = builders.version(Rater.objects.get(pk=RATER), number=2, model_version=version)
    DIRECTORY.live = []
    cost(1.0)
    cost(1.0, "holder")
    now = database_now()
    workflow(20_000, of=its, deadline_at=now + 48 * HOUR, started_at=now)
    workflow(2_700, of=waits, deadline_at=now + HOUR, started_at=now)
    recovery.run(commitments.SERVICE, now)

    rebalancer.run_once(now)

    assert not WorkflowForecast.objects.exists()
    assert ModelConfig.objects.get(pk=MODEL).wanted_replicas == 1


def test_work_of_a_rater_that_was_never_measured_is_a_little() -> None:
    workflow(1_000)
    commitments.run_once(NOW)

    (found,) = demanded().values()

    assert found.other_s == model_demand.UNKNOWN_S


def test_a_forecast_that_nobody_renewed_says_nothing_any_more() -> None:
    cost(2.0)
    workflow(100)
    commitments.run_once(NOW)

    (found,) = demanded(NOW + promises.BELIEVED).values()

    # It is as without one.
    assert found.dues == [Due(deadline_at=NOW + HOUR, work_s=200)]


@pytest.mark.parametrize("has_forecast", [False, True])
@pytest.mark.parametrize("why", ["paused", "its rater paused", "late", "nothing open", "ending"])
def test_what_is_not_sent_asks_for_nobody(why: str, has_forecast: bool) -> None:
    cost(1.0)
    of = workflow(100)
    if has_forecast:
        commitments.run_once(NOW)
    stored = Workflow.objects.filter(pk=of.pk)
    now = NOW
    match why:
        case "paused":
            stored.update(state=WorkflowState.PAUSED)
        case "its rater paused":
            Rater.objects.update(paused_at=NOW, paused_code="x")
        case "late":
            now = NOW + HOUR
            WorkflowForecast.objects.update(made_at=now)
        case "nothing open":
            stored.update(finished_at=NOW, state=WorkflowState.COMPLETED)
        case "ending":
            stored.update(state=WorkflowState.ENDING, ending_reason=EndingReason.CANCELLED)

    assert demanded(now) == {}


@pytest.mark.parametrize("has_forecast", [False, True])
def test_what_a_traffic_rule_blocks_asks_for_nobody(has_forecast: bool, rules: list[Rule]) -> None:
    cost(1.0)
    workflow(100, owner="ann")
    bobs = workflow(10, owner="bob")
    if has_forecast:
        commitments.run_once(NOW)
    rules.append(Rule(name="night", owner="ann", block=True))

    (found,) = demanded().values()

    assert sum(due.work_s for due in found.dues) + found.other_s == pytest.approx(10.0)
    WorkflowForecast.objects.all().delete()
    commitments.run_once(NOW)
    assert [each.workflow_id for each in WorkflowForecast.objects.all()] == [bobs.pk]
    # Under load alone it waits for its turn, and is work.
    rules[0] = replace(rules[0], min_load=0.5)
    commitments.run_once(NOW)
    assert WorkflowForecast.objects.count() == 2


def test_a_newcomer_that_is_blocked_is_promised_nothing(rules: list[Rule]) -> None:
    cost(1.0)
    rules.append(Rule(name="night", owner="ann", block=True))
    for owner, expected in (("ann", False), ("bob", True)):
        came = workflow(10, owner=owner)
        etas: commitments.Etas = {False: None, True: None}
        said = commitments.admit(came, pending=100, accepted=100, etas=etas, now=NOW)
        assert (said is not None) == expected


def test_it_is_as_old_as_the_last_run_of_the_forecasts() -> None:
    assert model_demand.demand(NOW).measured_at is None

    now = database_now()
    recovery.run(commitments.SERVICE, now)

    assert model_demand.demand(NOW).measured_at == now


def test_open_workflows_move_replicas_to_their_model() -> None:
    services.register_pool(AcceleratorPool(id="box", devices=4, rebalancing=Rebalancing.ON))
    for name, replicas in ((MODEL, 1), ("idle", 3)):
        services.register_model(
            name,
            now=NOW,
            kind="hosted",
            checkpoint="tiny:0",
            pool="box",
            replicas_default=replicas,
            replicas_max=4,
        )
        services.start_model(name, now=NOW)
    version = services.find_model(MODEL).version
    DIRECTORY.live = [Replica(version=version)]
    of = builders.version(Rater.objects.get(pk=RATER), number=2, model_version=version)
    cost(1.0)
    now = database_now()
    RaterCost.objects.update(looked_at=now, measured_at=now, read_to=now)
    # Three do it in a quarter of an hour.
    workflow(2_700, of=of, deadline_at=now + HOUR, started_at=now)
    recovery.run(commitments.SERVICE, now)

    rebalancer.run_once(now)

    assert ModelConfig.objects.get(pk=MODEL).wanted_replicas == 3
    assert RebalanceDecision.objects.get().applied


class TestBacklog:
    """What keeps a replica of an old version."""

    def test_work_that_nobody_may_do_just_now_is_not_forgotten(self) -> None:
        paused = builders.version(builders.rater("paused", paused_at=NOW), model_version="v0")
        workflow(1, of=paused)
        late = builders.version(Rater.objects.get(pk="paused"), number=2, model_version="late")
        workflow(2, of=late, deadline=-HOUR)

        assert model_demand.backlog(NOW) == {(MODEL, "v0"): 10, (MODEL, "late"): 20}

    def test_what_is_done_is_none_and_a_started_try_of_what_ended_is(self) -> None:
        done = workflow(1, stats={"received": 10, "completed": 7, "cancelled": 3})
        assert model_demand.backlog(NOW) == {}

        Workflow.objects.filter(pk=done.pk).update(state=WorkflowState.COMPLETED, finished_at=NOW)
        builders.batch(done, [0], state=BatchState.LEASED, open_mask=0)

        assert model_demand.backlog(NOW) == {(MODEL, "v1"): 1}

    def test_an_upload_that_is_still_received_counts(self) -> None:
        workflow(0, state=WorkflowState.RECEIVING)

        assert model_demand.backlog(NOW) == {(MODEL, "v1"): 1}
