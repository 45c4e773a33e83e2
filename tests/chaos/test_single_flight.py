"""Single flight under stress: a fingerprint is predicted once, whoever else wants it meanwhile.

Twenty equal workflows, in sessions of their own, while owners pause, cancel and retry them,
executors die before and after their calls, and the model fails some items once and others for good;
and once more while the rater gets a new version and the old one is retired. And what urgent work
may wait for: an equal item that was claimed before, until that lease ends; no more.
"""

import random
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import pytest

from fulfillment import leases, raters
from fulfillment.clock import database_now
from fulfillment.models import Batch, RaterVersion, Rating, RatingRequest, Workflow
from fulfillment.policy.lifecycle import BatchState, RequestState, Source, WorkflowState
from tests.builders import RATER
from tests.chaos.scenes import names
from tests.chaos.world import CALL, Executor, World
from tests.rating_queue import Replica, end_pauses, threads, until

pytestmark = pytest.mark.django_db(transaction=True)

WORKFLOWS = 20
ROWS = 36


class Mortal(Executor):
    """An executor that dies at times: before the model is asked, or after it has answered."""

    def __init__(self, world: World, chance: random.Random) -> None:
        super().__init__(model=world.model)
        self.chance = chance
        self.lost: Counter[str] = Counter()
        """Predictions that died with it, by fingerprint."""

    def rate(self, batches: Sequence[tuple[int, int]], *, task_id: uuid.UUID | None = None) -> None:
        fate = self.chance.random()
        if fate < 0.05:
            leases.take_over(batches, boot_id=self.boot_id, task_id=uuid.uuid4(), call_limit=CALL)
            return
        if fate < 0.1:
            before = Counter(self.model.computed)
            for taken in leases.take_over(
                batches, boot_id=self.boot_id, task_id=uuid.uuid4(), call_limit=CALL
            ):
                self.rated(taken)
            self.lost += self.model.computed - before
            return
        super().rate(batches, task_id=task_id)


