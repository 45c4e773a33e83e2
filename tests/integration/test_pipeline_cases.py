"""What happens to work between queue, broker and executor, as people report it: cases Q-*.

In virtual time where a case waits: the services get their `now` as an argument.
"""

import json
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from kombu.exceptions import OperationalError as BrokerError

from fulfillment import bell, completion, leases
from fulfillment.clock import database_now
from fulfillment.management.commands.dispatch import Publisher
from fulfillment.models import Batch, ExecutorBoot, Rating, Workflow
from fulfillment.policy.lifecycle import BatchState, WorkflowState
from fulfillment.policy.traffic import backoff
from tests import builders
from tests.collected_cases import case, load, rows, stub
from tests.executor_stage import Stage, staged
from tests.fakes import Step, instant_oip, oip, refusal, scripted
from tests.rating_queue import (
    batches,
    check_all,
    counts_add_up,
    end_pauses,
    finished,
    requests,
    states,
    submit,
    threads,
    until,
)

pytestmark = pytest.mark.django_db(transaction=True)

TEMPLATE = "Query: {query_text}\nPage: {html}\nAnswer with a number from 0 to 4."


@pytest.fixture
def stage() -> Iterator[Stage]:
    with staged() as made:
        yield made


@pytest.fixture
def chat_stage() -> Iterator[Stage]:
    with staged(
        autorater="llm_judge", protocol="openai", prompt_template=TEMPLATE, part_s=0.1
    ) as made:
        yield made


def submit_rows(found: dict[str, dict[str, Any]], **how: Any) -> Workflow:
    return submit(list(found), item=lambda name: found[name], **how)


def test_q_01_a_redelivered_message_does_nothing_and_a_long_wait_needs_no_broker(
    stage: Stage,
) -> None:
    folder = case("Q-01")
    expected = load(folder / "expected.json")["expect"]
    found = rows(folder / "rows.jsonl")
    workflow = submit_rows(found)
    fault = load(folder / "fault.json")
    route = fault["routes"]["/v2/models/stub/infer"]
    route["steps"] = [{"auto": "oip"}] * 2 + [
        {"status": 429, "headers": {"Retry-After": "20"}, "text": "later"},
        {"auto": "oip"},
    ]
    with stub(fault) as server:
        stage.serve(server.url, model_name="stub")
        messages = stage.send()
        for _ in range(3):  # the broker delivers each three times
            for message in messages:
                stage.generator.rate(message.batches, task_id=uuid.uuid4())
        assert not stage.send(), "the deferred batch is a row with a time, no message"
        assert Batch.objects.get(state=BatchState.DELAYED).not_before is not None
        stage.rate()

    refused = 12
    assert sum(server.items) == expected["model_items"] + refused
    assert Rating.objects.count() == expected["ratings"]
    assert sorted({r.attempts for r in requests(workflow)}) == [1, 2]
    check_all()
    check_all()
    assert finished(workflow) == "COMPLETED"


