from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment.policy.fairness import Usage
from fulfillment.policy.lines import Load, line_up, slack
from fulfillment.policy.ordering import (
    DEFAULT_SHARES,
    HEAD_START,
    MAX_CLAIMS,
    TURN_EVERY,
    Memory,
    Pick,
    fill,
    longest_wait,
    longest_wait_s,
    next_batches,
)
from fulfillment.policy.priority import PriorityClass

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
HIGH, MIDDLE, LOW, BEST_EFFORT = PriorityClass
BELOW_HIGH = [MIDDLE, LOW, BEST_EFFORT]
PLENTY = 10_000


def load(
    workflow_id: int,
    *,
    owner: str = "ann",
    cls: PriorityClass = HIGH,
    ready: int = PLENTY,
    work: int = 1000,
    age_s: float = 3600,
    left_s: float = 3600,
) -> Load:
    return Load(
        workflow_id=workflow_id,
        owner=owner,
        priority_class=cls,
        ready_batches=ready,
        open_requests=work,
        submitted_at=NOW - timedelta(seconds=age_s),
        deadline_at=NOW + timedelta(seconds=left_s),
    )


def picks_of(loads: Sequence[Load], room: int, memory: Memory | None = None) -> dict[int, int]:
    decision = next_batches(loads, room=room, now=NOW, memory=memory or Memory())
    return {pick.workflow_id: pick.batches for pick in decision.picks}


def left_after(loads: Sequence[Load], picks: Sequence[Pick]) -> list[Load]:
    picked = {pick.workflow_id: pick.batches for pick in picks}
    return [
        replace(each, ready_batches=each.ready_batches - picked.get(each.workflow_id, 0))
        for each in loads
    ]


def dispatches(
    loads_at: Callable[[int], Sequence[Load]],
    count: int,
    *,
    memory: Memory | None = None,
    shares: Mapping[PriorityClass, float] = DEFAULT_SHARES,
    requests_per_s: float | None = None,
) -> Iterator[Load]:
    """Serve `count` batches one pass each, from what is there at each of them."""
    memory = memory or Memory()
    for step in range(count):
        loads = loads_at(step)
        decision = next_batches(
            loads,
            room=1,
            now=NOW,
            memory=memory,
            shares=shares,
            requests_per_s=requests_per_s,
        )
        memory = decision.memory
        yield next(each for each in loads if each.workflow_id == decision.picks[0].workflow_id)


owners = st.sampled_from(["ann", "bob", "cem"])
instants = st.floats(-4000, 4000).map(lambda s: NOW + timedelta(seconds=s))
classes = st.sampled_from(PriorityClass)
load_lists = st.lists(
    st.builds(
        Load,
        workflow_id=st.integers(1, 99),
        owner=owners,
        priority_class=classes,
        ready_batches=st.integers(0, 6),
        open_requests=st.integers(0, 40),
        submitted_at=instants,
        deadline_at=instants,
    ),
    max_size=12,
    unique_by=lambda each: each.workflow_id,
)
memories = st.builds(
    Memory,
    credits=st.fixed_dictionaries(
        {},
        optional={HIGH: st.floats(0, HEAD_START), **dict.fromkeys(BELOW_HIGH, st.floats(0, 1.02))},
    ),
    queues=st.dictionaries(classes, st.lists(owners | st.just("gone"), unique=True).map(tuple)),
    counts=st.dictionaries(classes, st.integers(1, TURN_EVERY - 1)),
)
rooms = st.integers(0, 40)
some_shares = st.fixed_dictionaries({cls: st.floats(0.02, 0.3) for cls in BELOW_HIGH})


# What holds for all that comes in


@given(loads=load_lists, room=rooms, memory=memories, data=st.data())
def test_the_order_of_loads_does_not_matter(
    loads: list[Load], room: int, memory: Memory, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(loads))

    assert next_batches(shuffled, room=room, now=NOW, memory=memory) == next_batches(
        loads, room=room, now=NOW, memory=memory
    )


