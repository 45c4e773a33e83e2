"""What calls mean for the items of a batch, and for what is written of it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fulfillment.leases import Taken
from workers.autoraters import RaterSpec
from workers.model_client import CallOutcome, CallResult
from workers.settling import KEPT, finish_of
from workers.work import Work

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
TAKEN = Taken(
    batch_id=1, fence=1, replica="r1", workflow_id=1, rater_version_id=1, rater_id="r",
    positions=[0, 1], item_of=[0, 1], fingerprints=["a", "b"], sent=0b11, attempts=0, lost=0,
    priority=50, best_effort=False, deadline_at=NOW + timedelta(hours=1), max_attempts=3,
    no_store=False, payload=b"", taken_at=NOW, calls=2, tries=None, max_qps=None,
)  # fmt: skip
SPEC = RaterSpec(
    rater_id="r", autorater="stub", plugin_version="1", model_id="m", model_version="v",
    score_min=0.0, score_max=1.0,
)  # fmt: skip


def work() -> Work:
    return Work(taken=TAKEN, spec=SPEC)


def met(outcome: CallOutcome, code: str = "", seconds: float = 2.0) -> CallResult[Any]:
    return CallResult(outcome=outcome, code=code, seconds=seconds)


@pytest.mark.parametrize(
    ("outcome", "code", "halts"),
    [
        (CallOutcome.WARMING, "model_warming", True),
        (CallOutcome.WRONG_VERSION, "wrong_version", True),
        (CallOutcome.PAUSE, "unauthorized", True),
        (CallOutcome.OVERLOAD, "rate_limited", True),
        (CallOutcome.OVERLOAD, "timeout", False),
        (CallOutcome.OVERLOAD, "connect_timeout", False),
        (CallOutcome.TRANSIENT, "http_500", False),
    ],
)
def test_calls_that_would_meet_the_same_are_not_made_and_cost_no_attempt(
    outcome: CallOutcome, code: str, halts: bool
) -> None:
    batch = work()

    batch.postpone([0], met(outcome, code))

    assert (batch.halted is not None) == halts
    if batch.halted is not None:
        assert not batch.halted.costs_attempt
        assert batch.halted.pauses == (outcome is CallOutcome.PAUSE)


def test_where_nobody_was_no_call_and_no_time_of_devices_is_counted() -> None:
    batch = work()

    batch.count(met(CallOutcome.WARMING), cut=False)
    batch.count(met(CallOutcome.TRANSIENT), cut=False)

    assert (batch.away, batch.calls, batch.device_s) == (1, 1, 2.0)


@pytest.mark.parametrize(
    ("code", "cut", "overloaded"), [("timeout", True, 0), ("timeout", False, 1), ("limit", True, 1)]
)
def test_a_call_that_was_cut_short_says_nothing_of_its_server(
    code: str, cut: bool, overloaded: int
) -> None:
    batch = work()

    batch.count(met(CallOutcome.OVERLOAD, code), cut=cut)

    assert batch.overloaded == overloaded


def test_items_of_a_rater_that_is_paused_rest_without_a_cost() -> None:
    batch = work()
    batch.postpone([0, 1], met(CallOutcome.PAUSE, "unauthorized"))

    finish = finish_of(batch, now=NOW)

    assert (finish.not_before, finish.cost_attempt) == (NOW + KEPT, False)
    assert not finish.failed
    assert not finish.timed_out
