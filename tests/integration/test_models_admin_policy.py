"""Reconciling model servers: a table of single decisions, and laws over simulated machines."""

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models_admin.policy.assignment import assign
from models_admin.policy.reconcile import (
    DRAIN_LEAST,
    LONGEST_BACKOFF,
    LONGEST_CALL,
    REFUSED_PAUSE,
    SILENCE_LIMIT,
    STABLE_AFTER,
    START_LIMIT,
    Act,
    Desired,
    Step,
    backoff,
    drain_limit,
    held_back,
    launch_failed,
    reconcile,
)
from models_admin.policy.replicas import LIVE, Record, Replica, Seen, ServerState, summary
from models_admin.policy.rollout import Slot

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RUN = Slot(version=1, generation=0)
NEXT = Slot(version=1, generation=1)
ONE = Desired(slots={0: RUN})
NONE = Desired(slots={})
SERVING = Seen(answers=True, ready=True)


def ago(**span: float) -> datetime:
    return NOW - timedelta(**span)


def ready(**changes: object) -> Record:
    record = Record(
        state=ServerState.READY, slot=RUN, started_at=ago(hours=2), ready_at=ago(hours=1)
    )
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]


def only(desired: Desired, replica: Replica, now: datetime = NOW) -> Step:
    if replica.record.slot is None:
        replica = dataclasses.replace(replica, record=dataclasses.replace(replica.record, slot=RUN))
    (step,) = reconcile(desired, [replica], now)
    return step


def test_a_wanted_replica_that_was_never_seen_is_started() -> None:
    (step,) = reconcile(ONE, [], NOW)

    assert (step.ordinal, step.act, step.record.state) == (0, Act.START, ServerState.STARTING)
    assert step.record.started_at == NOW


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (Seen(), ServerState.STARTING),
        (Seen(answers=True), ServerState.WARMING),
        (SERVING, ServerState.READY),
    ],
)
def test_a_starting_server_goes_by_what_it_answers(seen: Seen, state: ServerState) -> None:
    record = Record(state=ServerState.STARTING, started_at=ago(seconds=5))

    step = only(ONE, Replica(ordinal=0, record=record, seen=seen))

    assert step.record.state is state
    assert step.act in {Act.WAIT, Act.KEEP}


def test_death_costs_a_pause_that_doubles_up_to_a_minute() -> None:
    record = Record(state=ServerState.WARMING, started_at=ago(seconds=3))
    pauses = []
    for _ in range(9):
        step = only(ONE, Replica(ordinal=0, record=record, ended="killed by SIGKILL"))
        assert step.record.next_start_at is not None
        pauses.append((step.record.next_start_at - NOW).total_seconds())
        record = dataclasses.replace(step.record, state=ServerState.WARMING)

    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert "killed by SIGKILL" in step.reason


def test_a_server_that_was_stable_dies_with_a_clean_slate() -> None:
    record = ready(failures=6, ready_at=NOW - STABLE_AFTER)

    step = only(ONE, Replica(ordinal=0, record=record, ended="killed by SIGKILL"))

    assert step.record.failures == 1
    assert step.record.next_start_at == NOW + timedelta(seconds=1)


def test_a_server_in_back_off_starts_when_its_time_has_come_and_not_before() -> None:
    record = Record(
        state=ServerState.BACKOFF, failures=3, started_at=ago(seconds=9), next_start_at=NOW
    )
    replica = Replica(ordinal=0, record=record)

    early = only(ONE, replica, NOW - timedelta(milliseconds=1))
    due = only(ONE, replica, NOW)

    assert early.act is Act.WAIT
    assert (due.act, due.record.failures) == (Act.START, 3)


def test_a_clock_that_was_set_back_holds_up_neither_a_start_nor_the_end_of_a_drain() -> None:
    paused = Record(state=ServerState.BACKOFF, failures=3, next_start_at=NOW + REFUSED_PAUSE * 2)
    draining = ready(state=ServerState.DRAINING, draining_at=NOW + LONGEST_CALL)

    started = only(ONE, Replica(ordinal=0, record=paused))
    ended = only(NONE, Replica(ordinal=0, record=draining, seen=SERVING))

    assert started.act is Act.START
    assert ended.act is Act.STOP