@given(loads=load_lists, room=rooms, memory=memories)
def test_all_room_is_filled_while_anything_is_ready(
    loads: list[Load], room: int, memory: Memory
) -> None:
    picks = picks_of(loads, room, memory)

    assert sum(picks.values()) == min(room, sum(each.ready_batches for each in loads))


@given(loads=load_lists, room=rooms, memory=memories)
def test_no_workflow_gives_more_than_it_has_ready(
    loads: list[Load], room: int, memory: Memory
) -> None:
    decision = next_batches(loads, room=room, now=NOW, memory=memory)
    ready = {each.workflow_id: each.ready_batches for each in loads}

    assert len({pick.workflow_id for pick in decision.picks}) == len(decision.picks)
    assert all(1 <= pick.batches <= ready[pick.workflow_id] for pick in decision.picks)


@given(loads=load_lists, room=rooms, memory=memories)
def test_memory_keeps_no_owner_who_is_gone_from_a_served_class(
    loads: list[Load], room: int, memory: Memory
) -> None:
    decision = next_batches(loads, room=room, now=NOW, memory=memory)
    left = left_after(loads, decision.picks)
    picked = {pick.workflow_id for pick in decision.picks}
    served = {each.priority_class for each in loads if each.workflow_id in picked}

    for cls, queue in decision.memory.queues.items():
        if cls in served:
            waiting = {
                each.owner for each in left if each.priority_class is cls and each.ready_batches
            }
            assert sorted(queue) == sorted(waiting)


def test_one_pass_claims_no_more_than_its_limit() -> None:
    assert picks_of([load(1)], MAX_CLAIMS + 100) == {1: MAX_CLAIMS}


@pytest.mark.parametrize("room", [0, -3])
def test_without_room_nothing_leaves_and_memory_stays(room: int) -> None:
    memory = Memory(
        credits={LOW: 0.5}, queues={HIGH: ("ann",)}, counts={HIGH: 3}, usage=Usage(at=NOW)
    )

    decision = next_batches([load(1)], room=room, now=NOW, memory=memory)

    assert decision.picks == ()
    assert decision.memory == memory
    assert decision.reason == "no room"


def test_without_ready_batches_nothing_leaves() -> None:
    decision = next_batches([load(1, ready=0)], room=9, now=NOW, memory=Memory())

    assert decision.picks == ()
    assert decision.reason == "nothing is ready"


def test_the_reason_says_what_was_served_and_what_by_floor() -> None:
    loads = [load(1), load(2, cls=LOW)]

    decision = next_batches(loads, room=30, now=NOW, memory=Memory())

    assert decision.reason == "room 30: high 22, low 8 (8 by floor)"


def test_the_reason_calls_nothing_a_floor_that_was_due_anyway() -> None:
    decision = next_batches([load(1, cls=MIDDLE)], room=20, now=NOW, memory=Memory())

    assert decision.reason == "room 20: middle 20"


# Classes


def test_a_full_credit_that_must_wait_grows_by_one_share_at_most() -> None:
    loads = [load(cls + 1, cls=cls) for cls in PriorityClass]
    full = Memory(credits={MIDDLE: 1.27, LOW: 1.27, BEST_EFFORT: 1.02})

    decision = next_batches(loads, room=1, now=NOW, memory=full)

    assert decision.memory.credits == pytest.approx({MIDDLE: 0.27, LOW: 1.27, BEST_EFFORT: 1.02})


@given(loads=load_lists, room=rooms, memory=memories)
def test_without_shares_a_class_is_served_only_when_all_above_are_empty(
    loads: list[Load], room: int, memory: Memory
) -> None:
    without_credit = replace(memory, credits={})

    decision = next_batches(loads, room=room, now=NOW, memory=without_credit, shares={})

    left = left_after(loads, decision.picks)
    above = [each.priority_class for each in left if each.ready_batches]
    served = {pick.workflow_id for pick in decision.picks}
    lowest_served = max((e.priority_class for e in loads if e.workflow_id in served), default=HIGH)
    assert all(cls >= lowest_served for cls in above)


