from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models_admin.policy.rebalancing import (
    MOST_MOVES,
    START_UP,
    Due,
    Model,
    Move,
    need,
    rebalance,
)

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
IN_AN_HOUR = 3600 + START_UP.total_seconds()


def model(
    name: str,
    replicas: int,
    *,
    work_s: float = 0,
    left_s: float = IN_AN_HOUR,
    default: int | None = None,
    least: int = 0,
    other_s: float = 0,
) -> Model:
    dues = [Due(deadline_at=NOW + timedelta(seconds=left_s), work_s=work_s)] if work_s else []
    return Model(
        model_id=name,
        default=replicas if default is None else default,
        least=least,
        replicas=replicas,
        dues=dues,
        other_s=other_s,
    )


models = st.lists(
    st.builds(
        model,
        st.sampled_from("abcdefgh"),
        st.integers(0, 20),
        work_s=st.integers(0, 200_000),
        left_s=st.integers(-100, 20_000),
        default=st.integers(0, 20),
        least=st.integers(0, 3),
        other_s=st.integers(0, 1000),
    ),
    min_size=1,
    unique_by=lambda each: each.model_id,
)


def test_a_need_is_what_is_due_over_the_time_after_a_start() -> None:
    assert need(model("a", 1, work_s=3 * 3600), NOW) == 3


def test_the_tightest_deadline_decides() -> None:
    dues = [
        Due(deadline_at=NOW + START_UP + timedelta(seconds=7200), work_s=7200),
        Due(deadline_at=NOW + START_UP + timedelta(seconds=1000), work_s=5000),
    ]
    tight = Model(model_id="a", default=1, least=0, replicas=1, dues=dues)

    assert need(tight, NOW) == 5


def test_a_deadline_that_is_past_counts_as_a_minute_away() -> None:
    assert need(model("a", 1, work_s=600, left_s=-5), NOW) == 10


@pytest.mark.parametrize(
    ("other_s", "least", "needed"), [(0.0, 0, 0.0), (1.0, 0, 1.0), (0.0, 2, 2.0)]
)
def test_work_needs_somebody_and_a_minimum_is_kept(
    other_s: float, least: int, needed: float
) -> None:
    assert need(model("a", 5, other_s=other_s, least=least), NOW) == needed


def test_a_model_has_no_use_for_more_than_its_most() -> None:
    busy = replace(model("busy", 2, work_s=9 * 3600), most=3)

    decision = rebalance([busy, model("idle", 4)], NOW)

    assert (decision.needs["busy"], decision.targets["busy"]) == (3, 3)
    assert decision.moves == (Move(donor="idle", receiver="busy", replicas=1),)


def test_a_start_up_that_was_measured_counts_for_its_model() -> None:
    slow = replace(model("slow", 1, work_s=3600), start_up=2 * START_UP)

    assert need(slow, NOW) == pytest.approx(3600 / (IN_AN_HOUR - 2 * START_UP.total_seconds()))


def test_idle_replicas_go_where_they_are_needed() -> None:
    decision = rebalance([model("busy", 2, work_s=4 * 3600), model("idle", 4)], NOW)

    # Needs 4 and 0 of 6; the spare of 2 goes where the backlog is longer than a quarter of an hour.
    assert decision.targets == {"busy": pytest.approx(6), "idle": pytest.approx(0)}
    assert decision.moves == (Move(donor="idle", receiver="busy", replicas=4),)
    assert decision.reason.startswith("4.0 of 6 replicas are needed: all are met")


def test_the_spare_goes_first_to_whoever_has_a_long_backlog() -> None:
    # An hour of work for one, due tomorrow: it needs little, but others are idle.
    busy = model("busy", 1, work_s=3600, left_s=86_400)

    decision = rebalance([busy, model("idle", 5)], NOW)

    # Four would do it in a quarter of an hour; what is left is shared 1 : 5.
    assert decision.targets["busy"] == pytest.approx(4 + 2 / 6, abs=0.01)
    assert decision.moves == (Move(donor="idle", receiver="busy", replicas=3),)


def test_backlog_that_is_not_committed_gets_of_the_spare_too() -> None:
    decision = rebalance([model("busy", 1, other_s=3600), model("idle", 5)], NOW)

    assert decision.moves == (Move(donor="idle", receiver="busy", replicas=3),)


def test_a_long_backlog_does_not_take_the_spare_from_a_short_one() -> None:
    # A day of work for twenty that is due in three days, an hour's for two that is due in two.
    long = model("long", 5, work_s=20 * 86_400, left_s=3 * 86_400, default=2)
    short = model("short", 5, work_s=7200, left_s=7200, default=6)

    decision = rebalance([long, short], NOW)

    # Needs are 6.7 and 1; of the spare of 2.3 three quarters go by default to the short one.
    assert decision.targets["short"] == pytest.approx(1 + 2.33 * 6 / 8, abs=0.01)


def test_each_model_with_work_gets_one_before_others_get_more() -> None:
    small = model("small", 3, work_s=2 * 3600, default=2)
    flood = model("flood", 0, work_s=50 * 3600, default=3)
    other = model("other", 0, work_s=3600, default=1)

    decision = rebalance([small, flood, other], NOW)

    assert decision.targets == {"small": 1, "flood": 1, "other": 1}
    assert {move.receiver for move in decision.moves} == {"flood", "other"}