class Storm:
    """Clients, a dispatcher, an executor and a meddler, each in a thread, until it is over."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seed = random.Random(20_261_130)
        self.rows = [*names("t", ROWS), *names("t", 2, "bad"), *names("t", 3, "flaky")]
        self.executor = world.executor = Mortal(world, self.seed)
        self.made: list[Workflow] = []
        self.retried = 0
        self.over = threading.Event()
        # One at a time asks the model, so that what one of them lost can be told.
        self.alone = threading.Lock()

    @contextmanager
    def blowing(self) -> Iterator[Callable[[Sequence[int]], None]]:
        """Give how to submit workflows; all rage until the block ends."""
        with threads(7) as pool:
            steps = (self.dispatch, self.rate, self.meddle)
            loops = [pool.submit(self.until_over, step) for step in steps]

            def submit(numbers: Sequence[int]) -> None:
                for future in [pool.submit(self.submit, number) for number in numbers]:
                    future.result(30)

            try:
                yield submit
            finally:
                self.over.set()
                turns = [future.result(30) for future in loops]
        assert min(turns) > 5, turns

    def until_over(self, step: Callable[[], None]) -> int:
        turns = 0
        while not self.over.is_set():
            step()
            turns += 1
        return turns

    def submit(self, number: int) -> None:
        shuffled = self.rows[:]
        random.Random(number).shuffle(shuffled)
        self.made.append(self.world.submit(shuffled, batch_size=3, priority=10 + 4 * number))

    def dispatch(self) -> None:
        fate = self.seed.random()
        if fate < 0.1:
            with self.alone:  # the broker forgets, and pick-up leases end
                self.world.messages.clear()
                leases.expire(now=database_now() + leases.PICK_UP, trust_heartbeats=False)
        elif fate < 0.3:
            with self.alone:  # what a dead executor held; a living one holds nothing now
                self.world.messages.clear()
                self.world.expire_leases()
        end_pauses()
        self.world.dispatch()
        self.over.wait(0.001)

    def rate(self) -> None:
        with self.alone:
            if self.world.messages:
                self.world.messages, taken = self.world.messages[1:], self.world.messages[0]
                self.executor.rate(taken)
        self.over.wait(0.001)

    def meddle(self) -> None:
        """Act upon a workflow, whatever its state: a fourth of them may be cancelled."""
        if self.made:
            what = self.seed.choice(["pause", "resume", "resume", "cancel", "retry"])
            number = self.seed.randrange(len(self.made))
            if what != "cancel" or number % 4 == 0:
                answer = self.world.act(self.made[number], what)
                assert answer.status_code in {200, 202, 409}, answer.content
                self.retried += what == "retry" and answer.status_code != 409
        self.over.wait(0.01)

    def calm(self) -> None:
        """Let all that goes on come to its end, without further harm."""
        for workflow in self.made:
            self.world.act(workflow, "resume")
        self.world.executor = Executor(model=self.world.model)
        self.world.dispatcher.fleet.live = [Replica(window=64)]
        self.world.settle()

    def costs_one_prediction_each(self) -> None:
        """Assert that each fingerprint was computed once, but for what died before it was told."""
        kept = self.world.model.computed - self.executor.lost
        stored = Counter(f.hex for f in Rating.objects.values_list("fingerprint", flat=True))
        assert kept == stored
        assert set(stored.values()) == {1}
        scores = RatingRequest.objects.filter(state=RequestState.COMPLETED)
        told = scores.values_list("fingerprint", "score").distinct()
        assert len(told) == len({fingerprint for fingerprint, _ in told})
        assert scores.filter(source=Source.MODEL).count() <= len(stored)


@pytest.fixture
def storm(world: World) -> Storm:
    world.dispatcher.fleet.live = [Replica(window=6)]
    return Storm(world)


def test_twenty_equal_workflows_cost_one_prediction_a_fingerprint(storm: Storm) -> None:
    with storm.blowing() as submit:
        submit(range(WORKFLOWS))
        until(
            lambda: storm.retried > 2 and Rating.objects.count() > ROWS // 2,
            what="half of it is rated, and some of it was retried",
        )
    storm.calm()

    storm.costs_one_prediction_each()
    assert Rating.objects.count() == ROWS + 3
    states = Counter(Workflow.objects.values_list("state", flat=True))
    assert set(states) <= {WorkflowState.PARTIAL, WorkflowState.CANCELLED}
    assert states[WorkflowState.PARTIAL] >= WORKFLOWS - 5


def test_a_version_that_is_retired_meanwhile_costs_no_prediction_twice(storm: Storm) -> None:
    fleet = storm.world.dispatcher.fleet
    fleet.live = []
    with storm.blowing() as submit:
        submit(range(WORKFLOWS // 2))
        fleet.live = [Replica(window=2)]
        until(lambda: Rating.objects.count() > 3, what="the old version is rated by")
        with storm.alone:  # before all of it is
            raters.change(rater_id=RATER, changes={"config": {"n": 2}}, now=database_now())
            old, new = RaterVersion.objects.order_by("number")
            answer = storm.world.operator.post(f"/raters/{RATER}/versions/{old.number}/retire")
        assert answer.status_code == 200, answer.content
        fleet.live = [Replica(window=6)]
        submit(range(WORKFLOWS // 2, WORKFLOWS))
        until(
            lambda: storm.retried > 2 and Rating.objects.filter(rater_version=new).count() > 9,
            what="the new version is rated by, and some was retried",
        )
    storm.calm()

    storm.costs_one_prediction_each()
    assert Rating.objects.filter(rater_version=old).count() < ROWS + 3
    assert Rating.objects.filter(rater_version=new).count() == ROWS + 3
    of_old = RatingRequest.objects.filter(workflow__rater_version=old)
    assert of_old.filter(error="version_retired").exists()
    states = Counter(Workflow.objects.filter(rater_version=new).values_list("state", flat=True))
    assert set(states) <= {WorkflowState.PARTIAL, WorkflowState.CANCELLED}
    assert states[WorkflowState.PARTIAL] >= WORKFLOWS // 2 - 3


@pytest.fixture
def backlog(world: World) -> Workflow:
    """A low-priority workflow of 60 batches, two of which are claimed: half a credit."""
    world.dispatcher.fleet.live = [Replica(window=2)]
    workflow = world.submit(names("b", 120), batch_size=2, priority=5)
    world.dispatch()
    assert Batch.objects.filter(state=BatchState.LEASED).count() == 2
    return workflow


def ended(workflow: Workflow) -> bool:
    workflow.refresh_from_db()
    return workflow.finished_at is not None


def test_urgent_work_goes_before_equal_work_that_waits_in_a_backlog(
    world: World, backlog: Workflow
) -> None:
    urgent = world.submit(names("b", 120)[100:102], batch_size=2, priority=95)

    world.deliver()
    world.dispatch()
    world.deliver()

    assert ended(urgent)
    assert {r.source for r in RatingRequest.objects.filter(workflow=urgent)} == {Source.MODEL}
    assert not ended(backlog)
    world.settle()
    assert world.model.again() == 0


def test_urgent_work_waits_for_an_equal_item_that_is_claimed_and_for_nothing_else(
    world: World, backlog: Workflow
) -> None:
    urgent = world.submit([*names("b", 120)[:2], *names("u", 2)], batch_size=4, priority=95)
    world.dispatcher.fleet.live = [Replica(window=3)]

    world.dispatch()
    (batch,) = Batch.objects.filter(workflow=urgent)
    assert batch.state == BatchState.LEASED
    assert batch.sent_mask.bit_count() == 2
    world.deliver()
    world.dispatch()

    assert ended(urgent) or not Batch.objects.exclude(state=BatchState.DONE).filter(workflow=urgent)
    world.settle()
    assert world.model.again() == 0


def test_urgent_work_waits_for_a_lost_executor_until_its_lease_ends(
    world: World, backlog: Workflow
) -> None:
    claimed = [pair for message in world.messages for pair in message]
    world.messages = []
    leases.take_over(claimed, boot_id=world.executor.boot_id, task_id=uuid.uuid4(), call_limit=CALL)
    urgent = world.submit(names("b", 120)[:4], batch_size=4, priority=95)
    world.dispatcher.fleet.live = [Replica(window=3)]
    world.dispatch()
    assert Batch.objects.get(workflow=urgent).state == BatchState.WAITING

    world.dispatcher.fleet.live = [Replica(window=8)]
    leased = Batch.objects.filter(workflow=backlog, state=BatchState.LEASED)
    last = max(batch.lease_until for batch in leased if batch.lease_until)
    leases.expire(now=last + timedelta(seconds=1), trust_heartbeats=False)
    world.dispatch()
    world.deliver()

    assert ended(urgent)
    assert not ended(backlog)


def test_urgent_work_does_not_wait_for_the_back_off_of_an_equal_item(world: World) -> None:
    slow = world.submit(names("x", 2, "flaky"), batch_size=2, priority=5)
    world.dispatch()
    urgent = world.submit(names("x", 2, "flaky"), batch_size=2, priority=95)
    world.dispatch()
    assert Batch.objects.get(workflow=urgent).state == BatchState.WAITING

    world.deliver()
    assert Batch.objects.get(workflow=slow).state == BatchState.DELAYED
    world.dispatch()
    world.deliver()

    assert ended(urgent)
    assert not ended(slow)
    end_pauses()
    world.dispatch()
    assert ended(slow)
    assert set(world.model.predictions.values()) == {1}


@pytest.mark.parametrize("act", ["cancel", "pause"])
def test_an_end_or_a_pause_of_the_first_does_not_hold_up_its_followers(
    world: World, act: str
) -> None:
    first = world.submit(names("f", 6), batch_size=3)
    world.dispatcher.fleet.live = [Replica(window=1)]
    world.dispatch()
    follower = world.submit(names("f", 6), batch_size=3)

    assert world.act(first, act).status_code == 200
    world.dispatcher.fleet.live = [Replica(window=64)]
    for _ in range(3):
        world.dispatch()
        world.deliver()
    # Its message found nothing to take over: its pick-up lease ends after 15 s at the latest.
    leases.expire(now=database_now() + leases.PICK_UP, trust_heartbeats=True)
    world.dispatch()
    world.deliver()

    assert ended(follower)
    assert {r.state for r in RatingRequest.objects.filter(workflow=follower)} == {
        RequestState.COMPLETED
    }
    assert world.model.again() == 0
