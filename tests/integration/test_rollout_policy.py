"""Rolling out versions: a table of single decisions, and laws over simulated fleets."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from models_admin.policy.rollout import (
    Check,
    Fleet,
    Rollout,
    Run,
    Slot,
    VersionState,
    Wish,
    rollout,
)

OLD, NEW = Slot(1, 0), Slot(2, 0)


def old(ready: int = 1, **changes: object) -> Run:
    run = Run(slot=OLD, name="old", state=VersionState.SERVING, has=ready, ready=ready)
    return dataclasses.replace(run, **changes)  # type: ignore[arg-type]


def new(**changes: object) -> Run:
    run = Run(slot=NEW, name="new", state=VersionState.CANDIDATE)
    return dataclasses.replace(run, **changes)  # type: ignore[arg-type]


def decide(*runs: Run, wanted: int = 1, spare: int = 0, asked: Slot = NEW) -> Rollout:
    return rollout(Fleet(wanted=wanted, asked=asked, runs=runs, spare=spare))


def counts(decided: Rollout) -> dict[Slot, int]:
    return {wish.slot: wish.replicas for wish in decided.wishes}


def of(decided: Rollout, slot: Slot) -> Wish:
    return next(wish for wish in decided.wishes if wish.slot == slot)


def test_a_candidate_starts_beside_the_old_one_where_a_device_is_free() -> None:
    decided = decide(old(2), new(), wanted=2, spare=1)

    assert counts(decided) == {OLD: 2, NEW: 1}
    assert of(decided, NEW).state is VersionState.CANDIDATE
    assert "beside" in of(decided, NEW).reason


def test_where_none_is_free_it_is_checked_before_anything_gives_way() -> None:
    decided = decide(old(2), new(), wanted=2)

    assert counts(decided) == {OLD: 2, NEW: 0}
    assert decided.check == NEW
    assert "no device is free" in of(decided, NEW).reason


def test_one_that_passed_takes_over_in_place_one_by_one() -> None:
    decided = decide(old(2), new(check=Check.PASSED), wanted=2)

    assert counts(decided) == {OLD: 1, NEW: 1}
    assert decided.check is None
    assert "in place" in of(decided, NEW).reason


def test_one_that_cannot_be_loaded_leaves_the_old_one_serving_and_says_why() -> None:
    why = "wrong_shapes: (2, 3), not (3, 3)"

    by_check = decide(old(), new(check=Check.FAILED, check_text=why))
    by_start = decide(old(), new(has=1, failing=why), spare=1)

    for decided in (by_check, by_start):
        assert counts(decided) == {OLD: 1, NEW: 0}
        assert of(decided, NEW).state is VersionState.FAILED
        assert of(decided, NEW).reason == why
        assert of(decided, OLD).state is VersionState.SERVING


def test_the_first_ready_replica_makes_it_the_one_that_serves() -> None:
    decided = decide(old(2), new(has=1, ready=1), wanted=2, spare=1)

    assert of(decided, NEW).state is VersionState.SERVING
    assert of(decided, OLD).state is VersionState.RETIRING
    assert counts(decided) == {OLD: 1, NEW: 2}


def test_the_others_follow_one_by_one_however_many_devices_are_free() -> None:
    decided = decide(old(4), new(has=1, ready=1), wanted=4, spare=4)

    assert counts(decided) == {OLD: 3, NEW: 2}


def test_an_old_version_keeps_one_until_its_backlog_is_empty() -> None:
    retiring = old(1, state=VersionState.RETIRING, backlog=7)
    serving = new(state=VersionState.SERVING, has=1, ready=1)

    held = decide(retiring, serving, wanted=2)
    done = decide(dataclasses.replace(retiring, backlog=0), serving, wanted=2)

    assert counts(held) == {OLD: 1, NEW: 1}
    assert "7 requests are open" in of(held, OLD).reason
    assert counts(done) == {OLD: 0, NEW: 2}


def test_where_nobody_can_tell_it_is_not_taken_for_empty() -> None:
    retiring = old(1, state=VersionState.RETIRING, backlog=None)
    retired = old(0, state=VersionState.RETIRED, backlog=None)
    serving = new(state=VersionState.SERVING, has=2, ready=2)

    assert counts(decide(retiring, serving, wanted=2)) == {OLD: 1, NEW: 1}
    assert counts(decide(retired, serving, wanted=2)) == {OLD: 0, NEW: 2}


def test_an_operator_may_retire_it_with_its_backlog() -> None:
    withdrawn = old(0, state=VersionState.RETIRING, backlog=7, is_withdrawn=True)
    decided = decide(withdrawn, new(state=VersionState.SERVING, has=1, ready=1))

    assert (of(decided, OLD).replicas, of(decided, OLD).state) == (0, VersionState.RETIRED)
    assert "operator" in of(decided, OLD).reason


def test_a_version_comes_back_for_work_that_was_pinned_to_it_late() -> None:
    retired = old(0, state=VersionState.RETIRED, backlog=1)
    decided = decide(retired, new(state=VersionState.SERVING, has=2, ready=2), wanted=2)

    assert counts(decided) == {OLD: 1, NEW: 1}
    assert of(decided, OLD).state is VersionState.RETIRING


def test_with_one_device_new_work_goes_to_the_checked_one_and_the_old_work_is_ended_first() -> None:
    waiting = decide(old(1, backlog=5), new(check=Check.PASSED))
    after = decide(old(1, state=VersionState.RETIRING, backlog=5), new(state=VersionState.SERVING))
    done = decide(old(1, state=VersionState.RETIRING), new(state=VersionState.SERVING))

    assert counts(waiting) == counts(after) == {OLD: 1, NEW: 0}
    assert of(waiting, NEW).state is VersionState.SERVING, "or the old backlog would never end"
    assert "retires" in of(waiting, NEW).reason
    assert counts(done) == {OLD: 0, NEW: 1}


def test_one_that_does_not_start_any_more_makes_room() -> None:
    broken = old(0, has=1, state=VersionState.RETIRING, backlog=5, failing="killed by SIGKILL")

    decided = decide(broken, new(state=VersionState.SERVING))
    beside = decide(broken, new(state=VersionState.SERVING), spare=1)

    assert counts(decided) == {OLD: 0, NEW: 1}
    assert "retire it" in of(decided, OLD).reason
    assert counts(beside) == {OLD: 1, NEW: 1}


def test_a_version_that_never_served_is_replaced_without_ado() -> None:
    decided = decide(old(0, has=1, state=VersionState.CANDIDATE), new())

    assert counts(decided) == {OLD: 0, NEW: 1}
    assert of(decided, OLD).state is VersionState.RETIRING


def test_the_same_version_with_other_options_has_no_backlog_of_its_own() -> None:
    twin = new(name="old", state=VersionState.SERVING, has=1, ready=1)

    assert counts(decide(old(0, state=VersionState.RETIRING, backlog=9), twin))[OLD] == 0


def test_what_is_stopped_has_no_replica_and_no_change() -> None:
    decided = decide(old(), new(), wanted=0)

    assert set(counts(decided).values()) == {0}
    assert of(decided, OLD).state is VersionState.SERVING


# Laws

states = st.sampled_from(VersionState)
names = st.sampled_from(["", "a", "b", "c"])
backlogs = st.one_of(st.none(), st.integers(0, 3))


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    slots = draw(
        st.lists(
            st.builds(Slot, st.integers(1, 4), st.integers(0, 1)),
            min_size=1,
            max_size=5,
            unique=True,
        )
    )
    runs = []
    for slot in slots:
        has = draw(st.integers(0, 4))
        runs.append(
            Run(
                slot=slot,
                name=draw(names),
                state=draw(states),
                has=has,
                ready=draw(st.integers(0, has)),
                failing=draw(st.sampled_from(["", "killed by SIGKILL"])),
                backlog=draw(backlogs),
                check=draw(st.sampled_from(Check)),
                check_text="no such weights",
                is_withdrawn=draw(st.booleans()),
            )
        )
    return Fleet(
        wanted=draw(st.integers(0, 4)), asked=slots[0], runs=runs, spare=draw(st.integers(0, 3))
    )


law = settings(deadline=None, max_examples=400)


@law
@given(fleets())
def test_each_run_gets_one_wish_and_all_together_no_more_than_there_is_room_for(
    fleet: Fleet,
) -> None:
    decided = rollout(fleet)

    assert sorted(counts(decided)) == sorted(run.slot for run in fleet.runs)
    assert all(wish.replicas >= 0 for wish in decided.wishes)
    room = fleet.wanted + fleet.spare if fleet.wanted else 0
    assert sum(counts(decided).values()) <= room


@law
@given(fleets())
def test_nothing_gives_way_to_what_was_neither_checked_nor_found_to_serve(fleet: Fleet) -> None:
    asked = next(run for run in fleet.runs if run.slot == fleet.asked)
    before = next(
        (
            run
            for run in fleet.runs
            if run.state is VersionState.SERVING and run.slot.version != asked.slot.version
        ),
        None,
    )
    unproven = asked.state in {VersionState.CANDIDATE, VersionState.FAILED} and not asked.ready
    if before is None or not unproven or asked.check is Check.PASSED or not fleet.wanted:
        return
    decided = rollout(fleet)

    assert of(decided, before.slot).state is VersionState.SERVING
    others = sum(
        wish.replicas for wish in decided.wishes if wish.slot not in (before.slot, asked.slot)
    )
    assert of(decided, before.slot).replicas + others >= fleet.wanted


@law
@given(fleets())
def test_what_is_wanted_is_never_left_without_any_replica(fleet: Fleet) -> None:
    decided = rollout(fleet)

    assert not fleet.wanted or any(counts(decided).values())


@dataclasses.dataclass
class Box:
    """A pool where servers start and drain as they are told; each takes a few passes."""

    devices: int
    wanted: int
    backlog: dict[int, int]
    bad: frozenset[int] = frozenset()
    states: dict[int, VersionState] = dataclasses.field(default_factory=dict)
    servers: list[list[int]] = dataclasses.field(default_factory=list)
    """[version, passes until ready]."""
    draining: list[int] = dataclasses.field(default_factory=list)
    checked: set[int] = dataclasses.field(default_factory=set)
    failed: set[int] = dataclasses.field(default_factory=set)

    def step(self, asked: int) -> None:
        self.states.setdefault(asked, VersionState.CANDIDATE)
        runs = [self._run(version) for version in self.states]
        decided = rollout(
            Fleet(
                wanted=self.wanted,
                asked=Slot(asked, 0),
                runs=runs,
                spare=self.devices - self.wanted,
            )
        )
        if decided.check is not None:
            self.checked.add(decided.check.version)
        for wish in decided.wishes:
            version = wish.slot.version
            self.states[version] = wish.state
            own = [server for server in self.servers if server[0] == version]
            for server in own[wish.replicas :]:
                self.servers.remove(server)
                self.draining.append(2)
            for _ in range(wish.replicas - len(own)):
                if len(self.servers) + len(self.draining) < self.devices:
                    self.servers.append([version, 3])
        assert len(self.servers) + len(self.draining) <= self.devices
        for server in self.servers:
            server[1] = max(0, server[1] - 1)
            if server[0] in self.bad and server[1] == 0:
                self.failed.add(server[0])
                server[1] = 99
        self.draining = [left - 1 for left in self.draining if left > 1]
        for version in {server[0] for server in self.servers if server[1] == 0}:
            self.backlog[version] = max(0, self.backlog.get(version, 0) - 1)

    def _run(self, version: int) -> Run:
        own = [server for server in self.servers if server[0] == version]
        is_checked = version in self.checked
        bad = version in self.bad
        return Run(
            slot=Slot(version, 0),
            name=f"v{version}",
            state=self.states[version],
            has=len(own),
            ready=sum(left == 0 for _, left in own),
            failing="wrong_shapes" if version in self.failed else "",
            backlog=self.backlog.get(version, 0),
            check=Check.NONE if not is_checked else Check.FAILED if bad else Check.PASSED,
            check_text="wrong_shapes",
        )


@settings(deadline=None, max_examples=150)
@given(
    wanted=st.integers(1, 4),
    spare=st.integers(0, 2),
    backlog=st.integers(0, 30),
    bad=st.booleans(),
)
def test_a_rollout_comes_to_its_end_whatever_the_room_and_never_leaves_nothing_serving(
    wanted: int, spare: int, backlog: int, bad: bool
) -> None:
    box = Box(devices=wanted + spare, wanted=wanted, backlog={1: backlog})
    box.bad = frozenset({2}) if bad else frozenset()
    for _ in range(10):
        box.step(1)
    least = wanted
    for _ in range(120):
        box.step(2)
        least = min(least, sum(left == 0 for _, left in box.servers))

    good = 1 if bad else 2
    assert box.states[good] is VersionState.SERVING
    assert [version for version, _ in box.servers] == [good] * wanted
    assert box.states[3 - good] is (VersionState.FAILED if bad else VersionState.RETIRED)
    if bad or spare:
        assert least == wanted, "nothing was lost meanwhile"
    elif wanted > 1:
        assert least >= wanted - 1
