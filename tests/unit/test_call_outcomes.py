"""What each status means, for one row and for several, with every kind of text: a table by rule.

The expectations are written down from the rules of behaviour, not from the code.
"""

import pytest

from workers.model_client import CallOutcome
from workers.model_client.outcomes import classify

PLAIN = "no"
CONTEXT = (
    "context_length_exceeded",
    "This model's maximum context length is 16384 tokens",
    "Requested token count exceeds the model's maximum context length of 16384 tokens",
    "Input is too long for requested model",
    "prompt is too long: 5 tokens > 4 maximum",
)
WARMING = ("Model is loading", "server is still starting", "warming up", "model m is not yet ready")
PERMANENT_ALONE = {400: "invalid_request", 413: "payload_too_large", 422: "invalid_request"}
OVERLOAD = {429: "rate_limited", 503: "unavailable", 529: "overloaded"}
RETRIED = (408, 409, 425, 500, 502, 504)
PAUSING = {401: "unauthorized", 403: "forbidden", 404: "not_found"}
ALL = [status for status in range(201, 600) if status != 304]


@pytest.mark.parametrize("rows", [1, 2, 12])
@pytest.mark.parametrize("text", CONTEXT)
def test_too_long_a_context_is_permanent_under_any_status(text: str, rows: int) -> None:
    for status in ALL:
        verdict = classify(status, text, rows=rows)
        assert verdict.code == "context_length_exceeded"
        assert verdict.outcome is (CallOutcome.PERMANENT if rows == 1 else CallOutcome.SPLIT)


@pytest.mark.parametrize("rows", [1, 2, 12])
def test_a_fault_of_a_row_is_final_for_one_and_split_for_several(rows: int) -> None:
    for status, code in PERMANENT_ALONE.items():
        verdict = classify(status, PLAIN, rows=rows)
        wanted = CallOutcome.PERMANENT if rows == 1 else CallOutcome.SPLIT
        assert (verdict.outcome, verdict.code) == (wanted, code)


@pytest.mark.parametrize("rows", [1, 12])
def test_what_the_server_cannot_do_at_all_is_permanent(rows: int) -> None:
    verdict = classify(501, PLAIN, rows=rows)

    assert (verdict.outcome, verdict.code) == (CallOutcome.PERMANENT, "not_implemented")


@pytest.mark.parametrize("rows", [1, 12])
def test_only_overload_lowers_the_window(rows: int) -> None:
    found = {status: classify(status, PLAIN, rows=rows) for status in ALL}

    assert {
        status: verdict.code
        for status, verdict in found.items()
        if verdict.outcome is CallOutcome.OVERLOAD
    } == OVERLOAD


@pytest.mark.parametrize("rows", [1, 12])
def test_what_passes_is_tried_again(rows: int) -> None:
    for status in RETRIED:
        assert classify(status, PLAIN, rows=rows).outcome is CallOutcome.TRANSIENT


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("text", [PLAIN, *WARMING[:1]])
def test_a_wrong_key_or_address_pauses(text: str, rows: int) -> None:
    for status, code in PAUSING.items():
        if (status, text) != (404, WARMING[0]):
            verdict = classify(status, text, rows=rows)
            assert (verdict.outcome, verdict.code) == (CallOutcome.PAUSE, code)


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("text", WARMING)
def test_a_server_that_says_it_is_not_up_yet_is_warming(text: str, rows: int) -> None:
    assert classify(503, text, rows=rows).outcome is CallOutcome.WARMING


def test_every_status_has_one_meaning_and_a_code() -> None:
    named = {*PERMANENT_ALONE, *OVERLOAD, *RETRIED, *PAUSING, 501}
    for status in ALL:
        verdict = classify(status, "", rows=1)
        assert verdict.code
        assert verdict.outcome not in {CallOutcome.SUCCESS, CallOutcome.WRONG_VERSION}
        if 300 <= status < 500 and status not in named:
            assert verdict.outcome is CallOutcome.PAUSE
        if status >= 500 and status not in named:
            assert verdict.outcome is CallOutcome.TRANSIENT