def test_a_start_that_is_held_back_is_one_that_was_not_tried() -> None:
    record = Record(
        state=ServerState.BACKOFF, failures=3, started_at=ago(seconds=9), next_start_at=NOW
    )
    start = only(ONE, Replica(ordinal=0, record=record))

    held = held_back(start, record, "no device is free")
    later = only(ONE, Replica(ordinal=0, record=held.record), NOW + timedelta(seconds=9))

    assert (held.act, held.reason) == (Act.WAIT, "no device is free")
    assert held.record == dataclasses.replace(record, state=ServerState.STOPPED, next_start_at=None)
    assert (later.act, later.record.failures) == (Act.START, 3)


def test_a_restart_ends_back_off_at_once() -> None:
    record = Record(
        state=ServerState.BACKOFF, failures=6, started_at=ago(seconds=9), next_start_at=NOW
    )

    step = only(Desired(slots={0: NEXT}), Replica(ordinal=0, record=record), ago(seconds=50))

    assert (step.act, step.record.failures, step.record.slot) == (Act.START, 0, NEXT)


def test_stopping_drains_first_and_stops_when_idle() -> None:
    leaving = only(NONE, Replica(ordinal=0, record=ready(), seen=SERVING))
    busy = Replica(ordinal=0, record=leaving.record, seen=SERVING)
    idle = Replica(ordinal=0, record=leaving.record, seen=Seen(answers=True, ready=True, idle=True))

    assert (leaving.act, leaving.record.state) == (Act.WAIT, ServerState.DRAINING)
    assert only(NONE, busy, NOW + timedelta(seconds=10)).act is Act.WAIT
    assert only(NONE, idle, NOW + timedelta(seconds=1)).act is Act.WAIT, "late messages arrive"
    assert only(NONE, idle, NOW + timedelta(seconds=3)).act is Act.STOP
    assert only(NONE, busy, NOW + LONGEST_CALL).act is Act.STOP


def test_a_server_that_served_nothing_is_stopped_without_draining() -> None:
    record = Record(state=ServerState.WARMING, started_at=ago(seconds=5))

    step = only(NONE, Replica(ordinal=0, record=record, seen=Seen(answers=True)))

    assert (step.act, step.record.state) == (Act.STOP, ServerState.DRAINING)


def test_a_silent_server_is_stopped_and_comes_back_after_a_pause() -> None:
    silent = Seen(silent=SILENCE_LIMIT + timedelta(seconds=1))

    step = only(ONE, Replica(ordinal=0, record=ready(), seen=silent))

    assert (step.act, step.record.state) == (Act.STOP, ServerState.BACKOFF)
    assert "no answer" in step.reason


def test_one_that_compiles_may_be_silent() -> None:
    record = Record(state=ServerState.WARMING, started_at=ago(seconds=90))
    seen = Seen(silent=SILENCE_LIMIT + timedelta(seconds=1))

    assert only(ONE, Replica(ordinal=0, record=record, seen=seen)).act is Act.WAIT


def test_one_slow_answer_costs_nothing() -> None:
    step = only(ONE, Replica(ordinal=0, record=ready(), seen=Seen(silent=timedelta(seconds=12))))

    assert (step.act, step.record) == (Act.WAIT, ready())


def test_a_server_that_never_gets_ready_is_a_failure() -> None:
    record = Record(state=ServerState.WARMING, started_at=NOW - START_LIMIT - timedelta(seconds=1))

    step = only(ONE, Replica(ordinal=0, record=record, seen=Seen(answers=True)))

    assert (step.act, step.record.state) == (Act.STOP, ServerState.BACKOFF)


def test_rows_of_a_dead_agent_are_started_again_without_counting_a_failure() -> None:
    step = only(ONE, Replica(ordinal=0, record=ready(), inherited=True))

    assert (step.act, step.record.failures) == (Act.START, 0)
    assert "ended with its agent" in step.reason


def test_a_living_wanted_server_whose_row_was_lost_is_adopted() -> None:
    seen = dataclasses.replace(SERVING, slot=RUN)
    (step,) = reconcile(ONE, [Replica(ordinal=0, seen=seen)], NOW)

    assert (step.act, step.record.state) == (Act.KEEP, ServerState.STARTING)
    assert step.record.slot == RUN


