import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.model_server.scheduler import (
    Batch,
    Room,
    Shaping,
    Waiting,
    admit,
    cover,
    next_batch,
    step_for,
)

STEPS = (32, 64, 96, 128)
SHAPING = Shaping(steps=STEPS, batch_tokens=256, fill_tokens=128, floor_every=0)


def waiting(
    key: int, *, priority: int = 51, step: int = 32, deadline_at: float | None = None
) -> Waiting:
    return Waiting(key=key, priority=priority, step=step, deadline_at=deadline_at)


@st.composite
def queues(draw: st.DrawFn) -> list[Waiting]:
    return [
        waiting(
            key,
            priority=draw(st.sampled_from([1, 51, 101])),
            step=draw(st.sampled_from(STEPS)),
            deadline_at=draw(st.sampled_from([None, None, 5.0, 15.0])),
        )
        for key in range(draw(st.integers(0, 25)))
    ]


def form(queue: list[Waiting], *, now: float = 10.0, passed: int = 0, **changes: int) -> Batch:
    shaping = Shaping(**{**{f: getattr(SHAPING, f) for f in Shaping.__slots__}, **changes})
    return next_batch(queue, now=now, passed=passed, shaping=shaping)


@pytest.mark.parametrize(("tokens", "step"), [(1, 32), (32, 32), (33, 64), (128, 128)])
def test_a_sequence_is_padded_to_the_next_step(tokens: int, step: int) -> None:
    assert step_for(tokens, STEPS) == step


def test_a_sequence_above_the_last_step_is_an_error() -> None:
    with pytest.raises(ValueError, match="129 tokens"):
        step_for(129, STEPS)


def test_the_most_urgent_leads_then_the_earliest() -> None:
    queue = [
        waiting(0, priority=101, step=64),
        waiting(1, priority=1, step=96),
        waiting(2, priority=1, step=32),
    ]

    batch = form(queue)

    assert batch.rows == (1,)
    assert batch.step == 96
    assert batch.reason == "1 is first of priority 1"


def test_a_batch_takes_one_step_up_to_its_tokens() -> None:
    queue = [waiting(key, step=64 if key % 2 else 96) for key in range(12)]

    assert form(queue).rows == (0, 2)
    assert form(queue[1:]).rows == (1, 3, 5, 7)


def test_less_urgent_rows_fill_only_as_far_as_that_is_free() -> None:
    queue = [waiting(0, priority=1), *(waiting(key, priority=101) for key in range(1, 9))]

    assert form(queue).rows == (0, 1, 2, 3)
    assert form(queue, fill_tokens=256).rows == tuple(range(8))
    assert form(queue, devices=2).rows == tuple(range(8))


def test_rows_past_their_deadline_are_dropped_not_computed() -> None:
    queue = [waiting(0, deadline_at=9.0), waiting(1, deadline_at=10.0), waiting(2, deadline_at=11)]

    batch = form(queue, now=10.0)

    assert batch.expired == (0, 1)
    assert batch.rows == (2,)


def test_the_longest_waiting_leads_after_it_was_passed_over_three_times_in_a_row() -> None:
    queue = [waiting(0, priority=101, step=128), *(waiting(key, priority=1) for key in range(1, 5))]

    leads, passed = [], 0
    for _ in range(8):
        batch = form(queue, passed=passed, floor_every=4)
        passed = batch.passed
        leads.append(batch.rows[0])

    assert leads == [1, 1, 1, 0, 1, 1, 1, 0]


def test_nobody_is_passed_over_while_the_order_is_that_of_arrival() -> None:
    assert form([waiting(key) for key in range(9)], passed=2).passed == 0


def test_whoever_comes_along_behind_another_is_not_passed_over() -> None:
    along = form([waiting(0, priority=101), waiting(1, priority=1)], passed=2)

    assert (along.rows, along.passed) == ((1, 0), 0)


def test_without_rows_nobody_is_passed_over() -> None:
    assert form([waiting(0, deadline_at=1.0)], now=2.0, passed=2).passed == 2


@given(queues(), st.integers(0, 20), st.sampled_from([0, 3]))
def test_a_batch_holds_the_devices_limits(queue: list[Waiting], passed: int, floor: int) -> None:
    batch = form(queue, passed=passed, floor_every=floor)

    by_key = {row.key: row for row in queue}
    assert len(set(batch.rows)) == len(batch.rows)
    assert all(by_key[key].step == batch.step for key in batch.rows)
    assert len(batch.rows) <= SHAPING.rows(batch.step or 32)
    assert set(batch.expired) == {
        row.key for row in queue if row.deadline_at is not None and row.deadline_at <= 10
    }
    assert not set(batch.rows) & set(batch.expired)