@given(loads=load_lists, room=rooms, memory=memories, shares=some_shares)
def test_a_class_takes_no_more_than_its_share_while_one_above_waits(
    loads: list[Load], room: int, memory: Memory, shares: Mapping[PriorityClass, float]
) -> None:
    decision = next_batches(loads, room=room, now=NOW, memory=memory, shares=shares)

    left = left_after(loads, decision.picks)
    highest = min((each.priority_class for each in left if each.ready_batches), default=BEST_EFFORT)
    count = sum(pick.batches for pick in decision.picks)
    for cls in BELOW_HIGH:
        if cls > highest:
            of_class = {each.workflow_id for each in loads if each.priority_class is cls}
            took = sum(pick.batches for pick in decision.picks if pick.workflow_id in of_class)
            assert took <= 1 + shares[cls] * count + 1e-6


@given(
    cls=st.sampled_from(BELOW_HIGH),
    shares=some_shares,
    memory=memories,
    others=st.lists(st.sets(classes), min_size=1, max_size=7),
)
def test_no_class_waits_longer_than_its_bound(
    cls: PriorityClass,
    shares: Mapping[PriorityClass, float],
    memory: Memory,
    others: list[set[PriorityClass]],
) -> None:
    bound = longest_wait(cls, shares)

    served = dispatches(
        # The other classes come and go, this one always has work.
        lambda step: [load(c + 1, cls=c) for c in others[step % len(others)] | {cls}],
        bound,
        memory=memory,
        shares=shares,
    )

    assert any(each.priority_class is cls for each in served)


@pytest.mark.parametrize(("cls", "wait"), [(MIDDLE, 8), (LOW, 10), (BEST_EFFORT, 63)])
def test_waits_with_the_default_shares(cls: PriorityClass, wait: int) -> None:
    assert longest_wait(cls) == wait


def test_each_class_gets_its_floor_when_all_wait() -> None:
    loads = [load(cls + 1, cls=cls) for cls in PriorityClass]

    served = Counter(each.priority_class for each in dispatches(lambda _: loads, 1000))

    # Their shares, to the last.
    assert served == {HIGH: 442, MIDDLE: 270, LOW: 269, BEST_EFFORT: 19}


def test_a_small_workflow_of_high_priority_waits_for_no_credit() -> None:
    below = [load(cls + 1, cls=cls) for cls in BELOW_HIGH]
    full = Memory(credits={HIGH: HEAD_START, MIDDLE: 1.0, LOW: 1.0, BEST_EFFORT: 1.0})

    assert picks_of([load(1, ready=4), *below], 4, full) == {1: 4}


def test_the_head_start_is_saved_while_others_are_served_for_being_the_highest() -> None:
    below = [load(cls + 1, cls=cls) for cls in BELOW_HIGH]

    saved = next_batches(below, room=3, now=NOW, memory=Memory()).memory.credits
    served = list(dispatches(lambda n: below if n < 20 else [load(1), *below], 20 + 16))

    assert saved[HIGH] == 3.0
    # Ten credits were full meanwhile, but four of them had to wait.
    assert Counter(each.priority_class for each in served[20:])[HIGH] == 10


def test_nothing_is_saved_for_high_while_a_credit_is_full() -> None:
    full = Memory(credits={LOW: 1.0, BEST_EFFORT: 1.0})
    loads = [load(cls + 1, cls=cls) for cls in BELOW_HIGH]

    assert HIGH not in next_batches(loads, room=2, now=NOW, memory=full).memory.credits


def test_the_longest_wait_in_seconds_goes_by_the_pace_of_the_rater() -> None:
    assert longest_wait_s(LOW, batches_per_s=3) == longest_wait(LOW) / 3


def test_an_idle_class_saves_up_one_dispatch_at_most() -> None:
    full = Memory(credits=dict.fromkeys(BELOW_HIGH, 1.0))

    assert picks_of([load(1), load(2, cls=LOW)], 3, full) == {1: 2, 2: 1}


