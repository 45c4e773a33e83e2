"""Single flight under stress: a fingerprint is predicted once, whoever else wants it meanwhile.

Twenty equal workflows, in sessions of their own, while owners pause and cancel them, executors die
before and after their calls, and the model fails some items once and others for good. And what
urgent work may wait for: an equal item that was claimed before, until that lease ends; no more.
"""

import random
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest

from fulfillment import leases
from fulfillment.clock import database_now
from fulfillment.models import Batch, Rating, RatingRequest, Workflow
from fulfillment.policy.lifecycle import BatchState, RequestState, Source, WorkflowState
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
        """Predictions that died with it."""

    def rate(self, batches: Sequence[tuple[int, int]], *, task_id: uuid.UUID | None = None) -> None:
        fate = self.chance.random()
        if fate < 0.05:
            leases.take_over(batches, boot_id=self.boot_id, task_id=uuid.uuid4(), call_limit=CALL)
            return
        if fate < 0.1:
            before = Counter(self.model.predictions)
            for taken in leases.take_over(
                batches, boot_id=self.boot_id, task_id=uuid.uuid4(), call_limit=CALL
            ):
                self.rated(taken)
            self.lost += self.model.predictions - before
            return
        super().rate(batches, task_id=task_id)


def test_twenty_equal_workflows_cost_one_prediction_a_fingerprint(world: World) -> None:
    seed = random.Random(20_261_130)
    rows = [*names("t", ROWS), *names("t", 2, "bad"), *names("t", 3, "flaky")]
    world.dispatcher.fleet.live = [Replica(window=6)]
    # One at a time asks the model, so that what one of them lost can be told.
    executor = Mortal(world, seed)
    world.executor = executor
    made: list[Workflow] = []
    over = threading.Event()

    def until_over(step: Callable[[], None]) -> Callable[[], int]:
        def loop() -> int:
            turns = 0
            while not over.is_set():
                step()
                turns += 1
            return turns

        return loop

    def submit(number: int) -> None:
        shuffled = rows[:]
        random.Random(number).shuffle(shuffled)
        made.append(world.submit(shuffled, batch_size=3, priority=10 + 4 * number))

    def dispatch() -> None:
        fate = seed.random()
        if fate < 0.1:
            with alone:  # the broker forgets, and pick-up leases end
                world.messages.clear()
                leases.expire(now=database_now() + leases.PICK_UP, trust_heartbeats=False)
        elif fate < 0.3:
            with alone:  # what a dead executor held; a living one holds nothing now
                world.messages.clear()
                world.expire_leases()
        end_pauses()
        world.dispatch()
        over.wait(0.001)

    def rate() -> None:
        with alone:
            if world.messages:
                world.messages, taken = world.messages[1:], world.messages[0]
                executor.rate(taken)
        over.wait(0.001)

    def meddle() -> None:
        if made:
            what = seed.choice(["pause", "resume", "resume", "cancel"])
            choice = made[seed.randrange(len(made))]
            if what != "cancel" or choice in made[:5]:
                world.act(choice, what)
        over.wait(0.01)

    alone = threading.Lock()
    with threads(7) as pool:
        loops = [pool.submit(until_over(step)) for step in (dispatch, rate, meddle)]
        try:
            for future in [pool.submit(submit, number) for number in range(WORKFLOWS)]:
                future.result(30)
            until(lambda: Rating.objects.count() > ROWS // 2, what="half of it is rated")
        finally:
            over.set()
            turns = [future.result(30) for future in loops]
    assert min(turns) > 5, turns
    for workflow in made:
        world.act(workflow, "resume")
    world.executor = Executor(model=world.model)
    world.dispatcher.fleet.live = [Replica(window=64)]
    world.settle()

    asked = world.model.predictions
    assert {name: asked[name] - executor.lost[name] for name in rows} == {
        name: 0 if name.startswith("bad") else 1 for name in rows
    }
    assert Rating.objects.count() == ROWS + 3
    states = Counter(Workflow.objects.values_list("state", flat=True))
    assert set(states) <= {WorkflowState.PARTIAL, WorkflowState.CANCELLED}
    assert states[WorkflowState.PARTIAL] >= WORKFLOWS - 5
    scores = RatingRequest.objects.filter(state=RequestState.COMPLETED)
    assert scores.values("fingerprint", "score").distinct().count() == ROWS + 3
    assert scores.filter(source=Source.MODEL).count() <= ROWS + 3


@pytest.fixture
def backlog(world: World) -> Workflow:
    """A low-priority workflow of 60 batches, three of which are claimed."""
    world.dispatcher.fleet.live = [Replica(window=3)]
    workflow = world.submit(names("b", 120), batch_size=2, priority=5)
    world.dispatch()
    assert Batch.objects.filter(state=BatchState.LEASED).count() == 3
    return workflow


def ended(workflow: Workflow) -> bool:
    workflow.refresh_from_db()
    return workflow.finished_at is not None


def test_urgent_work_goes_before_equal_work_that_waits_in_a_backlog(
    world: World, backlog: Workflow
) -> None:
    urgent = world.submit(names("b", 120)[100:104], batch_size=2, priority=95)

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
    world.dispatcher.fleet.live = [Replica(window=4)]

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
    urgent = world.submit(names("b", 120)[:6], batch_size=6, priority=95)
    world.dispatcher.fleet.live = [Replica(window=4)]
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