def test_a_failed_launch_is_told_and_tried_again() -> None:
    record, reason = launch_failed(Record(state=ServerState.STARTING, failures=1), "no space", NOW)

    assert record.state is ServerState.FAILED
    assert record.next_start_at == NOW + timedelta(seconds=2)
    assert "no space" in reason


def test_a_new_configuration_that_does_not_start_leaves_the_rest_serving() -> None:
    broken = Record(
        state=ServerState.BACKOFF,
        slot=NEXT,
        failures=2,
        started_at=ago(seconds=2),
        next_start_at=NOW + timedelta(seconds=5),
    )
    replicas = [
        Replica(ordinal=0, record=broken),
        *(Replica(ordinal=n, record=ready(), seen=SERVING) for n in (1, 2)),
    ]

    steps = reconcile(Desired(slots=assign({NEXT: 1, RUN: 2}, replicas)), replicas, NOW)

    assert [step.act for step in steps] == [Act.WAIT, Act.KEEP, Act.KEEP]


def test_a_refusal_to_load_is_no_crash_loop() -> None:
    record = Record(state=ServerState.WARMING, started_at=ago(seconds=3))
    why = "wrong_shapes: (2, 3), not (3, 3)"

    died = only(ONE, Replica(ordinal=0, record=record, ended=why, refused=True))
    later = only(ONE, Replica(ordinal=0, record=died.record), NOW + REFUSED_PAUSE / 2)
    again = only(ONE, Replica(ordinal=0, record=died.record), NOW + REFUSED_PAUSE)

    assert died.record.state is ServerState.FAILED
    assert died.reason.startswith(why)
    assert (later.act, later.reason) == (Act.WAIT, ""), "what it is FAILED for stays"
    assert again.act is Act.START


def test_one_that_is_told_to_end_from_outside_drains_and_comes_back_at_once() -> None:
    notice = Seen(answers=True, draining=True, slot=RUN)

    noticed = only(ONE, Replica(ordinal=0, record=ready(failures=2), seen=notice))
    drains = only(
        ONE, Replica(ordinal=0, record=noticed.record, seen=notice), NOW + timedelta(seconds=20)
    )
    gone = Replica(ordinal=0, record=drains.record, ended="ended with exit code 0", ended_well=True)
    back = only(ONE, gone)

    assert (noticed.act, noticed.record.state) == (Act.WAIT, ServerState.DRAINING)
    assert "from outside" in noticed.reason
    assert drains.act is Act.WAIT
    assert (back.act, back.record.failures) == (Act.START, 2)


def test_one_that_ended_well_before_anybody_saw_it_drain_has_not_died() -> None:
    gone = Replica(ordinal=0, record=ready(), ended="ended with exit code 0", ended_well=True)
    early = dataclasses.replace(gone, record=ready(ready_at=None))

    assert (only(ONE, gone).act, only(ONE, gone).record.failures) == (Act.START, 0)
    assert only(ONE, early).record.state is ServerState.BACKOFF, "or it would be started for ever"


def test_a_broken_device_is_a_death_although_its_server_drained() -> None:
    record = ready(state=ServerState.DRAINING, draining_at=ago(seconds=2))

    step = only(ONE, Replica(ordinal=0, record=record, ended="ended with exit code 1: broken"))

    assert (step.record.state, step.record.failures) == (ServerState.BACKOFF, 1)


def test_a_drain_lasts_as_long_as_a_call_may() -> None:
    assert drain_limit(60.0) == timedelta(seconds=60)
    assert drain_limit(3600.0) == LONGEST_CALL
    assert drain_limit(0.1) == DRAIN_LEAST