@pytest.mark.parametrize("age_s", [0, 10**6])
def test_no_age_lifts_a_workflow_into_a_higher_class(age_s: float) -> None:
    loads = [load(1, age_s=0), load(2, cls=MIDDLE, age_s=age_s, left_s=-1, work=1)]

    assert picks_of(loads, 3) == {1: 3}


# Workflows of a class


@given(
    each=st.builds(load, st.just(1), age_s=st.floats(-100, 4000), left_s=st.floats(-4000, 4000)),
    sooner_s=st.floats(0, 4000),
    later_s=st.floats(0, 4000),
)
def test_urgency_grows_as_time_runs_out(each: Load, sooner_s: float, later_s: float) -> None:
    sooner = replace(each, deadline_at=each.deadline_at - timedelta(seconds=sooner_s))

    assert slack(sooner, NOW) <= slack(each, NOW)
    assert slack(each, NOW + timedelta(seconds=later_s)) <= slack(each, NOW)
    assert 0.02 <= slack(each, NOW) <= 1


@given(loads=load_lists, sooner_s=st.floats(0, 4000), data=st.data())
def test_a_workflow_that_would_be_next_stays_so_with_a_sooner_deadline(
    loads: list[Load], sooner_s: float, data: st.DataObject
) -> None:
    first = picks_of(loads, 1)
    hurried = [
        replace(each, deadline_at=each.deadline_at - timedelta(seconds=sooner_s))
        if each.workflow_id in first
        else each
        for each in loads
    ]

    assert picks_of(hurried, 1) == first


def test_the_shorter_job_goes_first() -> None:
    assert picks_of([load(1, work=500), load(2, work=400)], 1) == {2: 1}


def test_the_job_with_less_time_left_goes_first() -> None:
    assert picks_of([load(1, work=500), load(2, work=600, left_s=600)], 1) == {2: 1}


def test_equal_jobs_go_by_id() -> None:
    assert picks_of([load(2), load(1, owner="bob")], 1) == {1: 1}


@pytest.mark.parametrize(("work", "first"), [(49_999, 2), (50_001, 1)])
def test_a_late_job_counts_fifty_times_at_most(work: int, first: int) -> None:
    loads = [load(1, owner="ann", age_s=0), load(2, owner="bob", work=work, left_s=-(10**6))]

    assert picks_of(loads, 1) == {first: 1}


def test_earlier_work_of_an_owner_counts_for_the_later() -> None:
    # The second of bob's jobs is shorter than ann's, but comes after his first.
    first = load(2, owner="bob", work=300, ready=0)
    second = load(3, owner="bob", work=301)

    assert picks_of([load(1, work=500), first, second], 1) == {1: 1}


@given(
    parts=st.lists(st.integers(1, 400), min_size=2, max_size=8),
    rivals=st.lists(st.integers(1, 900), min_size=1, max_size=6),
)
def test_the_last_part_of_a_split_job_is_served_no_sooner_than_the_whole(
    parts: list[int], rivals: list[int]
) -> None:
    others = [load(n + 100, owner=f"rival {n}", work=work) for n, work in enumerate(rivals)]
    split = [load(n + 1, owner="bob", work=work) for n, work in enumerate(parts)]
    whole = load(1, owner="bob", work=sum(parts))

    def before(number: int, loads: Sequence[Load]) -> set[int]:
        order = [entry[2] for entry in line_up(loads, NOW)[HIGH].by_score]
        return {w for w in order[: order.index(number)] if w >= 100}

    # Of equal parts, the one that comes last by id.
    last = max((e for e in split if e.open_requests == max(parts)), key=lambda e: e.workflow_id)
    assert before(last.workflow_id, [*others, *split]) >= before(1, [*others, whole])


