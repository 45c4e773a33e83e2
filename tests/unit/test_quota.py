from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment.policy.quota import (
    Bucket,
    Grant,
    ReplicaLoad,
    can_wait,
    fill,
    grant,
    kept_for_high,
    slots_for,
    spend,
)

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
replica_lists = st.lists(
    st.builds(
        ReplicaLoad,
        key=st.sampled_from("abcdef"),
        version=st.just("v1"),
        window=st.integers(0, 8),
        held=st.integers(0, 10),
    ),
    unique_by=lambda replica: replica.key,
)


def replica(key: str, *, window: int = 4, held: int = 0) -> ReplicaLoad:
    return ReplicaLoad(key=key, version="v1", window=window, held=held)


def test_batches_go_to_the_replica_with_most_room() -> None:
    replicas = [replica("a", held=3), replica("b", held=1), replica("c", held=2)]

    assert [g.replica for g in grant(replicas, [1] * 10)] == ["b", "b", "c", "a", "b", "c"]


def test_a_batch_gets_all_of_its_calls_or_what_room_there_is() -> None:
    assert grant([replica("a", window=30)], [12, 12, 12, 12]) == [
        Grant(replica="a", calls=12),
        Grant(replica="a", calls=12),
        Grant(replica="a", calls=6),
    ]


@given(replicas=st.deferred(lambda: replica_lists), wanted=st.lists(st.integers(1, 60)))
def test_no_window_is_granted_more_calls_than_it_has_room(
    replicas: list[ReplicaLoad], wanted: list[int]
) -> None:
    granted = grant(replicas, wanted)

    for each in replicas:
        calls = sum(g.calls for g in granted if g.replica == each.key)
        assert calls <= max(0, each.window - each.held)
    assert all(1 <= g.calls <= w for g, w in zip(granted, wanted, strict=False))
    free = sum(max(0, r.window - r.held) for r in replicas)
    assert sum(g.calls for g in granted) <= min(free, sum(wanted))
    assert len(granted) == len(wanted) or sum(g.calls for g in granted) == free


@given(replicas=replica_lists, count=st.integers(0, 60))
def test_as_many_batches_are_assigned_as_windows_allow(
    replicas: list[ReplicaLoad], count: int
) -> None:
    free = {r.key: max(0, r.window - r.held) for r in replicas}

    named = [g.replica for g in grant(replicas, [1] * count)]

    assert len(named) == min(count, sum(free.values()))
    assert all(named.count(key) <= free.get(key, 0) for key in named)


@given(replicas=replica_lists, count=st.integers(0, 60))
def test_no_replica_is_chosen_before_one_with_more_room(
    replicas: list[ReplicaLoad], count: int
) -> None:
    free = {r.key: r.window - r.held for r in replicas}

    for granted in grant(replicas, [1] * count):
        assert free[granted.replica] == max(free.values())
        free[granted.replica] -= 1


@given(replicas=replica_lists, count=st.integers(0, 60), data=st.data())
def test_the_order_of_replicas_does_not_matter(
    replicas: list[ReplicaLoad], count: int, data: st.DataObject
) -> None:
    wanted = [1] * count
    assert grant(data.draw(st.permutations(replicas)), wanted) == grant(replicas, wanted)


wants = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 20))


@st.composite
def holdings(draw: st.DrawFn) -> tuple[int, dict[str, int]]:
    held = draw(st.dictionaries(st.sampled_from("abcde"), st.integers(0, 6)))
    return sum(held.values()) + draw(st.integers(0, 20)), held


@given(raters=wants, holding=holdings(), free=st.integers(-2, 25))
def test_every_free_slot_is_given_while_one_wants_it(
    raters: dict[str, int], holding: tuple[int, dict[str, int]], free: int
) -> None:
    total, held = holding
    really_free = max(0, min(free, total - sum(held.values())))

    given_ = slots_for(raters, free, held, total)

    assert sum(given_.values()) == min(really_free, sum(raters.values()))
    assert all(0 <= given_[rater] <= wanted for rater, wanted in raters.items())