class TestAssigning:
    """Which replica has which slot."""

    def test_the_first_that_run_it_keep_it(self) -> None:
        replicas = [Replica(ordinal=n, record=ready(), seen=SERVING) for n in range(3)]

        assert assign({RUN: 2}, replicas) == {0: RUN, 1: RUN}

    def test_a_new_run_never_takes_the_place_of_one_that_lives(self) -> None:
        replicas = [
            Replica(ordinal=0, record=ready(), seen=SERVING),
            Replica(ordinal=1, record=ready(state=ServerState.DRAINING), seen=SERVING),
            Replica(ordinal=2, record=ready(state=ServerState.STOPPED)),
        ]

        assert assign({RUN: 1, NEXT: 2}, replicas) == {0: RUN, 2: NEXT, 3: NEXT}

    def test_one_that_drains_is_none_of_those_that_are_wanted(self) -> None:
        replicas = [
            Replica(ordinal=0, record=ready(state=ServerState.DRAINING), seen=SERVING),
            Replica(ordinal=1, record=ready(), seen=SERVING),
        ]

        assert assign({RUN: 2}, replicas) == {1: RUN, 2: RUN}

    def test_what_started_for_one_that_drained_keeps_its_place_when_that_is_gone(self) -> None:
        gone = Replica(ordinal=0, record=ready(state=ServerState.DRAINING), ended="exit code 0")
        started = Replica(ordinal=1, record=ready(state=ServerState.STARTING), seen=Seen(slot=RUN))

        assert assign({RUN: 1}, [gone, started]) == {1: RUN}

    def test_one_that_pauses_keeps_its_place_and_its_pause(self) -> None:
        paused = Record(state=ServerState.BACKOFF, slot=RUN, failures=3, next_start_at=NOW)

        assert assign({RUN: 1}, [Replica(ordinal=4, record=paused)]) == {4: RUN}


def test_summary_counts_states() -> None:
    states = [ServerState.READY, ServerState.BACKOFF, ServerState.READY]

    assert summary(states) == "2 READY, 1 BACKOFF"
    assert summary([]) == "none"


# Laws

instants = st.one_of(st.none(), st.integers(-2_000, 100).map(lambda s: NOW + timedelta(seconds=s)))
slots = st.builds(Slot, version=st.integers(1, 3), generation=st.integers(0, 2))
records = st.builds(
    Record,
    state=st.sampled_from(ServerState),
    slot=st.one_of(st.none(), slots),
    failures=st.integers(0, 20),
    started_at=instants,
    ready_at=instants,
    draining_at=instants,
    next_start_at=instants,
)
sightings = st.builds(
    Seen,
    answers=st.booleans(),
    ready=st.booleans(),
    silent=st.integers(0, 100).map(lambda s: timedelta(seconds=s)),
    idle=st.booleans(),
    stopping=st.booleans(),
    draining=st.booleans(),
    slot=st.one_of(st.none(), slots),
)
machines = st.dictionaries(
    st.integers(0, 5),
    st.tuples(records, st.one_of(st.none(), sightings), st.booleans()),
    max_size=6,
).map(
    lambda found: [
        Replica(ordinal=ordinal, record=record, seen=seen, inherited=inherited)
        for ordinal, (record, seen, inherited) in found.items()
    ]
)
wishes = st.builds(Desired, slots=st.dictionaries(st.integers(0, 5), slots))
law = settings(deadline=None, max_examples=200)


@law
@given(desired=wishes, replicas=machines)
def test_each_replica_gets_one_step_with_a_reason(
    desired: Desired, replicas: list[Replica]
) -> None:
    steps = reconcile(desired, replicas, NOW)

    ordinals = {replica.ordinal for replica in replicas} | desired.slots.keys()
    assert [step.ordinal for step in steps] == sorted(ordinals)
    assert all(step.reason or step.record.state is ServerState.FAILED for step in steps)


@law
@given(desired=wishes, replicas=machines)
def test_no_second_process_and_none_that_is_not_wanted(
    desired: Desired, replicas: list[Replica]
) -> None:
    living = {replica.ordinal for replica in replicas if replica.seen}

    for step in reconcile(desired, replicas, NOW):
        if step.act is Act.START:
            assert step.ordinal not in living
            assert step.record.slot == desired.slots[step.ordinal]
        if step.act is Act.STOP:
            assert step.ordinal in living