@given(loads=load_lists, data=st.data())
def test_a_workflow_raised_to_a_higher_class_is_served_no_later(
    loads: list[Load], data: st.DataObject
) -> None:
    ready = [each for each in loads if each.ready_batches]
    if not ready:
        return
    chosen = data.draw(st.sampled_from(ready))
    raised = [replace(each, priority_class=HIGH) if each is chosen else each for each in loads]

    def first_dispatch(of: list[Load]) -> int:
        plenty = sum(each.ready_batches for each in of)
        memory, left = Memory(), list(of)
        for step in range(plenty):
            decision = next_batches(left, room=1, now=NOW, memory=memory, shares={})
            memory = decision.memory
            if decision.picks[0].workflow_id == chosen.workflow_id:
                return step
            left = left_after(left, decision.picks)
        raise AssertionError("never served")

    assert first_dispatch(raised) <= first_dispatch(loads)


# Deadlines that press


def test_three_dispatches_in_four_go_to_what_is_due_by_a_deadline_that_presses() -> None:
    # 950 requests in 1,000 s at one a second: it presses.
    loads = [load(1, work=950, left_s=1000), load(2, owner="bob", work=1, left_s=9000)]

    served = Counter(e.workflow_id for e in dispatches(lambda _: loads, 16, requests_per_s=1.0))

    assert served == {1: 12, 2: 4}


def test_while_nothing_presses_the_shortest_goes_first() -> None:
    loads = [load(1, work=700, left_s=1000), load(2, owner="bob", work=1, left_s=9000)]

    served = Counter(e.workflow_id for e in dispatches(lambda _: loads, 10, requests_per_s=1.0))

    assert served == {2: 10}


def test_a_pressing_deadline_moves_nothing_out_of_its_class() -> None:
    loads = [load(1, work=5), load(2, cls=LOW, work=900, left_s=100)]
    decision = next_batches(loads, room=3, now=NOW, memory=Memory(), requests_per_s=1.0)

    assert decision.picks == (Pick(workflow_id=1, batches=3),)


# Owners


def test_an_owner_of_twice_the_weight_is_served_first_with_twice_the_work() -> None:
    loads = [load(1, work=500), load(2, owner="bob", work=900)]

    decision = next_batches(loads, room=1, now=NOW, memory=Memory(), weights={"bob": 2.0})

    assert decision.picks[0].workflow_id == 2


def test_what_an_owner_was_served_within_minutes_counts_as_its_work() -> None:
    loads = [load(1, work=100), load(2, owner="bob", work=120)]
    usage = Usage(at=NOW, recent={"ann": 60.0})

    assert picks_of(loads, 1, Memory(usage=usage)) == {2: 1}


def test_equal_owners_with_many_equal_jobs_are_served_alike() -> None:
    # All of ann's came first, so that they are also the more urgent ones.
    left = dict.fromkeys(range(1, 61), 10)

    def loads_at(_: int) -> list[Load]:
        return [
            load(
                n,
                owner="ann" if n <= 30 else "bob",
                ready=count,
                work=count * 12,
                age_s=100 if n <= 30 else 10,
            )
            for n, count in left.items()
            if count
        ]

    took: Counter[str] = Counter()
    for served in dispatches(loads_at, 200):
        left[served.workflow_id] -= 1
        took[served.owner] += 1

    assert abs(took["ann"] - took["bob"]) <= 10


def test_owners_with_one_equal_large_job_each_take_turns() -> None:
    left = {1: 500, 2: 500, 3: 500}

    def loads_at(_: int) -> list[Load]:
        return [
            load(n, owner=f"owner {n}", ready=count, work=count * 12) for n, count in left.items()
        ]

    for served in dispatches(loads_at, 300):
        left[served.workflow_id] -= 1

    assert max(left.values()) - min(left.values()) <= 30


def test_who_is_over_its_share_stands_behind_all_others() -> None:
    flood = [load(n, owner="flood", work=10) for n in range(1, 600)]
    other = load(999, owner="ann", work=4000)
    usage = Usage(at=NOW, contended={"flood": 2000.0})

    decision = next_batches(
        [*flood, other], room=19, now=NOW, memory=Memory(usage=usage), requests_per_s=1.0
    )

    # All but the owner's turn, and that is its own.
    assert decision.picks == (Pick(workflow_id=999, batches=19),)