@given(raters=wants, holding=holdings(), free=st.integers(0, 25))
def test_none_is_given_more_than_half_of_the_slots_while_another_waits(
    raters: dict[str, int], holding: tuple[int, dict[str, int]], free: int
) -> None:
    total, held = holding

    given_ = slots_for(raters, free, held, total)

    for rater, count in given_.items():
        another_waits = any(raters[o] > given_[o] for o in raters if o != rater)
        if count and another_waits:
            assert held.get(rater, 0) + count <= (total + 1) // 2


@given(raters=wants, holding=holdings(), free=st.integers(0, 25))
def test_slots_go_to_whoever_holds_fewest(
    raters: dict[str, int], holding: tuple[int, dict[str, int]], free: int
) -> None:
    total, held = holding

    given_ = slots_for(raters, free, held, total)

    holds = {rater: held.get(rater, 0) + given_[rater] for rater in raters}
    for rater in raters:
        if given_[rater]:
            assert all(
                holds[rater] <= holds[other] + 1
                for other in raters
                if given_[other] < raters[other]
            )


@pytest.mark.parametrize(
    ("raters", "held", "expected"),
    [
        ({"a": 20}, {}, {"a": 8}),
        ({"a": 20, "b": 20}, {}, {"a": 4, "b": 4}),
        ({"a": 20, "b": 2}, {}, {"a": 6, "b": 2}),
        ({"a": 20, "b": 20}, {"a": 6}, {"a": 0, "b": 2}),
        ({"a": 20, "b": 0}, {"a": 6}, {"a": 2, "b": 0}),
    ],
    ids=["alone", "two", "one wants little", "latecomer", "nobody else wants"],
)
def test_eight_slots_are_shared(
    raters: dict[str, int], held: dict[str, int], expected: dict[str, int]
) -> None:
    assert slots_for(raters, 8 - sum(held.values()), held, 8) == expected


@given(
    max_qps=st.floats(0.01, 1_000),
    steps=st.lists(st.floats(0, 30), min_size=1, max_size=60),
)
def test_a_bucket_starts_no_more_than_its_rate_and_one_burst(
    max_qps: float, steps: list[float]
) -> None:
    now, started = NOW, 0
    bucket: Bucket | None = None
    for step in steps:
        now += timedelta(seconds=step)
        bucket = fill(bucket, max_qps, now)
        calls = int(bucket.calls)
        bucket = spend(bucket, calls)
        started += calls

    assert started <= max_qps * (now - NOW).total_seconds() + max(max_qps, 1.0) + 1e-6


@given(max_qps=st.floats(0.01, 1_000))
def test_an_empty_bucket_lets_a_call_start_after_the_time_of_one(max_qps: float) -> None:
    full = fill(None, max_qps, NOW)
    empty = spend(full, int(full.calls))

    later = fill(empty, max_qps, NOW + timedelta(seconds=1 / max_qps + 1e-3))

    assert later.calls >= 1


def test_a_clock_set_back_does_not_drain_a_bucket() -> None:
    bucket = fill(None, 10, NOW)

    assert fill(bucket, 10, NOW - timedelta(hours=1)).calls == bucket.calls


def test_places_are_kept_for_high_as_far_as_it_has_none() -> None:
    assert [kept_for_high(window, held=0) for window in (4, 8, 16, 40)] == [0, 1, 2, 2]
    assert [kept_for_high(16, held=held) for held in (1, 2, 9)] == [1, 0, 0]


# Waiting


@pytest.mark.parametrize(
    ("window", "held", "waits"),
    [(16, 8, True), (16, 7, False), (2, 2, True), (3, 2, True), (2, 1, False), (1, 1, False)],
)
def test_a_replica_can_wait_while_it_has_half_of_its_window(
    window: int, held: int, waits: bool
) -> None:
    full = replica("full", window=4, held=4)

    assert can_wait([full, replica("a", window=window, held=held)]) is waits