@law
@given(desired=wishes, replicas=machines)
def test_what_pauses_says_until_when_and_what_is_ready_since_when(
    desired: Desired, replicas: list[Replica]
) -> None:
    known = {replica.ordinal: replica.record for replica in replicas}

    for step in reconcile(desired, replicas, NOW):
        before = known.get(step.ordinal)
        paused = step.record.state in {ServerState.BACKOFF, ServerState.FAILED}
        assert not paused or step.record.next_start_at or step.record is before
        if step.record.state is ServerState.READY and step.record is not before:
            assert step.record.ready_at is not None


@law
@given(wanted=st.dictionaries(slots, st.integers(0, 3), max_size=4), replicas=machines)
def test_each_slot_is_given_as_often_as_it_is_wanted_and_never_over_another_process(
    wanted: dict[Slot, int], replicas: list[Replica]
) -> None:
    found = assign(wanted, replicas)

    for slot, count in wanted.items():
        assert list(found.values()).count(slot) == count
    for replica in replicas:
        if replica.seen is not None and replica.ordinal in found:
            assert found[replica.ordinal] == replica.slot


@given(failures=st.integers(0, 10_000))
def test_back_off_is_bounded_and_never_shrinks(failures: int) -> None:
    assert timedelta(seconds=1) <= backoff(failures) <= backoff(failures + 1) <= LONGEST_BACKOFF


@dataclasses.dataclass
class Machine:
    """A machine that does what it is told, with a second a pass."""

    records: dict[int, Record] = dataclasses.field(default_factory=dict)
    processes: dict[int, int] = dataclasses.field(default_factory=dict)
    """Passes until it is ready, by ordinal."""
    launched: dict[int, Slot] = dataclasses.field(default_factory=dict)
    ended: dict[int, str] = dataclasses.field(default_factory=dict)
    now: datetime = NOW
    agent_is_new: bool = False

    def run(self, wanted: dict[Slot, int]) -> None:
        names = self.records.keys() | self.processes.keys()
        replicas = [
            Replica(
                ordinal=n,
                record=self.records.get(n, Record()),
                seen=self._seen(n),
                ended=self.ended.pop(n, ""),
                inherited=self.agent_is_new,
            )
            for n in names
        ]
        desired = Desired(slots=assign(wanted, replicas))
        for step in reconcile(desired, replicas, self.now):
            self.records[step.ordinal] = step.record
            if step.act is Act.START:
                assert step.ordinal not in self.processes
                assert step.record.slot is not None
                self.launched[step.ordinal] = step.record.slot
                self.processes[step.ordinal] = 3
            if step.act is Act.STOP:
                del self.processes[step.ordinal]
        self.agent_is_new = False
        self.processes = {n: max(0, left - 1) for n, left in self.processes.items()}
        self.now += timedelta(seconds=1)

    def _seen(self, ordinal: int) -> Seen | None:
        left = self.processes.get(ordinal)
        if left is None:
            return None
        return Seen(answers=True, ready=left == 0, idle=True, slot=self.launched[ordinal])

    def suffer(self, fault: str) -> None:
        if fault == "agent" or not self.processes:
            self.processes, self.agent_is_new = {}, True
        elif fault == "row":
            self.records.pop(min(self.processes), None)
        else:
            victim = max(self.processes)
            del self.processes[victim]
            self.ended[victim] = "killed by SIGKILL"


@settings(deadline=None, max_examples=60)
@given(
    history=st.lists(
        st.tuples(
            st.integers(0, 4), st.integers(0, 2), st.sampled_from(["", "server", "agent", "row"])
        ),
        max_size=30,
    ),
    final=st.tuples(st.integers(0, 5), st.integers(0, 2)),
)
def test_whatever_happened_the_machine_comes_to_what_is_wanted(
    history: list[tuple[int, int, str]], final: tuple[int, int]
) -> None:
    machine = Machine()
    for replicas, generation, fault in history:
        if fault:
            machine.suffer(fault)
        machine.run({Slot(1, generation): replicas})
    replicas, generation = final

    for _ in range(300):
        machine.run({Slot(1, generation): replicas})

    assert len(machine.processes) == replicas
    for ordinal, record in machine.records.items():
        wanted = ordinal in machine.processes
        assert record.state is (ServerState.READY if wanted else ServerState.STOPPED)
        assert not wanted or record.slot == Slot(1, generation)
        assert (record.state in LIVE) == wanted