@given(queues())
def test_nobody_more_urgent_or_earlier_is_left_of_the_same_step(queue: list[Waiting]) -> None:
    batch = form(queue)

    live = [row for row in queue if row.key not in batch.expired]
    order = sorted((row.priority, row.key) for row in live)
    assert [key for _, key in order[:1]] == list(batch.rows[:1])
    same = [key for priority, key in order if key in {r.key for r in live if r.step == batch.step}]
    assert list(batch.rows) == same[: len(batch.rows)]


@given(queues())
def test_the_device_works_whenever_something_waits(queue: list[Waiting]) -> None:
    batch = form(queue)

    assert bool(batch.rows) == (len(batch.expired) < len(queue))


@given(queues(), st.sampled_from([0, 4]))
def test_a_row_waits_for_no_more_batches_than_rows_before_it(
    queue: list[Waiting], floor: int
) -> None:
    ahead = {
        row.key: sum((other.priority, other.key) < (row.priority, row.key) for other in queue)
        for row in queue
    }

    left, turn, passed = [row for row in queue if row.deadline_at is None], 0, 0
    while left:
        batch = form(left, passed=passed, floor_every=floor)
        passed = batch.passed
        floors = turn // floor if floor else 0
        assert all(turn <= ahead[key] + floors for key in batch.rows)
        left = [row for row in left if row.key not in batch.rows]
        turn += 1


@given(st.lists(st.sampled_from(STEPS), min_size=1, max_size=30))
def test_a_floor_bounds_the_wait_under_endless_urgent_work(steps: list[int]) -> None:
    oldest, passed = waiting(0, priority=101), 0

    for turn, step in enumerate(steps):
        urgent = [waiting(1 + turn * 10 + n, priority=1, step=step) for n in range(10)]
        batch = form([oldest, *urgent], passed=passed, floor_every=5)
        passed = batch.passed
        if 0 in batch.rows:
            break

    assert turn <= 4


ROOM = Room(rows=100, headroom=20)


@pytest.mark.parametrize(("priority", "limit"), [(1, 100), (51, 90), (101, 80), (5000, 80)])
def test_urgent_calls_have_headroom(priority: int, limit: int) -> None:
    fits = admit(rows=10, priority=priority, open_rows=limit - 10, room=ROOM, rows_per_s=5.0)
    excess = admit(rows=10, priority=priority, open_rows=limit - 9, room=ROOM, rows_per_s=5.0)

    assert fits.admitted
    assert not excess.admitted


@pytest.mark.parametrize(
    ("open_rows", "rows_per_s", "retry_after_s"),
    [(100, 5.0, 6), (80, 5.0, 2), (71, 5.0, 1), (100, None, 1), (100, 1e-9, 60)],
)
def test_retry_after_is_how_long_the_excess_takes(
    open_rows: int, rows_per_s: float | None, retry_after_s: int
) -> None:
    refused = admit(rows=10, priority=101, open_rows=open_rows, room=ROOM, rows_per_s=rows_per_s)

    assert refused.retry_after_s == retry_after_s


@given(
    st.integers(1, 100),
    st.integers(0, 120),
    st.tuples(st.integers(1, 150), st.integers(1, 150)),
)
def test_what_enters_at_a_priority_enters_at_a_higher_one(
    rows: int, open_rows: int, priorities: tuple[int, int]
) -> None:
    urgent, other = (
        admit(rows=rows, priority=priority, open_rows=open_rows, room=ROOM, rows_per_s=5.0)
        for priority in sorted(priorities)
    )

    assert urgent.admitted >= other.admitted
    assert urgent.retry_after_s <= other.retry_after_s


@given(st.integers(1, 120), st.integers(1, 150))
def test_a_call_of_the_largest_size_fits_an_empty_queue(rows: int, priority: int) -> None:
    admission = admit(rows=rows, priority=priority, open_rows=0, room=ROOM, rows_per_s=None)

    assert admission.admitted or rows > ROOM.largest_call


@pytest.mark.parametrize(
    ("rows", "step", "calls"),
    [(16, 32, (16,)), (3, 32, (4,)), (3, 256, (1, 1, 1)), (5, 128, (4, 1)), (0, 32, ())],
)
def test_a_batch_is_put_together_from_compiled_shapes(
    rows: int, step: int, calls: tuple[int, ...]
) -> None:
    assert cover(rows, counts=(1, 4, 16), step=step, call_tokens=60) == calls


@given(st.integers(0, 64), st.sampled_from([(1,), (1, 4), (1, 4, 16), (3, 8)]))
def test_a_cover_holds_all_rows_and_no_call_too_many(rows: int, counts: tuple[int, ...]) -> None:
    calls = cover(rows, counts=counts, step=64, call_tokens=40)

    assert set(calls) <= set(counts)
    assert sum(calls) >= rows
    assert all(sum(calls) - call < rows for call in calls)
