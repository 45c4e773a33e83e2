"""Laws of traffic rules in the dispatcher: no limit is passed, and nothing else waits."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from fulfillment import regulation
from fulfillment.policy import limits, lines, ordering
from fulfillment.policy.fairness import Usage
from fulfillment.policy.limits import Gate
from fulfillment.policy.priority import PriorityClass
from fulfillment.ready import VersionLoad
from models_admin.policy import traffic_rules
from models_admin.policy.traffic_rules import Held, Room, Rule, Traffic

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
OWNERS = ["ann", "bob", "cem"]
PURPOSES = ["tuning", "launch"]
CLASSES = [cls.name.lower() for cls in PriorityClass]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A workflow with something READY."""

    owner: str
    cls: PriorityClass
    purpose: str
    ready: int


work = st.builds(
    Work,
    owner=st.sampled_from(OWNERS),
    cls=st.sampled_from(PriorityClass),
    purpose=st.sampled_from(PURPOSES),
    ready=st.integers(1, 12),
)
works = st.lists(work, max_size=8)


@st.composite
def rule(draw: st.DrawFn, *, by_load: bool = True) -> Rule:
    block = draw(st.booleans())
    share = None if block else draw(st.none() | st.floats(0.01, 1.0))
    batches = st.integers(1, 12)
    return Rule(
        name=draw(st.text("xyz", min_size=1, max_size=6)),
        owner=draw(st.none() | st.sampled_from(OWNERS)),
        purpose=draw(st.none() | st.sampled_from(PURPOSES)),
        priority_class=draw(st.none() | st.sampled_from(CLASSES)),
        min_load=draw(st.just(0.0) | st.floats(0.0, 1.0)) if by_load else 0.0,
        max_share=share,
        max_batches=None if block else draw(batches if share is None else st.none() | batches),
        block=block,
    )


rules = st.lists(rule(), max_size=4)


def traffic(of: Work, number: int) -> limits.Traffic:
    return limits.Traffic(
        rater="r",
        model="m",
        priority_class=of.cls.name.lower(),
        trigger="human",
        purpose=of.purpose,
        owner=of.owner,
        workflow=f"wf_{number}",
    )


def version(of: Sequence[Work], by: Sequence[Rule]) -> VersionLoad:
    """Return a rater version whose workflows are numbered from 0, lined up."""
    kind_of = {n: (w.cls, limits.matched(by, traffic(w, n))) for n, w in enumerate(of)}
    kinds: Counter[tuple[PriorityClass, limits.Matched]] = Counter()
    for number, each in enumerate(of):
        kinds[kind_of[number]] += each.ready
    loads = [
        lines.Load(
            workflow_id=number,
            owner=each.owner,
            priority_class=each.cls,
            ready_batches=each.ready,
            open_requests=each.ready * 12,
            submitted_at=NOW,
            deadline_at=NOW + timedelta(hours=2),
        )
        for number, each in enumerate(of)
    ]
    return VersionLoad(
        version_id=1, rater_id="r", model_id="m", model_version="v", autorater="a",
        plugin_version="1", max_qps=None, isolated=False, seconds_a_request=None, batch_size=12,
        ready=sum(each.ready for each in of), rows=(), read_at=NOW, usage=Usage(),
        kind_of=kind_of, kinds=kinds, order=lines.line_up(loads, NOW),
    )  # fmt: skip


def gate(by: Sequence[Rule], *, window: int, held: int, out: Sequence[int]) -> Gate:
    return Gate(by, window=window, held=held, of_model=out, in_all=out)


def filled(load: VersionLoad, through: Gate, room: int) -> ordering.Decision:
    assert load.order is not None
    return regulation.fill(load, load.order, through, room=room, memory=ordering.Memory(), taken={})


@settings(max_examples=150)
@given(works, rules, st.integers(0, 40), st.data())
def test_no_limit_is_passed_and_nothing_waits_that_none_holds_back(
    of: list[Work], by: list[Rule], room: int, data: st.DataObject
) -> None:
    held = data.draw(st.integers(0, 20))
    out = [data.draw(st.integers(0, held)) for _ in by]
    load = version(of, by)
    through = gate(by, window=held + room, held=held, out=out)
    before = [through.left(number) for number in range(len(by))]

    picked = {p.workflow_id: p.batches for p in filled(load, through, room).picks}

    assert sum(picked.values()) <= room
    assert all(batches <= of[w].ready for w, batches in picked.items())
    for number, left in enumerate(before):
        # Until its load was reached, what leaves is not held back by it.
        if left is not None and by[number].min_load == 0:
            taken = sum(n for w, n in picked.items() if number in load.matched(w))
            assert taken <= left
    if sum(picked.values()) < room:
        for number, each in enumerate(of):
            if picked.get(number, 0) < each.ready:
                assert through.closed & set(load.matched(number))


