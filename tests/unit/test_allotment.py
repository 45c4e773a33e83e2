"""What the rebalancing policy decides, in whole replicas of a pool of devices."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models_admin.policy import rebalancing
from models_admin.policy.allotment import Allotment, Member, allot
from models_admin.policy.rebalancing import MOST_MOVES, START_UP, Due

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
HOUR_S = 3600.0


def member(
    name: str, replicas: int, *, work_s: float = 0, left_s: float = HOUR_S, **changes: Any
) -> Member:
    """A model with so much work due so long after a moved replica has started."""
    deadline_at = NOW + START_UP + timedelta(seconds=left_s)
    fields: dict[str, Any] = {
        "least": 0,
        "default": min(max(replicas, 1), changes.get("most", 20)),
        "most": 20,
        "devices": 1,
        "dues": [Due(deadline_at=deadline_at, work_s=work_s)] if work_s else [],
        **changes,
    }
    return Member(model_id=name, replicas=replicas, **fields)


def after(found: Allotment) -> Mapping[str, tuple[int, int]]:
    return {change.model_id: (change.before, change.after) for change in found.changes}


def test_replicas_go_to_where_the_work_is() -> None:
    found = allot([member("busy", 1, work_s=4 * HOUR_S), member("idle", 3)], 4, NOW)

    assert after(found) == {"busy": (1, 4), "idle": (3, 0)}
    assert found.needs == {"busy": 4, "idle": 0}
    assert found.reason == (
        "4.0 of 4 devices are needed: all are met, the spare goes to long backlogs, by default "
        "allocation; "
        "busy 1 → 4, idle 3 → 0"
    )


def test_free_devices_are_used_before_anybody_drains() -> None:
    busy = member("busy", 1, work_s=HOUR_S, default=0)

    found = allot([busy, member("idle", 6, default=0)], 9, NOW)

    # A quarter of an hour's work for four: two of the three that it lacks are free.
    assert after(found) == {"busy": (1, 4), "idle": (6, 5)}


def test_free_devices_stay_free_without_work() -> None:
    found = allot([member("a", 1), member("b", 1)], 8, NOW)

    assert found.changes == ()
    assert "nothing is worth a move" in found.reason


def test_nobody_gets_more_than_its_maximum() -> None:
    found = allot([member("busy", 1, work_s=9 * HOUR_S, most=3), member("idle", 5)], 9, NOW)

    assert after(found) == {"busy": (1, 3)}
    assert found.needs["busy"] == 3


def test_what_a_model_cannot_use_is_left_to_others() -> None:
    capped = member("capped", 1, work_s=9 * HOUR_S, most=2)

    found = allot([capped, member("other", 1, work_s=5 * HOUR_S), member("idle", 5)], 7, NOW)

    # Fourteen would be needed; but the one can use a single replica more.
    assert after(found) == {"capped": (1, 2), "other": (1, 5), "idle": (5, 0)}


def test_a_pinned_model_neither_gives_nor_gets() -> None:
    found = allot(
        [
            member("pinned", 4, is_pinned=True),
            member("busy", 1, work_s=9 * HOUR_S, is_pinned=True),
            member("idle", 1),
        ],
        6,
        NOW,
    )

    assert found.changes == ()
    assert found.needs == {"pinned": 4, "busy": 1, "idle": 0}
    assert found.reason.endswith("pinned is pinned; busy is pinned")


def test_a_large_replica_takes_the_devices_of_several_small_ones() -> None:
    large = member("large", 0, work_s=HOUR_S, devices=4, default=1, most=1)

    found = allot([large, member("small", 5)], 5, NOW)

    assert after(found) == {"large": (0, 1), "small": (5, 1)}
    assert found.needs["large"] == 1


def test_for_any_work_a_model_gets_a_whole_replica() -> None:
    large = member("large", 0, other_s=1, devices=4, default=1, most=1)

    found = allot([large, member("small", 4)], 4, NOW)

    assert after(found) == {"large": (0, 1), "small": (4, 0)}


def test_a_small_one_gets_what_a_large_replica_leaves() -> None:
    small = member("small", 1, work_s=1.25 * HOUR_S)

    found = allot([member("large", 2, devices=4), small], 9, NOW)

    # Five do it in a quarter of an hour: a replica of four devices makes room.
    assert after(found) == {"large": (2, 1), "small": (1, 5)}


def test_a_move_that_is_no_whole_replica_is_not_made_and_keeps_nothing_from_others() -> None:
    large = member("large", 0, work_s=9 * HOUR_S, devices=4, default=1, most=2)
    small = member("small", 1, work_s=3 * HOUR_S)

    found = allot([large, small, member("idle", 2)], 3, NOW)

    # The large one lacks most, but all there is are three devices.
    assert after(found) == {"small": (1, 3), "idle": (2, 0)}
    assert "large waits for 4 devices at once" in found.reason


def test_who_could_give_no_whole_replica_is_passed_over() -> None:
    busy = member("busy", 1, work_s=2 * HOUR_S, default=0, most=2)
    # Of the spare it should keep one device, so that it has three too many.
    large = member("large", 1, devices=4, default=1)
    absent = member("absent", 0, default=12)

    found = allot([busy, large, absent, member("small", 1, default=0)], 6, NOW)

    assert after(found) == {"busy": (1, 2), "small": (1, 0)}


def test_who_has_several_devices_leaves_them_for_a_more_pressing_need_of_one() -> None:
    large = member("large", 1, other_s=1e6, devices=2)
    small = member("small", 0, work_s=3_000)

    found = allot([large, small], 2, NOW)

    assert after(found) == {"large": (1, 0), "small": (0, 1)}
    # And does not come back: one device is of no use to it.
    assert after(allot([replace(large, replicas=0), replace(small, replicas=1)], 2, NOW)) == {
        "small": (1, 2)
    }


def test_who_has_several_devices_keeps_its_only_replica_from_a_need_that_is_less_than_twice() -> (
    None
):
    held = member("held", 1, work_s=2_000, devices=2)

    assert allot([held, member("other", 0, work_s=3_000)], 2, NOW).changes == ()
    assert allot([held, member("other", 0, work_s=9_000)], 2, NOW).changes != ()


def test_a_part_of_a_replica_is_given_as_a_whole_one_to_who_has_none() -> None:
    large = member("large", 2, other_s=360_000, devices=2, default=0, most=2)
    small = member("small", 0, work_s=HOUR_S, left_s=86_400, default=0, most=1)

    found = allot([large, small], 4, NOW)

    assert found.targets["large"] == 1.5
    assert after(found) == {"large": (2, 1), "small": (0, 1)}


def test_several_who_can_give_a_part_make_room_for_a_large_replica() -> None:
    large = member("large", 0, other_s=1, devices=2, default=0)
    small = [member(name, 2, work_s=9 * HOUR_S) for name in "ab"]

    found = allot([large, *small], 4, NOW)

    assert after(found) == {"large": (0, 1), "a": (2, 1), "b": (2, 1)}


def test_large_replicas_are_not_too_large_for_a_round() -> None:
    devices = MOST_MOVES + 2
    large = member("large", 0, work_s=HOUR_S, devices=devices, default=1, most=1)

    found = allot([large, member("small", devices)], devices, NOW)

    assert after(found)["large"] == (0, 1)


def test_who_was_measured_to_start_fast_is_worth_a_move_for_less() -> None:
    short = member("short", 1, work_s=60, left_s=0)
    fast = member("fast", 1, work_s=60, left_s=0, start_up=timedelta(seconds=30))
    idle = member("idle", 4, default=1)

    assert allot([short, idle], 5, NOW).changes == ()
    assert allot([fast, idle], 5, NOW).changes != ()


members = st.builds(
    member,
    st.sampled_from("abcdefgh"),
    st.integers(0, 6),
    work_s=st.one_of(st.just(0.0), st.floats(0, 1e6)),
    left_s=st.floats(-1_000, 20_000),
    other_s=st.one_of(st.just(0.0), st.floats(0, 1e5)),
    least=st.sampled_from([0, 0, 1]),
    devices=st.sampled_from([1, 1, 2, 3, 4, 16]),
    default=st.integers(0, 6),
    start_up=st.one_of(st.none(), st.floats(0, 1_000).map(lambda s: timedelta(seconds=s))),
    is_pinned=st.sampled_from([False, False, False, True]),
)
pools = st.tuples(
    st.lists(members, unique_by=lambda each: each.model_id, max_size=6), st.integers(0, 20)
)


@given(pools)
def test_devices_are_conserved_and_bounds_kept(pool: tuple[list[Member], int]) -> None:
    found, free = pool
    used = sum(each.replicas * each.devices for each in found)

    decision = allot(found, used + free, NOW)

    changes = after(decision)
    left = {each.model_id: changes.get(each.model_id, (0, each.replicas))[1] for each in found}
    assert sum(left[each.model_id] * each.devices for each in found) <= used + free
    assert sum(max(0, to - was) for was, to in changes.values()) <= MOST_MOVES
    for each in found:
        before, now = each.replicas, left[each.model_id]
        assert min(before, each.least) <= now <= max(before, each.most)
        assert now == before or not each.is_pinned


ROUNDS = 20
"""More than it takes to settle what anybody has."""


small_pools = st.tuples(
    st.lists(
        st.builds(
            member,
            st.sampled_from("abcd"),
            st.integers(0, 4),
            work_s=st.sampled_from([0, 0, 5, 3_600, 100_000]),
            left_s=st.sampled_from([60, 3_600, 86_400]),
            other_s=st.sampled_from([0, 0, 5, 600, 36_000, 360_000]),
            devices=st.sampled_from([1, 2, 4]),
            default=st.integers(0, 4),
            least=st.sampled_from([0, 0, 0, 1]),
            most=st.sampled_from([1, 2, 4, 8]),
            is_pinned=st.sampled_from([False] * 9 + [True]),
        ),
        unique_by=lambda each: each.model_id,
        min_size=2,
        max_size=4,
    ),
    st.integers(0, 3),
)


@settings(max_examples=400)
@given(small_pools)
def test_with_unchanged_work_rounds_come_to_rest_and_all_with_work_have_somebody(
    pool: tuple[list[Member], int],
) -> None:
    found, free = pool
    found = [replace(each, least=min(each.least, each.replicas)) for each in found]
    devices = sum(each.replicas * each.devices for each in found) + free

    for _ in range(ROUNDS):
        changes = after(allot(found, devices, NOW))
        if not changes:
            break
        found = [
            replace(each, replicas=changes.get(each.model_id, (0, each.replicas))[1])
            for each in found
        ]
    else:
        pytest.fail("replicas flap")

    moving = [each for each in found if not each.is_pinned]
    pinned = sum(each.replicas * each.devices for each in found if each.is_pinned)
    at_work = {each.model_id for each in moving if each.other_s or any(d.work_s for d in each.dues)}
    bases = sum(max(each.least, each.model_id in at_work) * each.devices for each in moving)
    if pinned + bases <= devices:
        assert all(each.replicas for each in moving if each.model_id in at_work)


@given(pools)
def test_nobody_drains_for_what_nobody_gets(pool: tuple[list[Member], int]) -> None:
    found, free = pool
    used = sum(each.replicas * each.devices for each in found)

    decision = allot(found, used + free, NOW)

    sizes = {each.model_id: each.devices for each in found}
    steps = [(change.after - change.before) * sizes[change.model_id] for change in decision.changes]
    gained = sum(step for step in steps if step > 0)
    lost = -sum(step for step in steps if step < 0)
    # Any replica less and it would not do.
    for change in decision.changes:
        assert change.after > change.before or lost - sizes[change.model_id] < gained


@given(st.lists(members, unique_by=lambda each: each.model_id, min_size=1, max_size=6))
def test_with_replicas_of_one_device_and_nothing_free_it_is_the_policy(
    found: list[Member],
) -> None:
    plain = [
        Member(
            model_id=each.model_id,
            replicas=each.replicas,
            least=each.least,
            default=each.default,
            most=each.most,
            devices=1,
            dues=each.dues,
            other_s=each.other_s,
        )
        for each in found
    ]

    decision = allot(plain, sum(each.replicas for each in plain), NOW)

    policy = rebalancing.rebalance(
        [
            rebalancing.Model(
                model_id=each.model_id,
                default=each.default,
                least=each.least,
                replicas=each.replicas,
                dues=each.dues,
                other_s=each.other_s,
                most=each.most,
            )
            for each in plain
        ],
        NOW,
    )
    expected = {each.model_id: each.replicas for each in plain}
    for move in policy.moves:
        expected[move.donor] -= move.replicas
        expected[move.receiver] += move.replicas
    changes = after(decision)
    assert {
        each.model_id: changes.get(each.model_id, (0, each.replicas))[1] for each in plain
    } == expected


def test_an_empty_pool_has_nothing_to_allot() -> None:
    assert allot([], 3, NOW).changes == ()


@pytest.mark.parametrize("devices", [0, 3])
def test_a_pool_that_is_over_its_devices_starts_nothing(devices: int) -> None:
    found = allot([member("busy", 4, work_s=1e6)], devices, NOW)

    assert found.changes == ()
