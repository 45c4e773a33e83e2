"""Reconciling model servers: a table of single decisions, and laws over simulated machines."""

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models_admin.policy.reconcile import (
    DRAIN_LIMIT,
    LIVE,
    LONGEST_BACKOFF,
    SILENCE_LIMIT,
    STABLE_AFTER,
    START_LIMIT,
    Act,
    Desired,
    Record,
    Replica,
    Seen,
    ServerState,
    Step,
    backoff,
    held_back,
    launch_failed,
    reconcile,
    summary,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ONE = Desired(replicas=1, generation=0)
NONE = Desired(replicas=0, generation=0)
SERVING = Seen(answers=True, ready=True)


def ago(**span: float) -> datetime:
    return NOW - timedelta(**span)


def ready(**changes: object) -> Record:
    record = Record(state=ServerState.READY, started_at=ago(hours=2), ready_at=ago(hours=1))
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]


def only(desired: Desired, replica: Replica, now: datetime = NOW) -> Step:
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

    step = only(
        Desired(replicas=1, generation=1), Replica(ordinal=0, record=record), ago(seconds=50)
    )

    assert (step.act, step.record.failures, step.record.generation) == (Act.START, 0, 1)


def test_stopping_drains_first_and_stops_when_idle() -> None:
    leaving = only(NONE, Replica(ordinal=0, record=ready(), seen=SERVING))
    busy = Replica(ordinal=0, record=leaving.record, seen=SERVING)
    idle = Replica(ordinal=0, record=leaving.record, seen=Seen(answers=True, ready=True, idle=True))

    assert (leaving.act, leaving.record.state) == (Act.WAIT, ServerState.DRAINING)
    assert only(NONE, busy, NOW + timedelta(seconds=10)).act is Act.WAIT
    assert only(NONE, idle, NOW + timedelta(seconds=1)).act is Act.WAIT, "late messages arrive"
    assert only(NONE, idle, NOW + timedelta(seconds=3)).act is Act.STOP
    assert only(NONE, busy, NOW + DRAIN_LIMIT).act is Act.STOP


def test_a_server_that_served_nothing_is_stopped_without_draining() -> None:
    record = Record(state=ServerState.WARMING, started_at=ago(seconds=5))

    step = only(NONE, Replica(ordinal=0, record=record, seen=Seen(answers=True)))

    assert (step.act, step.record.state) == (Act.STOP, ServerState.DRAINING)


def test_a_silent_server_is_stopped_and_comes_back_after_a_pause() -> None:
    silent = Seen(silent=SILENCE_LIMIT + timedelta(seconds=1))

    step = only(ONE, Replica(ordinal=0, record=ready(), seen=silent))

    assert (step.act, step.record.state) == (Act.STOP, ServerState.BACKOFF)
    assert "no answer" in step.reason


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
    step = only(ONE, Replica(ordinal=0, seen=SERVING))

    assert (step.act, step.record.state) == (Act.KEEP, ServerState.STARTING)


def test_a_failed_launch_is_told_and_tried_again() -> None:
    record, reason = launch_failed(Record(state=ServerState.STARTING, failures=1), "no space", NOW)

    assert record.state is ServerState.FAILED
    assert record.next_start_at == NOW + timedelta(seconds=2)
    assert "no space" in reason


def test_a_new_configuration_that_does_not_start_leaves_the_rest_serving() -> None:
    desired = Desired(replicas=3, generation=1)
    broken = Record(
        state=ServerState.BACKOFF,
        generation=1,
        failures=2,
        started_at=ago(seconds=2),
        next_start_at=NOW + timedelta(seconds=5),
    )
    replicas = [
        Replica(ordinal=0, record=broken),
        *(Replica(ordinal=n, record=ready(), seen=SERVING) for n in (1, 2)),
    ]

    steps = reconcile(desired, replicas, NOW)

    assert [step.act for step in steps] == [Act.WAIT, Act.KEEP, Act.KEEP]