@settings(max_examples=80)
@given(works, rules, st.integers(0, 40))
def test_rules_let_no_more_leave_than_none(of: list[Work], by: list[Rule], room: int) -> None:
    load = version(of, by)
    through = gate(by, window=room, held=0, out=[0] * len(by))

    with_rules = sum(p.batches for p in filled(load, through, room).picks)

    assert with_rules <= min(room, load.ready)
    assert by or with_rules == min(room, load.ready)


@settings(max_examples=80)
@given(works, rules, st.integers(1, 40))
def test_what_may_leave_is_none_only_where_nothing_does(
    of: list[Work], by: list[Rule], room: int
) -> None:
    load = version(of, by)

    def through() -> Gate:
        return gate(by, window=room, held=0, out=[0] * len(by))

    may = sum(through().may_leave(load.left_of_kinds({})).values())
    does = sum(p.batches for p in filled(load, through(), room).picks)

    assert (may > 0) == (does > 0)


def test_what_may_leave_by_one_rule_is_promised_to_one_class() -> None:
    through = gate([Rule(name="x", max_batches=3)], window=20, held=0, out=[0])

    may = through.may_leave({(PriorityClass.HIGH, (0,)): 2, (PriorityClass.LOW, (0,)): 5})

    assert may == {PriorityClass.HIGH: 2, PriorityClass.LOW: 1}


@settings(max_examples=80)
@given(works, rules, st.integers(0, 40))
def test_a_rule_that_closed_stays_closed(of: list[Work], by: list[Rule], room: int) -> None:
    load = version(of, by)
    through = gate(by, window=room, held=0, out=[0] * len(by))
    closed = through.closed

    for number, each in enumerate(of):
        for _ in range(each.ready):
            newly = through.take(load.matched(number))
            assert newly == (through.closed != closed)
            assert closed <= through.closed
            closed = through.closed
    assert closed == {n for n in range(len(by)) if through.left(n) == 0}


def test_a_share_or_load_that_is_no_binary_number_counts_as_it_is_written() -> None:
    by = [Rule(name="share", max_share=0.29), Rule(name="load", block=True, min_load=0.07)]

    through = gate(by, window=100, held=7, out=[0, 0])

    assert [through.left(number) for number in range(2)] == [29, 0]


@given(st.lists(rule(), min_size=1, max_size=4, unique_by=lambda each: each.name), work, st.data())
def test_both_apps_read_a_rule_alike(by: list[Rule], of: Work, data: st.DataObject) -> None:
    window = data.draw(st.integers(0, 40))
    held = data.draw(st.integers(0, window))
    out = [data.draw(st.integers(0, window)) for _ in by]
    through = gate(by, window=window, held=held, out=out)

    for number, each in enumerate(by):
        mine = traffic(of, 1)
        assert limits.matches(each, mine) == traffic_rules.matches(each, Traffic(*mine))
        room = Room(window=window, held=held, free=0)
        held_by = Held(of_model=out[number], in_all=out[number])
        assert through.left(number) == traffic_rules.left(each, room, held_by)


@settings(max_examples=80)
@given(works, st.sets(st.integers(0, 7)))
def test_lines_without_some_workflows_are_those_of_the_others(
    of: list[Work], gone: set[int]
) -> None:
    whole = version(of, []).order
    assert whole is not None

    left = lines.without(whole, gone)

    kept = {n for n in range(len(of)) if n not in gone}
    assert {w for line in left.values() for w in line.ready} == kept
    for cls, line in left.items():
        order = [entry[2] for entry in line.by_score]
        assert order == [e[2] for e in whole[cls].by_score if e[2] in kept]
        assert line.total == sum(of[w].ready for w in line.ready)
        assert set(line.newcomers) == set(line.owner_ready) == set(line.by_owner)
        assert sum(line.owner_ready.values()) == line.total
