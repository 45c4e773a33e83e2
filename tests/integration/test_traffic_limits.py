"""Traffic rules in the dispatcher: what they forbid does not leave, and nothing else waits."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from fulfillment import held, leases, ready, standings
from fulfillment.clock import database_now
from fulfillment.models import Batch, Workflow
from fulfillment.policy import limits
from fulfillment.policy.lifecycle import BatchState
from fulfillment.policy.priority import PriorityClass, celery_priority
from models_admin.models import TrafficRule
from models_admin.policy.traffic_rules import Rule
from tests import builders
from tests.rating_queue import Fleet, Queue, Replica, boot, rated, rater, submit, take

pytestmark = pytest.mark.django_db

HIGH, MIDDLE, LOW = 90, 50, 10


@dataclass(kw_only=True, slots=True)
class Ruled(Fleet):
    """A fleet with traffic rules."""

    rules: Sequence[Rule] = ()
    asked: int = 0

    def limits(self, now: datetime) -> Sequence[Rule]:
        self.asked += 1
        return self.rules


@dataclass(kw_only=True)
class Stage:
    """A dispatcher over replicas, with rules."""

    fleet: Ruled
    queue: Queue = field(init=False)

    def __post_init__(self) -> None:
        self.queue = Queue(fleet=self.fleet)

    def out(self, *passes: int) -> Counter[str]:
        """Run the dispatcher until it has nothing more to send; return what is out by owner."""
        while self.queue.run().full:
            pass
        return out()


def out() -> Counter[str]:
    leased = Batch.objects.filter(state=BatchState.LEASED)
    return Counter(leased.values_list("workflow__owner", flat=True))


def come_back() -> None:
    """Let all leases end."""
    now = database_now()
    Batch.objects.filter(state=BatchState.LEASED).update(lease_until=now - timedelta(seconds=1))
    leases.expire(now=now, trust_heartbeats=False)


def stage(*rules: Rule, replicas: Sequence[Replica] = (Replica(),)) -> Stage:
    return Stage(fleet=Ruled(live=list(replicas), rules=rules))


def work(owner: str, count: int = 40, **changes: Any) -> Workflow:
    return submit([f"{owner}{n}" for n in range(count)], owner=owner, batch_size=1, **changes)


def test_traffic_has_its_share_of_the_window_and_others_the_rest() -> None:
    boot()
    work("ann", purpose="tuning")
    work("bob", purpose="launch")

    found = stage(Rule(name="r", purpose="tuning", max_share=0.25)).out()

    # Two of the sixteen places are kept for high priority.
    assert found == {"ann": 4, "bob": 10}


@pytest.mark.parametrize(
    ("rule", "ann"),
    [
        (Rule(name="r", owner="ann", max_batches=3), 3),
        (Rule(name="r", trigger="automatic", max_batches=3), 3),
        (Rule(name="r", purpose="launch", max_batches=3), 3),
        (Rule(name="r", priority_class="low", max_batches=3), 3),
        (Rule(name="r", rater="stub-rater", owner="ann", max_share=0.01), 1),
        (Rule(name="r", model="stub-model", owner="ann", block=True), 0),
        (Rule(name="r", model="other-model", block=True), 14),
        (Rule(name="r", rater="other", block=True), 14),
        (Rule(name="r", owner="bob", block=True), 14),
        (Rule(name="r", owner="ann", block=True, min_load=0.5), 8),
        (Rule(name="r", owner="ann", block=True, min_load=1.0), 14),
    ],
)
def test_each_condition_holds_for_what_meets_it(rule: Rule, ann: int) -> None:
    boot()
    work("ann", trigger="automatic", purpose="launch", priority=LOW)

    assert stage(rule).out()["ann"] == ann


def test_a_rule_may_name_one_workflow() -> None:
    boot()
    named, other = work("ann"), work("bob")
    rule = Rule(name="r", workflow=named.public_id, max_batches=2)

    found = stage(rule).out()

    assert found == {"ann": 2, "bob": 12}
    assert other.public_id != named.public_id


def test_the_strictest_of_several_rules_decides() -> None:
    boot()
    work("ann")
    rules = (
        Rule(name="a", max_share=0.5),
        Rule(name="b", owner="ann", max_batches=3),
        Rule(name="c", owner="ann", max_share=0.4),
    )

    assert stage(*rules).out() == stage(*reversed(rules)).out() == {"ann": 3}


def test_a_share_is_one_of_each_model_and_batches_are_counted_over_all() -> None:
    boot()
    two = [Replica(key="r1", model_id="one", window=8), Replica(key="r2", model_id="two", window=8)]
    for name in ("one", "two"):
        work(name, of=rater(name, model_id=name))
    half, three = Rule(name="half", max_share=0.5), Rule(name="three", max_batches=3)

    assert stage(half, replicas=two).out() == {"one": 4, "two": 4}
    come_back()
    assert stage(three, replicas=two).out().total() == 3


def test_what_comes_back_makes_room_for_more_of_the_same() -> None:
    executor = boot()
    work("ann")
    running = stage(Rule(name="r", owner="ann", max_batches=2))
    running.out()

    for _ in range(5):
        taken = [t for m in running.queue.take_sent() for t in take(m, by=executor)]
        assert len(taken) == 2
        leases.finish([rated(t) for t in taken])
        assert running.out() == {"ann": 2}


def test_slots_of_a_rater_that_is_held_back_go_to_others_at_once() -> None:
    boot(slots=8)
    models = [Replica(key="r1", model_id="one"), Replica(key="r2", model_id="two")]
    for name in ("one", "two"):
        work(name, of=rater(name, model_id=name))
    running = stage(Rule(name="r", rater="one", block=True), replicas=models)

    running.queue.run()

    assert out() == {"two": 8}


def test_places_of_a_rater_that_is_held_back_go_to_others_of_its_model() -> None:
    boot()
    for name in ("one", "two"):
        work(name, of=rater(name))
    running = stage(Rule(name="r", rater="one", max_batches=1))

    running.queue.run()

    assert out() == {"one": 1, "two": 13}


def test_no_place_stays_free_where_rules_overlap() -> None:
    boot()
    for owner in ("ann", "bob", "cem"):
        work(owner, purpose="tuning" if owner != "cem" else "launch", trigger="automatic")
    rules = (
        Rule(name="a", purpose="tuning", max_share=0.5),
        Rule(name="b", owner="ann", max_batches=2),
        Rule(name="c", trigger="automatic", max_batches=13),
    )

    found = stage(*rules).out()

    assert found.total() == 13
    assert found["ann"] <= 2
    assert found["ann"] + found["bob"] <= 8


def test_a_class_that_is_blocked_leaves_its_turn_to_those_below() -> None:
    boot()
    work("ann", priority=HIGH)
    work("bob", priority=LOW)

    assert stage(Rule(name="r", priority_class="high", block=True)).out() == {"bob": 14}


def test_a_rule_holds_from_the_next_pass_and_ends_with_it() -> None:
    boot()
    work("ann")
    running = stage(Rule(name="r", block=True))
    assert running.out() == {}

    running.fleet.rules = ()
    assert running.out() == {"ann": 14}

    running.fleet.rules = (Rule(name="r", owner="ann", max_batches=1),)
    come_back()
    assert running.out() == {"ann": 1}


def test_a_reading_that_is_believed_is_not_beyond_another_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ready, "FEW", 0)
    monkeypatch.setattr(held, "FEW", 0)
    boot()
    work("ann")
    running = stage(Rule(name="r", owner="ann", max_batches=1))
    assert running.out() == {"ann": 1}
    running.queue.memory.sight.took = timedelta(seconds=2)

    running.fleet.rules = (
        Rule(name="r", owner="bob", block=True),
        Rule(name="s", owner="ann", max_batches=3),
    )

    assert running.out() == {"ann": 3}


def test_a_batch_of_a_chat_model_counts_as_its_calls() -> None:
    boot()
    submit([f"a{n}" for n in range(40)], owner="ann", batch_size=4)
    chat = Replica(protocol="openai", window=24, managed=False)

    found = stage(Rule(name="r", max_share=0.5), replicas=[chat]).out()

    # 24 calls are the room of six batches.
    assert found == {"ann": 3}


def test_a_window_of_less_than_a_batch_is_room_for_one() -> None:
    boot()
    submit([f"a{n}" for n in range(40)], owner="ann", batch_size=4)
    chat = Replica(protocol="openai", window=2, managed=False)

    found = stage(Rule(name="r", block=True, min_load=0.5), replicas=[chat]).out()

    assert found == {"ann": 1}


def test_without_rules_a_pass_makes_the_same_statements() -> None:
    boot()
    work("ann")

    def statements(fleet: Fleet) -> list[str]:
        come_back()
        with CaptureQueriesContext(connection) as captured:
            Queue(fleet=fleet).run()
        # A savepoint has another name each time.
        return [re.sub(r"[0-9]+", "", query["sql"])[:60] for query in captured]

    statements(Fleet(live=[Replica()]))  # its first batches start the workflow
    assert statements(Ruled(live=[Replica()])) == statements(Fleet(live=[Replica()]))


def test_a_workflow_that_is_held_back_says_so(settings: Any) -> None:
    boot()
    one = work("ann", purpose="tuning")
    two = work("bob")
    TrafficRule.objects.create(
        position=1, name="night", owner="ann", block=True, reason="a launch goes first"
    )

    told = standings.of([one, two], database_now())

    assert told == {
        one.pk: "held back by traffic rule 'night': nothing is sent (a launch goes first)"
    }
    TrafficRule.objects.update(enabled=False)
    assert standings.of([one, two], database_now()) == {}


class Away(Fleet):
    """A directory that nobody reaches."""

    def limits(self, now: datetime) -> Sequence[Rule]:
        raise ConnectionError("away")


AWAY = Away()


def test_workflows_are_shown_while_model_management_is_away(settings: Any) -> None:
    workflow = work("ann")
    TrafficRule.objects.create(position=1, name="night", owner="ann", block=True)
    settings.AIRS_MODEL_DIRECTORY = f"{__name__}.AWAY"

    shown = builders.Api("ann").get(f"/workflows/{workflow.public_id}")

    assert (shown.status_code, shown.json()["standing"]) == (200, None)


def test_a_workflow_whose_rule_leaves_room_is_not_held_back() -> None:
    boot()
    workflow = work("ann")
    TrafficRule.objects.create(position=1, name="some", owner="ann", max_batches=2)
    assert standings.of([workflow], database_now()) == {}

    Queue(fleet=Ruled(live=[Replica(window=2)])).run()

    assert out() == {"ann": 2}
    assert "at most 2 at a time" in standings.of([workflow], database_now())[workflow.pk]


def test_owners_that_were_held_back_keep_their_turn() -> None:
    boot()
    for owner in ("ann", "bob", "cem"):
        work(owner)
    running = stage()
    version_id = Workflow.objects.values_list("rater_version_id", flat=True)[0]
    running.out()
    queue = running.queue.memory.orders[version_id].queues[PriorityClass.MIDDLE]
    first = queue[0]

    come_back()
    running.fleet.rules = (Rule(name="r", owner=first, block=True),)
    running.out()

    after = running.queue.memory.orders[version_id].queues[PriorityClass.MIDDLE]
    assert after[0] == first


def test_gates_count_as_rules_are_meant() -> None:
    rules = (Rule(name="a", max_share=0.5), Rule(name="b", block=True, min_load=0.75))
    gate = limits.Gate(rules, window=8, held=3, of_model=[1, 0], in_all=[1, 0])

    assert gate.closed == frozenset()
    assert [gate.take(met) for met in ((0,), (0,), (0,))] == [False, False, True]
    assert gate.closed == {0, 1}
    assert replace(rules[0]) == rules[0]


def test_a_share_leaves_room_for_another_version_of_the_model() -> None:
    boot(slots=200)
    two = [Replica(key="r1", window=64), Replica(key="r2", version="v2", window=8)]
    old = rater("old")
    new = builders.version(builders.rater("new"), model_version="v2")
    work("ann", of=old)
    running = stage(Rule(name="r", max_share=0.25), replicas=two)
    assert running.out() == {"ann": 16}

    work("bob", of=new)

    assert running.out() == {"ann": 16, "bob": 2}


def test_nobody_is_hurried_by_what_a_rule_holds_back() -> None:
    boot()
    work("ann", priority=HIGH)
    work("bob", priority=LOW)
    running = stage(Rule(name="r", owner="ann", block=True))

    running.out()

    assert {message.priority for message in running.queue.sent} == {celery_priority(LOW)}


def test_what_was_read_in_part_is_read_again_beside_what_a_rule_holds_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ready, "FEW", 0)
    boot(slots=1_000)
    work("ann", ready.READY_LOOK + 20)
    work("bob")
    running = stage(Rule(name="r", owner="bob", block=True), replicas=[Replica(window=400)])
    assert running.queue.run().sent == ready.READY_LOOK
    running.queue.memory.sight.took = timedelta(seconds=0.3)

    assert running.out() == {"ann": ready.READY_LOOK + 20}