def test_the_more_pressing_need_has_the_only_replica() -> None:
    held = model("held", 1, work_s=600, default=1)

    less = rebalance([held, model("waits", 0, work_s=1100, default=1)], NOW)
    more = rebalance([held, model("waits", 0, work_s=1300, default=1)], NOW)

    # It changes hands for twice the need, so that it is not always on its way.
    assert less.moves == ()
    assert more.moves == (Move(donor="held", receiver="waits", replicas=1),)


def test_the_longer_backlog_has_the_only_replica_where_nothing_is_due() -> None:
    held = model("held", 1, other_s=600, default=1)

    assert rebalance([held, model("waits", 0, other_s=1100, default=1)], NOW).moves == ()
    assert rebalance([held, model("waits", 0, other_s=1300, default=1)], NOW).moves != ()


def test_the_only_replica_does_not_go_to_and_fro_as_the_longer_backlog_changes() -> None:
    backlogs = {"a": 1000.0, "b": 1001.0}
    holder, serves_at, moves = "a", 0.0, 0
    for minute in range(120):
        decision = rebalance(
            [
                model(name, int(name == holder), other_s=s, default=1)
                for name, s in backlogs.items()
            ],
            NOW,
        )
        for move in decision.moves:
            holder, moves = move.receiver, moves + 1
            serves_at = 60 * minute + START_UP.total_seconds()
        if serves_at <= 60 * minute:
            backlogs[holder] = max(0.0, backlogs[holder] - 60)

    assert backlogs == {"a": 0, "b": 0}
    # Each halving of what one has left is worth a move, not each minute of service.
    assert moves <= 8


def test_one_that_has_none_gets_one_of_parts_that_others_have_over() -> None:
    waits = model("waits", 0, other_s=5, default=0)

    decision = rebalance([model("a", 1), model("b", 1), waits], NOW)

    # What is left beside it is a half for each of the others.
    assert decision.targets == {"waits": 1, "a": 0.5, "b": 0.5}
    assert [(move.receiver, move.replicas) for move in decision.moves] == [("waits", 1)]


def test_a_minimum_is_never_given_away() -> None:
    decision = rebalance([model("busy", 2, work_s=50_000), model("idle", 4, least=3)], NOW)

    assert decision.moves == (Move(donor="idle", receiver="busy", replicas=1),)


def test_small_needs_are_met_up_to_the_default_when_not_all_can_be() -> None:
    flood = model("flood", 6, work_s=50 * 3600, default=2)
    small = model("small", 0, work_s=2 * 3600, default=4)

    decision = rebalance([flood, small], NOW)

    assert decision.targets == {"small": 2, "flood": 4}
    assert decision.moves == (Move(donor="flood", receiver="small", replicas=2),)


def test_a_short_backlog_is_not_worth_a_start() -> None:
    # Due soon, so that the need is high, but done before a moved replica would serve.
    brief = model("brief", 1, work_s=1.4 * START_UP.total_seconds(), left_s=0)

    assert rebalance([brief, model("idle", 4), model("top", 9)], NOW).moves == ()


def test_a_model_without_replicas_gets_one_for_any_work() -> None:
    decision = rebalance([model("none", 0, other_s=5, default=1), model("idle", 3)], NOW)

    assert decision.moves == (Move(donor="idle", receiver="none", replicas=1),)


def test_a_round_moves_ten_at_most() -> None:
    decision = rebalance([model("busy", 40, work_s=500_000), model("idle", 40)], NOW)

    assert sum(move.replicas for move in decision.moves) == MOST_MOVES


def test_an_empty_pool_has_nothing_to_move() -> None:
    assert rebalance([], NOW).moves == ()


@given(found=models)
def test_devices_are_conserved(found: list[Model]) -> None:
    decision = rebalance(found, NOW)

    left = {each.model_id: each.replicas for each in found}
    for move in decision.moves:
        assert move.replicas > 0
        left[move.donor] -= move.replicas
        left[move.receiver] += move.replicas
    assert sum(left.values()) == sum(each.replicas for each in found)
    assert all(left[each.model_id] >= min(each.least, each.replicas) for each in found)


@given(found=models)
def test_nobody_gives_and_gets_in_one_round(found: list[Model]) -> None:
    decision = rebalance(found, NOW)

    donors = {move.donor for move in decision.moves}
    assert not donors & {move.receiver for move in decision.moves}


@given(found=models)
def test_targets_are_no_more_than_the_pool(found: list[Model]) -> None:
    decision = rebalance(found, NOW)

    assert sum(decision.targets.values()) <= sum(each.replicas for each in found) + 1e-6


@given(found=models)
def test_rounds_end_with_somebody_for_each_that_has_work(found: list[Model]) -> None:
    for _ in range(30):
        decision = rebalance(found, NOW)
        left = {each.model_id: each.replicas for each in found}
        for move in decision.moves:
            left[move.donor] -= move.replicas
            left[move.receiver] += move.replicas
        found = [replace(each, replicas=left[each.model_id]) for each in found]
    kept = sum(max(each.least, 1 if each.dues or each.other_s else 0) for each in found)
    if kept <= sum(each.replicas for each in found):
        assert all(each.replicas or not (each.dues or each.other_s) for each in found)
