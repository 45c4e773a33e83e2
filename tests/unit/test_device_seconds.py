"""What a call took of accelerators, as far as its server tells."""

from math import inf, nan
from typing import Any

import pytest

from workers.autoraters import OipAnswer
from workers.model_client import CallOutcome, CallResult
from workers.work import device_seconds


def result(parameters: dict[str, Any]) -> CallResult[Any]:
    answer = OipAnswer(outputs={}, parameters=parameters)
    return CallResult(outcome=CallOutcome.SUCCESS, answer=answer, seconds=2.0)


@pytest.mark.parametrize(("told", "seconds"), [(250_000, 0.25), (1.5e6, 1.5), (0, 0.0)])
def test_what_the_server_tells_counts(told: float, seconds: float) -> None:
    assert device_seconds(result({"compute_us": told})) == seconds


@pytest.mark.parametrize("told", [None, True, "7", -1, nan, inf, 1e18, [1]])
def test_else_a_call_counts_as_it_took(told: Any) -> None:
    assert device_seconds(result({"compute_us": told})) == 2.0


def test_so_does_one_without_an_answer_or_of_a_chat_model() -> None:
    refused: CallResult[Any] = CallResult(outcome=CallOutcome.OVERLOAD, seconds=2.0)

    assert device_seconds(refused) == 2.0
    assert device_seconds(result({})) == 2.0
