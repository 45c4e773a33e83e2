"""What model servers do to us, as people report it: the collected cases S-*, and CA-03.

Each runs the case's own scripted server against the executor and the real database; time limits are
shortened, waits are read off the rows instead of being waited for.
"""

import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import orjson
import pytest

from fulfillment import bell
from fulfillment.clock import database_now
from fulfillment.models import Rater, Rating, Workflow
from fulfillment.policy.lifecycle import Source
from tests import builders
from tests.collected_cases import case, load, rows, stub
from tests.executor_stage import Stage, staged
from tests.fakes import Step, scripted
from tests.rating_queue import batches, check_all, finished, requests, states, submit

pytestmark = pytest.mark.django_db(transaction=True)

CHAT = "/v1/chat/completions"
TEMPLATE = "Query: {query_text}\nPage: {html}\nAnswer with a number from 0 to 4."
STATUSES = [400, 401, 403, 404, 408, 409, 413, 422, 425, 429, 500, 501, 502, 503, 504, 529]


@pytest.fixture
def oip_stage() -> Iterator[Stage]:
    with staged() as made:
        yield made


@pytest.fixture
def chat_stage() -> Iterator[Stage]:
    with staged(autorater="llm_judge", protocol="openai", prompt_template=TEMPLATE) as made:
        yield made


def submit_rows(found: dict[str, dict[str, Any]], **how: Any) -> Workflow:
    return submit(list(found), item=lambda name: found[name], **how)


def outcomes(workflow: Workflow, names: dict[str, Any]) -> dict[str, tuple[str, str | None]]:
    """Return state and error of each row by its name."""
    return {
        name: (state, request.error)
        for name, state, request in zip(names, states(workflow), requests(workflow), strict=True)
    }


@pytest.mark.parametrize("status", [429, 503])
def test_s_01_retry_after_in_all_its_forms(chat_stage: Stage, status: int) -> None:
    folder = case("S-01")
    row = rows(folder / "row.jsonl")["r0000"]
    for number, vector in enumerate(load(folder / "vectors.json")):
        fault = load(folder / vector["file"])
        fault["routes"][CHAT]["steps"][0]["status"] = status
        with stub(fault) as server:
            chat_stage.serve(server.url, version="stub")
            workflow = submit([f"s{number}"], item=lambda name: {**row, "query_text": name})
            before = database_now()
            chat_stage.rate()
            (batch,) = batches(workflow)
            assert batch.not_before is not None
            assert batch.not_before - before >= timedelta(seconds=vector["min_s"])
            latest = timedelta(seconds=vector["max_s"])
            assert batch.not_before - database_now() <= latest
            chat_stage.rate()

        assert states(workflow) == ["COMPLETED"], vector


def test_s_01_a_later_longer_wait_replaces_a_shorter_one(chat_stage: Stage) -> None:
    workflow = submit(["a"])
    steps = [Step(status=429, headers={"Retry-After": wait}) for wait in ("2", "100")]
    with scripted(*steps) as server:
        chat_stage.serve(server.url)
        chat_stage.rate(times=2)

    (batch,) = batches(workflow)
    assert batch.not_before is not None
    assert batch.not_before - database_now() > timedelta(seconds=90)


def test_s_03_one_row_that_is_too_long_fails_alone(oip_stage: Stage) -> None:
    folder = case("S-03")
    found = rows(folder / "rows.jsonl")
    workflow = submit_rows(found)
    with stub(load(folder / "fault_400.json")) as server:
        _serve_stub(oip_stage, server.url)
        oip_stage.rate(times=2)

    expected = load(folder / "expected.json")["expect"]["run1"]
    ended = outcomes(workflow, found)
    assert {n: error for n, (_, error) in ended.items() if error} == expected["failed"]
    assert [state for state, _ in ended.values()].count("COMPLETED") == expected["completed"]
    assert len(server.calls) <= expected["requests_max"]


def test_s_03_a_batch_too_large_for_the_proxy_is_split_and_the_size_is_kept(
    oip_stage: Stage,
) -> None:
    folder = case("S-03")
    found = rows(folder / "rows.jsonl")
    found = {name: {**row, "query_text": row["query_text"][-7:]} for name, row in found.items()}
    workflow = submit_rows(found)
    with stub(load(folder / "fault_413.json")) as server:
        _serve_stub(oip_stage, server.url)
        oip_stage.rate()
        first = len(server.calls)
        again = {f"again {n}": {**r, "html": "<p>oh</p>"} for n, r in found.items()}
        later = submit_rows(again)
        oip_stage.rate()

    least, most = load(folder / "expected.json")["expect"]["run2"]["requests"]
    assert set(states(workflow)) == set(states(later)) == {"COMPLETED"}
    assert least <= first <= most
    assert max(server.items[first:]) <= 4, "no second batch is sent only to be refused"
    assert sum(server.items[first:]) == 12