def test_summary_counts_states() -> None:
    states = [ServerState.READY, ServerState.BACKOFF, ServerState.READY]

    assert summary(states) == "2 READY, 1 BACKOFF"
    assert summary([]) == "none"


# Laws

instants = st.one_of(st.none(), st.integers(-2_000, 100).map(lambda s: NOW + timedelta(seconds=s)))
records = st.builds(
    Record,
    state=st.sampled_from(ServerState),
    generation=st.integers(0, 2),
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
wishes = st.builds(Desired, replicas=st.integers(0, 5), generation=st.integers(0, 2))
law = settings(deadline=None, max_examples=200)


@law
@given(desired=wishes, replicas=machines)
def test_each_replica_gets_one_step_with_a_reason(
    desired: Desired, replicas: list[Replica]
) -> None:
    steps = reconcile(desired, replicas, NOW)

    ordinals = {replica.ordinal for replica in replicas} | set(range(desired.replicas))
    assert [step.ordinal for step in steps] == sorted(ordinals)
    assert all(step.reason for step in steps)


@law
@given(desired=wishes, replicas=machines)
def test_no_second_process_and_none_that_is_not_wanted(
    desired: Desired, replicas: list[Replica]
) -> None:
    living = {replica.ordinal for replica in replicas if replica.seen}

    for step in reconcile(desired, replicas, NOW):
        if step.act is Act.START:
            assert step.ordinal not in living
            assert step.ordinal < desired.replicas
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
@given(replicas=st.integers(2, 6), old=st.integers(1, 6))
def test_a_restart_takes_one_serving_replica_at_a_time(replicas: int, old: int) -> None:
    desired = Desired(replicas=replicas, generation=1)
    serving = [
        Replica(ordinal=n, record=ready(generation=int(n >= old)), seen=SERVING)
        for n in range(replicas)
    ]

    steps = reconcile(desired, serving, NOW)

    leaving = [step for step in steps if step.record.state is ServerState.DRAINING]
    assert [step.ordinal for step in leaving] == [0]


@given(failures=st.integers(0, 10_000))
def test_back_off_is_bounded_and_never_shrinks(failures: int) -> None:
    assert timedelta(seconds=1) <= backoff(failures) <= backoff(failures + 1) <= LONGEST_BACKOFF


@dataclasses.dataclass
class Machine:
    """A machine that does what it is told, with a second a pass."""

    records: dict[int, Record] = dataclasses.field(default_factory=dict)
    processes: dict[int, int] = dataclasses.field(default_factory=dict)
    """Passes until it is ready, by ordinal."""
    ended: dict[int, str] = dataclasses.field(default_factory=dict)
    now: datetime = NOW
    agent_is_new: bool = False

    def run(self, desired: Desired) -> None:
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
        for step in reconcile(desired, replicas, self.now):
            self.records[step.ordinal] = step.record
            if step.act is Act.START:
                assert step.ordinal not in self.processes
                self.processes[step.ordinal] = 3
            if step.act is Act.STOP:
                del self.processes[step.ordinal]
        self.agent_is_new = False
        self.processes = {n: max(0, left - 1) for n, left in self.processes.items()}
        self.now += timedelta(seconds=1)

    def _seen(self, ordinal: int) -> Seen | None:
        left = self.processes.get(ordinal)
        return None if left is None else Seen(answers=True, ready=left == 0, idle=True)

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
    final=wishes,
)
def test_whatever_happened_the_machine_comes_to_what_is_wanted(
    history: list[tuple[int, int, str]], final: Desired
) -> None:
    machine = Machine()
    for replicas, generation, fault in history:
        if fault:
            machine.suffer(fault)
        machine.run(Desired(replicas=replicas, generation=generation))

    for _ in range(300):
        machine.run(final)

    assert set(machine.processes) == set(range(final.replicas))
    for ordinal, record in machine.records.items():
        wanted = ordinal < final.replicas
        assert record.state is (ServerState.READY if wanted else ServerState.STOPPED)
        assert not wanted or record.generation == final.generation
        assert (record.state in LIVE) == wanted