@given(rivals=st.integers(1, 5), works=st.lists(st.integers(1, 9), min_size=8, max_size=8))
def test_an_owner_waits_a_turn_for_each_before_it(rivals: int, works: list[int]) -> None:
    flood = [load(n + 1, owner=f"rival {n}", work=works[n]) for n in range(rivals)]
    victim = load(99, owner="victim", work=10**9)

    before = Memory(queues={HIGH: tuple(each.owner for each in flood)})
    served = dispatches(lambda _: [*flood, victim], TURN_EVERY * (rivals + 1), memory=before)

    assert victim in list(served)


def test_the_first_turn_goes_to_the_owner_whose_work_is_oldest() -> None:
    loads = [
        load(1, owner="zoe", work=9000, age_s=100),
        load(2, owner="zoe", work=9000, age_s=10),
        load(3, owner="ann", age_s=50),
    ]

    assert picks_of(loads, 1, Memory(counts={HIGH: TURN_EVERY - 1})).keys() <= {1, 2}


def test_owners_who_come_later_queue_behind_those_who_wait() -> None:
    # At each step a new owner comes with a small job; without a queue the large one would starve.
    def loads_at(step: int) -> list[Load]:
        come = [load(n + 1, owner=f"new {n}", work=1, age_s=60 - n) for n in range(step + 1)]
        return [*come, load(999, owner="old", work=10**6)]

    served = [each.owner for each in dispatches(loads_at, 2 * TURN_EVERY)]

    assert "old" in served


def test_an_owner_alone_in_a_class_gets_all_of_it() -> None:
    assert picks_of([load(1, ready=30), load(2, owner="bob", ready=0)], 20) == {1: 20}


def test_a_class_that_is_not_served_remembers_who_waits_longest() -> None:
    memory = Memory(queues={LOW: ("bob", "ann")}, counts={LOW: 7})
    loads = [load(1), load(2, cls=LOW, work=1), load(3, owner="bob", cls=LOW)]

    decision = next_batches(loads, room=3, now=NOW, memory=memory)

    assert decision.memory.queues[LOW] == ("bob", "ann")
    assert decision.memory.counts[LOW] == 7


@given(loads=load_lists, portions=st.lists(st.integers(0, 9), max_size=6), memory=memories)
def test_one_order_serves_portions_as_it_serves_the_whole(
    loads: list[Load], portions: list[int], memory: Memory
) -> None:
    order = line_up(loads, NOW)
    whole = fill(order, room=sum(portions), memory=memory)

    taken: Counter[int] = Counter()
    for room in portions:
        decision = fill(order, room=room, memory=memory, taken=taken)
        memory = decision.memory
        taken.update({pick.workflow_id: pick.batches for pick in decision.picks})

    assert taken == Counter({pick.workflow_id: pick.batches for pick in whole.picks})


def test_owners_take_turns_within_a_decision() -> None:
    assert picks_of([load(1), load(2, owner="bob")], 10) == {1: 5, 2: 5}


@given(loads=load_lists, room=rooms)
def test_a_decision_serves_as_if_the_order_were_made_anew_for_each_batch(
    loads: list[Load], room: int
) -> None:
    # Of one class: what an owner is served in another counts once the order is made anew. And with
    # as much time left, or of one owner what has less would overtake, as its score rises less.
    due = NOW + timedelta(hours=1)
    left = [replace(each, submitted_at=NOW, deadline_at=due, priority_class=LOW) for each in loads]
    whole = picks_of(left, room)

    memory, served = Memory(), Counter[int]()
    for _ in range(room):
        decision = next_batches(left, room=1, now=NOW, memory=memory)
        memory, left = decision.memory, left_after(left, decision.picks)
        served.update({pick.workflow_id: pick.batches for pick in decision.picks})

    assert served == Counter(whole)