def test_s_03_a_single_row_that_is_too_large_fails_at_once(oip_stage: Stage) -> None:
    folder = case("S-03")
    workflow = submit(["one"])
    with stub(load(folder / "fault_413_single.json")) as server:
        _serve_stub(oip_stage, server.url)
        oip_stage.rate(times=2)

    assert [r.error for r in requests(workflow)] == ["payload_too_large"]
    assert len(server.calls) == 1


@pytest.mark.parametrize("scores", [0, 11, 13, 24])
def test_s_04_no_score_of_an_answer_that_does_not_fit_is_used(
    oip_stage: Stage, scores: int
) -> None:
    folder = case("S-04")
    found = rows(folder / "rows.jsonl")
    workflow = submit_rows(found)
    with stub(load(folder / f"fault_{scores}.json")) as server:
        _serve_stub(oip_stage, server.url)
        oip_stage.rate()

    assert [r.score for r in requests(workflow)] == [2.0] * 12
    assert {r.source for r in requests(workflow)} == {Source.MODEL}


def test_s_06_a_server_that_closes_its_connections_costs_nothing(chat_stage: Stage) -> None:
    folder = case("S-06")
    fault = load(folder / "fault.json")
    for step in fault["routes"][CHAT]["steps"]:
        if "close_idle_after_s" in step:
            step["close_idle_after_s"] = 0.005
    found = rows(folder / "rows.jsonl")
    workflow = submit_rows(found, batch_size=1)
    bell.listen(timeout_s=0.01)
    with stub(fault) as server:
        chat_stage.serve(server.url, version="stub")
        messages = chat_stage.send()
        while messages:
            for message in messages:
                for batch in message.batches:
                    chat_stage.generator.rate([batch], task_id=uuid.uuid4())
            messages = chat_stage.send()

    assert set(states(workflow)) == {"COMPLETED"}
    assert {r.attempts for r in requests(workflow)} == {1}
    assert Rating.objects.count() == 20
    assert sum(signal.get("overloaded", 0) for signal in bell.listen(timeout_s=0.01)) == 0


@pytest.mark.parametrize("fault", ["drip", "hang"])
def test_s_08_a_call_ends_at_its_limit_whatever_trickles_in(fault: str) -> None:
    folder = case("S-08")
    with (
        staged(
            autorater="llm_judge", protocol="openai", prompt_template=TEMPLATE, max_attempts=1
        ) as stage,
        stub(load(folder / f"fault_{fault}.json")) as server,
    ):
        workflow = submit_rows(rows(folder / "row.jsonl"))
        stage.serve(server.url, timeout_s=0.3, version="stub")
        began_at = database_now()
        stage.rate()
        took = database_now() - began_at

    assert [r.error for r in requests(workflow)] == ["timeout"]
    assert timedelta(seconds=0.3) <= took < timedelta(seconds=2)


def test_s_08_an_answer_without_end_is_cut(chat_stage: Stage) -> None:
    Rater.objects.update(max_attempts=1)
    workflow = submit(["a"])
    with scripted(Step(body=b'{"choices":', endless=True)) as server:
        chat_stage.serve(server.url)
        chat_stage.rate()

    assert [r.error for r in requests(workflow)] == ["response_too_large"]


@pytest.mark.parametrize("status", STATUSES)
def test_s_09_what_is_retried_and_what_is_not(chat_stage: Stage, status: int) -> None:
    folder = case("S-09")
    codes = load(folder / "codes.json")
    assert {int(code) for code in codes} == set(STATUSES)
    wanted = codes[str(status)]
    fault = {"routes": {CHAT: {"steps": [{"status": status, "json": {"error": "sorry, no"}}]}}}
    workflow = submit_rows(rows(folder / "row.jsonl"), deadline_in=timedelta(seconds=20))
    with stub(fault) as server:
        chat_stage.serve(server.url, version="stub")
        chat_stage.rate(times=2)
        asked = len(server.calls)
        if wanted == "RETRY":
            assert asked == 2
            assert states(workflow) == ["PENDING"]
            Workflow.objects.update(deadline_at=database_now() + timedelta(seconds=0.9))
            chat_stage.rate()
            assert len(server.calls) == asked, "a call that cannot end before the deadline"
            assert states(workflow) == ["TIMED_OUT"]
            check_all()
            assert finished(workflow) == "FAILED"
        elif wanted == "RATER_PAUSED":
            rater = Rater.objects.get()
            assert (asked, states(workflow)) == (1, ["PENDING"])
            assert rater.paused_code
            assert "sorry, no" in rater.paused_detail
        else:
            assert (asked, states(workflow)) == (1, ["FAILED"])
            (request,) = requests(workflow)
            assert request.output is not None
            assert f"HTTP {status} sorry, no" in request.output["detail"]