def test_q_02_work_goes_on_when_the_broker_comes_back(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    workflow = submit(["a", "b"], batch_size=1)
    lost = Publisher()

    def away(*_: Any, **__: Any) -> Any:
        raise BrokerError("gone")

    with instant_oip() as url:
        stage.serve(url)
        with monkeypatch.context() as patched:
            patched.setattr("kombu.Producer.publish", away)
            for message in stage.send():
                lost(message.batches, message.priority)
        assert {b.state for b in batches(workflow)} == {BatchState.LEASED}
        leases.expire(now=database_now() + leases.PICK_UP, trust_heartbeats=True)
        stage.rate()

    assert set(states(workflow)) == {"COMPLETED"}
    assert {b.lost for b in batches(workflow)} == {0}
    assert {r.attempts for r in requests(workflow)} == {1}


def test_q_02_a_dead_broker_fails_no_executor(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    workflow = submit(["a"])
    monkeypatch.setattr("redis.connection.AbstractConnection.connect", _refuse)
    bell._client().connection_pool.disconnect()
    with instant_oip() as url:
        stage.serve(url)
        stage.rate()

    assert states(workflow) == ["COMPLETED"]


def _refuse(*_: Any, **__: Any) -> None:
    import redis

    raise redis.ConnectionError("gone")


def test_q_04_deferred_work_waits_in_the_database_and_another_rater_goes_on(stage: Stage) -> None:
    """20,000 deferred items are 1,667 rows with a time; 240 of them show it as well."""
    other = builders.version(
        builders.rater("other", autorater="oip_score", model_id="other"), model_version="1"
    )
    deferred = submit([f"a{n}" for n in range(240)])
    busy = refusal(503, "overloaded", Retry_After="600")
    with scripted(busy) as server, instant_oip() as url:
        stage.serve(server.url, url)
        first, second = stage.dispatcher.fleet.live
        stage.dispatcher.fleet.live = [first, _of(second, model_id="other")]
        stage.rate()
        fresh = submit([f"b{n}" for n in range(120)], of=other)
        stage.rate_ready()
        assert not stage.send()

    assert set(states(fresh)) == {"COMPLETED"}
    assert set(states(deferred)) == {"PENDING"}
    waiting = Batch.objects.filter(workflow=deferred, state=BatchState.DELAYED)
    earliest = database_now() + timedelta(seconds=500)
    assert waiting.filter(not_before__gt=earliest).count() == waiting.count() > 0
    assert not Batch.objects.filter(workflow=deferred, state=BatchState.LEASED).exists()


def _of(replica: Any, **changes: Any) -> Any:
    from dataclasses import replace

    return replace(replica, **changes)


class _Died(BaseException):
    """The process is gone."""


def test_q_07_a_row_that_kills_the_process_is_found_by_the_third_delivery(stage: Stage) -> None:
    folder = case("Q-07")
    expected = load(folder / "expected.json")["expect"]
    found = rows(folder / "rows.jsonl")
    workflow = submit_rows(found)
    deliveries = _until_nothing_dies(stage, "query k 7")

    assert deliveries <= expected["deliveries_max"]
    failed = {
        name: request.error
        for name, request in zip(found, requests(workflow), strict=True)
        if request.error
    }
    assert failed == expected["failed"]
    assert states(workflow).count("COMPLETED") == expected["completed"]
    later = submit(["z"])
    with instant_oip() as url:
        stage.serve(url)
        stage.rate()
    assert states(later) == ["COMPLETED"]


def test_q_07_neighbours_in_the_same_process_are_not_taken_for_the_culprit(stage: Stage) -> None:
    """All batches of a process are suspect when it dies; only the one named item is to blame."""
    workflow = submit(["a", "b", "killer", "c", "d", "e"], batch_size=2)

    _until_nothing_dies(stage, "killer")

    errors = [request.error for request in requests(workflow)]
    assert errors == [None, None, "worker_lost", None, None, None]


def _until_nothing_dies(stage: Stage, killer: str) -> int:
    """Rate until all is done, an executor dying of each call for `killer`; return its deaths."""
    deaths = 0
    dead = threading.Event()
    with instant_oip(delay_s=0.01) as url, pytest.MonkeyPatch.context() as patched:
        stage.serve(url)
        patched.setattr(leases, "finish", _of_the_living(leases.finish))
        patched.setattr(leases, "extend", _while_alive(leases.extend, dead))
        patched.setattr("workers.autoraters.oip_score.OipScore.prepare", _killing(killer, dead))
        for _ in range(12):
            end_pauses()
            messages = stage.send()
            if not messages:
                break
            dead.clear()
            for message in messages:
                try:
                    stage.generator.rate(message.batches, task_id=uuid.uuid4())
                except _Died:
                    deaths += 1
            now = database_now() + timedelta(hours=1)
            ExecutorBoot.objects.update(heartbeat_at=now)
            leases.expire(now=now, trust_heartbeats=True)
            ExecutorBoot.objects.update(heartbeat_at=database_now())
    return deaths


def _of_the_living(finish: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """A dead executor gives nothing back: drop what it would say on its way out."""

    def filtered(finishes: Any) -> list[int]:
        return finish([f for f in finishes if f.scored or f.failed])

    return filtered


def _while_alive(extend: Callable[..., bool], dead: threading.Event) -> Callable[..., bool]:
    """What goes on in the loop of a process that died must not write."""

    def alive(*leased: Any, **how: Any) -> bool:
        return not dead.is_set() and extend(*leased, **how)

    return alive


def _killing(killer: str, dead: threading.Event) -> Callable[..., Any]:
    from workers.autoraters.oip_score import OipScore

    prepare = OipScore.prepare

    def prepared(plugin: Any, items: Any, spec: Any) -> Any:
        if any(item["query_text"] == killer for item in items):
            dead.set()
            raise _Died
        return prepare(plugin, items, spec)

    return prepared


def test_q_11_back_off_never_overflows_and_stays_within_its_bounds() -> None:
    for vector in load(case("Q-11") / "vectors.json"):
        for chance in (0.0, 0.5, 1 - 1e-12):
            wait = backoff(attempt=vector["attempt"], chance=chance, retry_after_s=None)
            assert vector["lo"] <= wait.total_seconds() <= vector["hi"]


def test_q_11_what_was_refused_together_does_not_come_back_together() -> None:
    herd = load(case("Q-11") / "expected.json")["expect"]["herd"]
    chance = random.Random(7)

    waits = [
        backoff(attempt=1, chance=chance.random(), retry_after_s=herd["floor_s"]).total_seconds()
        for _ in range(100)
    ]

    assert len(set(waits)) >= herd["distinct_wake_times_min"]
    assert max(waits) - min(waits) >= herd["spread_s_min"]
    assert herd["floor_s"] <= min(waits)
    assert max(waits) <= herd["latest_s_max"]


def test_q_14_a_few_hung_items_do_not_hold_up_the_others(chat_stage: Stage) -> None:
    """The others are written while the hung calls go on; at the end of its time it is PARTIAL."""
    folder = case("Q-14")
    expected = load(folder / "expected.json")["expect"]["job1"]
    found = rows(folder / "rows.jsonl")
    workflow = submit_rows(found)
    hung = sum("HANG" in json.dumps(row) for row in found.values())
    with stub(load(folder / "fault.json")) as server, threads(1) as pool:
        chat_stage.serve(server.url, version="stub", timeout_s=1.5)
        for replica in chat_stage.dispatcher.fleet.live:
            chat_stage.dispatcher.fleet.live = [_of(replica, window=128)]
        batches_sent = [batch for message in chat_stage.send() for batch in message.batches]
        rating = pool.submit(chat_stage.generator.rate, batches_sent, task_id=uuid.uuid4())
        until(
            lambda: states(workflow).count("COMPLETED") == expected["completed"],
            what="all but the hung ones are written",
        )
        assert not rating.done()
        assert states(workflow).count("PENDING") == hung == expected["timed_out"]
        later = database_now() + timedelta(hours=4)
        completion.run_once(later)
        rating.result(10)
        completion.run_once(later)

    assert states(workflow).count("COMPLETED") == expected["completed"]
    assert states(workflow).count("TIMED_OUT") == expected["timed_out"]
    assert finished(workflow) == expected["state"]
    assert {r.score for r in requests(workflow) if r.error} == {None}


def test_q_14_a_workflow_whose_items_all_fail_is_failed_with_a_code(chat_stage: Stage) -> None:
    workflow = submit([f"n{n}" for n in range(12)])
    with scripted(Step(status=400, body=b'{"error": "no such thing"}')) as server:
        chat_stage.serve(server.url)
        chat_stage.rate()

    check_all()
    assert finished(workflow) == "FAILED"
    assert {r.error for r in requests(workflow)} == {"invalid_request"}
    counts_add_up(workflow)


def test_an_item_that_only_waited_has_all_of_its_tries_left(stage: Stage) -> None:
    """`b` is fine, and `c` was in flight elsewhere while `a` used up its tries."""
    first = submit(["c"])
    no, bad, ok = refusal(422), refusal(500), oip(1.0)
    with scripted(no, bad, ok, bad) as server:
        stage.serve(server.url)
        assert stage.send()
        workflow = submit(["a", "b", "c"])
        stage.rate()
        assert states(workflow) == ["PENDING", "COMPLETED", "PENDING"]
        stage.rate(times=2)
        assert Batch.objects.get(workflow=workflow).tries == [3, 0, 0]
        leases.expire(now=database_now() + leases.PICK_UP, trust_heartbeats=True)
        Workflow.objects.filter(pk=first.pk).update(state=WorkflowState.PAUSED)
        stage.rate()

    tried, _, waited = requests(workflow)
    assert (tried.error, tried.attempts) == ("http_500", 4)
    assert states(workflow) == ["FAILED", "COMPLETED", "PENDING"]
    assert Batch.objects.get(workflow=workflow).tries == [4, 0, 1]
    assert waited.error is None