def test_s_09_other_raters_go_on_when_one_is_paused(oip_stage: Stage) -> None:
    other = builders.version(
        builders.rater("other", autorater="oip_score", model_id="other"), model_version="1"
    )
    paused, fine = submit(["a"]), submit(["a"], of=other)
    with scripted(Step(status=401)) as server, scripted(Step(body=_one_score)) as good:
        oip_stage.serve(server.url, good.url)
        first, second = oip_stage.dispatcher.fleet.live
        oip_stage.dispatcher.fleet.live = [first, _of_model(second, "other")]
        oip_stage.rate(times=2)

    assert (states(paused), states(fine)) == (["PENDING"], ["COMPLETED"])
    assert set(Rater.objects.filter(paused_at=None).values_list("pk", flat=True)) == {"other"}


def test_s_09_too_long_a_context_is_permanent_even_in_a_500(chat_stage: Stage) -> None:
    folder = case("S-09")
    workflow = submit_rows(rows(folder / "row.jsonl"))
    with stub(load(folder / "fault_500_ctx.json")) as server:
        chat_stage.serve(server.url, version="stub")
        chat_stage.rate(times=2)

    assert [r.error for r in requests(workflow)] == ["context_length_exceeded"]
    assert len(server.calls) == 1


def test_s_11_bad_rows_and_unclear_answers_do_not_lower_the_window(chat_stage: Stage) -> None:
    """The window's course under a burst is in tests/unit/test_window_course.py."""
    workflow = submit(["bad", "unclear"], batch_size=1)
    bell.listen(timeout_s=0.01)
    fault = {
        "routes": {
            CHAT: {
                "steps": [
                    {"when": {"body_contains": "bad"}, "status": 400, "text": "no"},
                    {"judge_text": "It depends."},
                ]
            }
        }
    }
    with stub(fault) as server:
        chat_stage.serve(server.url, version="stub")
        chat_stage.rate()

    assert states(workflow) == ["FAILED", "FAILED"]
    heard = [s for s in bell.listen(timeout_s=1) if "cls" in s]
    assert sum(s["overloaded"] for s in heard) == 0
    assert sum(s["succeeded"] for s in heard) == 3


def test_x_08_neither_a_key_nor_its_hash_is_kept_or_logged(
    chat_stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    folder = case("X-08")
    needles = load(folder / "expected.json")["expect"]["needles"]
    key, _, in_url, _ = needles
    workflow = submit_rows(rows(folder / "row.jsonl"))
    with stub(load(folder / "fault.json")) as server:
        url = f"{server.url}/?key={in_url}"
        chat_stage.serve(url, version="stub", headers={"Authorization": f"Bearer {key}"})
        chat_stage.rate()

    rater = Rater.objects.get()
    assert rater.paused_code == "unauthorized"
    assert "Invalid key" in rater.paused_detail
    assert server.url.removeprefix("http://") in rater.paused_detail
    kept = [rater.paused_detail, caplog.text, *(str(vars(r)) for r in requests(workflow))]
    assert [needle for needle in needles if any(needle in text for text in kept)] == []


def test_ca_03_errors_refusals_and_unclear_answers_are_never_archived() -> None:
    folder = case("CA-03")
    expected = load(folder / "expected.json")["expect"]
    row = rows(folder / "row.jsonl")
    with (
        staged(
            autorater="llm_judge",
            protocol="openai",
            prompt_template=TEMPLATE,
            max_attempts=expected["settings"]["max_attempts"],
        ) as stage,
        stub(load(folder / "fault.json")) as server,
    ):
        stage.serve(server.url, version="stub")
        for job in expected["jobs"]:
            calls = len(server.calls)
            workflow = submit_rows(row)
            # Each is accepted after what failed before it, as people send them.
            Workflow.objects.filter(pk=workflow.pk).update(created_at=database_now())
            stage.rate()
            (request,) = requests(workflow)
            assert (len(server.calls) == calls) == (job["cache"] == "hit"), job
            assert request.score == job.get("score"), job
            assert Rating.objects.exists() == job.get("cached_after", True), job

    assert len(server.calls) == expected["model_requests_total"]


def _serve_stub(stage: Stage, url: str) -> None:
    """Serve the cases' OIP model, which is called `stub`."""
    stage.serve(url, model_name="stub")


def _one_score(seen: Any) -> bytes:
    rated: bytes = orjson.dumps(
        {
            "id": seen.json().get("id"),
            "model_version": "1",
            "outputs": [{"name": "score", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}],
        }
    )
    return rated


def _of_model(replica: Any, model_id: str) -> Any:
    return replace(replica, model_id=model_id)
