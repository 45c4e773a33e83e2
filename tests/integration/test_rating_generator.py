"""The Rating Generator against real model servers and the real database."""

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import psycopg2
import pytest
from django.db import connection

from fulfillment import bell, control, leases
from fulfillment.clock import database_now
from fulfillment.models import (
    Batch,
    ExecutorBoot,
    FailedFlight,
    Rater,
    Rating,
    StatsDelta,
    Workflow,
)
from fulfillment.policy.lifecycle import BatchState, Source
from tests.executor_stage import Stage, staged
from tests.fakes import Seen, Step, closed_port, instant_oip, oip, refusal, scripted, stub_score
from tests.rating_queue import (
    batches,
    check_all,
    counts_add_up,
    finished,
    flights,
    requests,
    states,
    submit,
    threads,
    until,
)
from workers import rating_generator
from workers.autoraters import OipAnswer, OipCall, Rated, RaterSpec, Unusable, load

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def stage() -> Iterator[Stage]:
    with staged() as made:
        yield made


def only(workflow: Workflow) -> Batch:
    (batch,) = batches(workflow)
    return batch


def asked(seen: Seen) -> list[str]:
    """Return the queries of a call."""
    inputs = {tensor["name"]: tensor["data"] for tensor in seen.json()["inputs"]}
    queries: list[str] = inputs["query"]
    return queries


def errors(workflow: Workflow) -> list[str | None]:
    return [request.error for request in requests(workflow)]


# What goes well


def test_a_workflow_is_rated_by_one_call_a_batch(stage: Stage) -> None:
    workflow = submit(["a", "b", "a", "c"])
    with instant_oip() as url:
        stage.serve(url)
        stage.rate()

    assert [r.score for r in requests(workflow)] == [
        pytest.approx(stub_score(name, name), abs=1e-6) for name in ("a", "b", "a", "c")
    ]
    assert [r.source for r in requests(workflow)] == [
        Source.MODEL, Source.MODEL, Source.COALESCED, Source.MODEL,
    ]  # fmt: skip
    assert Rating.objects.count() == 3
    assert not flights()
    found = counts_add_up(workflow)
    assert (found["model_calls"], found["attempts"]) == (1, 1)
    assert found["accelerator_seconds"] > 0
    assert stage.ended == [workflow.pk]
    check_all()
    assert finished(workflow) == "COMPLETED"


def test_batches_of_a_message_that_end_together_are_written_together(stage: Stage) -> None:
    workflow = submit([f"n{n}" for n in range(16)], batch_size=2)
    with instant_oip(delay_s=0.05) as url:
        stage.serve(url, url)
        messages = stage.send()
        for message in messages:
            stage.generator.rate(message.batches, task_id=uuid.uuid4())

    assert [len(m.batches) for m in messages] == [8]
    assert set(states(workflow)) == {"COMPLETED"}
    assert StatsDelta.objects.count() < 8, "a delta is written once a transaction"
    counts_add_up(workflow)


def test_a_slow_batch_does_not_hold_up_the_others_of_its_message(stage: Stage) -> None:
    workflow = submit(["fast", "slow"], batch_size=1)
    go = threading.Event()

    def late(seen: Seen) -> bytes:
        go.wait(10)
        return oip(1.0).body(seen)  # type: ignore[operator]

    with instant_oip() as url, scripted(Step(body=late)) as slow, threads(1) as pool:
        stage.serve(url, slow.url)
        message = [batch for m in stage.send() for batch in m.batches]
        rating = pool.submit(stage.generator.rate, message, task_id=uuid.uuid4())
        until(lambda: "COMPLETED" in states(workflow), what="the fast one is written")
        assert sorted(states(workflow)) == ["COMPLETED", "PENDING"]
        go.set()
        rating.result(10)

    assert set(states(workflow)) == {"COMPLETED"}


def test_a_message_that_is_delivered_twice_is_worked_on_once(stage: Stage) -> None:
    submit(["a"])
    with scripted(oip(1.0)) as server:
        stage.serve(server.url)
        (message,) = stage.send()
        for _ in range(2):
            stage.generator.rate(message.batches, task_id=uuid.uuid4())

    assert len(server.seen) == 1


def test_a_message_of_a_cancelled_workflow_makes_no_call(stage: Stage) -> None:
    workflow = submit(["a"])
    with scripted(oip(1.0)) as server:
        stage.serve(server.url)
        (message,) = stage.send()
        control.cancel(workflow_id=workflow.pk)
        stage.generator.rate(message.batches, task_id=uuid.uuid4())

    assert not server.seen


@pytest.mark.parametrize(
    ("priority", "best_effort", "said"), [(90, False, 11), (0, False, 101), (90, True, 101)]
)
def test_the_model_is_told_the_priority(
    stage: Stage, priority: int, best_effort: bool, said: int
) -> None:
    submit(["a"], priority=priority, best_effort=best_effort)
    with scripted(oip(1.0)) as server:
        stage.serve(server.url, sends_priority=True)
        stage.rate()

    assert server.seen[0].json()["parameters"]["priority"] == said


def test_the_model_is_told_the_priority_of_a_raised_message(stage: Stage) -> None:
    submit(["a"], priority=10)
    with scripted(oip(1.0)) as server:
        stage.serve(server.url, sends_priority=True)
        (message,) = stage.send()
        stage.generator.rate(message.batches, task_id=uuid.uuid4(), step=3)

    # 101 less 61, the least score of step 3.
    assert server.seen[0].json()["parameters"]["priority"] == 40


def test_the_dispatcher_hears_what_calls_met(stage: Stage) -> None:
    submit(["a"], priority=90)
    submit(["b"], priority=10)
    bell.listen(timeout_s=0.01)
    with scripted(oip(1.0), refusal(429)) as server:
        stage.serve(server.url)
        stage.rate()

    heard = list(bell.listen(timeout_s=2))
    assert [(s["replica"], s["cls"], s["succeeded"], s["overloaded"]) for s in heard] == [
        ("r1", 0, 1, 0),
        ("r1", 2, 0, 1),
    ]


def test_the_dispatcher_hears_that_nobody_is_there_yet(stage: Stage) -> None:
    submit(["a"])
    bell.listen(timeout_s=0.01)
    with scripted(refusal(503, "the model is loading")) as server:
        stage.serve(server.url)
        stage.rate()

    (heard,) = bell.listen(timeout_s=2)
    assert (heard["replica"], heard["away"], heard["overloaded"]) == ("r1", 1, 0)


# One bad item


@pytest.mark.parametrize(
    ("status", "code"),
    [(422, "invalid_request"), (400, "invalid_request"), (413, "payload_too_large")],
)
def test_a_refused_batch_is_bisected_to_the_bad_item(stage: Stage, status: int, code: str) -> None:
    workflow = submit(["a", "bad", "c", "d", "e", "bad"])
    no = refusal(status)
    with scripted(no, no, no, oip(1.0), no, oip(2.0), oip(3.0, 4.0)) as server:
        stage.serve(server.url)
        stage.rate()

    assert [asked(seen) for seen in server.seen] == [
        ["a", "bad", "c", "d", "e"],
        ["a", "bad", "c"],
        ["a", "bad"],
        ["a"],
        ["bad"],
        ["c"],
        ["d", "e"],
    ]
    assert errors(workflow) == [None, code, None, None, None, code]
    assert [r.score for r in requests(workflow)] == [1.0, None, 2.0, 3.0, 4.0, None]
    assert {r.attempts for r in requests(workflow)} == {1}
    assert FailedFlight.objects.get().code == code
    assert counts_add_up(workflow)["model_calls"] == 7
    check_all()
    assert finished(workflow) == "PARTIAL"


def test_an_item_the_model_answers_without_a_score_fails_alone(stage: Stage) -> None:
    workflow = submit(["a", "b"])
    with scripted(oip(99.0, 3.0)) as server:
        stage.serve(server.url)
        stage.rate()

    assert errors(workflow) == ["out_of_range", None]
    assert len(server.seen) == 1
    assert Rating.objects.count() == 1


@pytest.mark.parametrize("parts", [[1.0], [1.0, 2.0, 3.0]], ids=["short", "long"])
def test_an_answer_that_does_not_fit_is_thrown_away_and_asked_in_parts(
    stage: Stage, parts: list[float]
) -> None:
    workflow = submit(["a", "b"])
    with scripted(oip(*parts), oip(2.0), oip(3.0)) as server:
        stage.serve(server.url)
        stage.rate()

    assert [r.score for r in requests(workflow)] == [2.0, 3.0]
    assert [asked(seen) for seen in server.seen] == [["a", "b"], ["a"], ["b"]]


def test_an_item_whose_answers_never_fit_is_tried_again_and_then_fails(stage: Stage) -> None:
    workflow = submit(["a", "b"])
    with scripted(oip(), oip(1.0), oip()) as server:
        stage.serve(server.url)
        stage.rate()
        assert states(workflow) == ["COMPLETED", "PENDING"]
        assert (only(workflow).state, only(workflow).attempts) == (BatchState.DELAYED, 1)
        stage.rate(times=5)

    assert states(workflow) == ["COMPLETED", "FAILED"]
    assert requests(workflow)[1].attempts == 4
    assert len(server.seen) == 3 + 3
    assert not FailedFlight.objects.exists(), "others may have more luck"


class Fussy:
    """A plug-in that cannot cope with some items."""

    name, version, protocol = "oip_score", "1", "oip"

    def __init__(self, *, prepares: Callable[[str], Any] = str, says: Callable[[str], Any]) -> None:
        self.prepares, self.says = prepares, says

    def prepare(self, items: Sequence[Mapping[str, Any]], spec: RaterSpec) -> OipCall:
        names = [self.prepares(item["query_text"]) for item in items]
        return OipCall(inputs={"query": names, "text": names}, outputs=("score",))

    def parse(
        self, items: Sequence[Mapping[str, Any]], answer: OipAnswer, spec: RaterSpec
    ) -> Sequence[Rated | Unusable]:
        return [r for item in items if (r := self.says(item["query_text"])) is not None]


@contextmanager
def plugin(used: Any) -> Iterator[None]:
    """Let the generator find this plug-in."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rating_generator, "load", lambda name: used)
        yield


def good(name: str) -> Rated:
    return Rated(score=1.5)


def _raise_at_bad(name: str) -> Any:
    if name == "bad":
        raise ValueError("no idea")
    return Rated(score=1.5) if name != "prepared" else name


def _prepare_raises(name: str) -> str:
    _raise_at_bad(name)
    return name


@pytest.mark.parametrize(
    ("fussy", "code"),
    [
        (Fussy(prepares=_prepare_raises, says=good), "plugin_error"),
        (Fussy(says=_raise_at_bad), "plugin_error"),
        (Fussy(says=lambda n: None if n == "bad" else good(n)), "plugin_error"),
        (Fussy(says=lambda n: Rated(score=float("nan" if n == "bad" else "1.5"))), "not_finite"),
        (Fussy(says=lambda n: Rated(score=1.5, label="\0" * (n == "bad"))), "plugin_error"),
        (Fussy(says=lambda n: Rated(score=1.5, label="\ud800" * (n == "bad"))), "plugin_error"),
        (Fussy(says=lambda n: Rated(score=1.5, output={"x": "\0" * (n == "bad")})), "plugin_error"),
        (Fussy(says=lambda n: Rated(score=1.5, output={"x": {1} if n == "bad" else 1})),
         "plugin_error"),
    ],
    ids=[
        "prepare raises", "parse raises", "parse is short", "nan", "nul", "surrogate",
        "nul in output", "no json",
    ],
)  # fmt: skip
def test_an_item_the_plug_in_cannot_cope_with_fails_alone(
    stage: Stage, fussy: Fussy, code: str
) -> None:
    workflow = submit(["a", "bad", "c", "d"])
    with instant_oip() as url, plugin(fussy):
        stage.serve(url)
        stage.rate()

    assert errors(workflow) == [None, code, None, None]
    assert [r.score for r in requests(workflow)] == [1.5, None, 1.5, 1.5]
    check_all()
    assert finished(workflow) == "PARTIAL"


def test_text_that_looks_like_an_escaped_nul_is_kept(stage: Stage) -> None:
    workflow = submit(["a"])
    told = {"path": "C:\\u0000", "more": "\\\\u0000"}
    with instant_oip() as url, plugin(Fussy(says=lambda name: Rated(score=1, output=told))):
        stage.serve(url)
        stage.rate()

    assert requests(workflow)[0].output == told


def test_a_batch_that_the_database_refuses_does_not_hold_up_its_message(stage: Stage) -> None:
    workflow = submit(["a", "poison", "c"], batch_size=1)
    with connection.cursor() as cursor:
        cursor.execute(
            "ALTER TABLE fulfillment_rating ADD CONSTRAINT no_poison"
            " CHECK (label IS DISTINCT FROM 'poison')"
        )
    try:
        with (
            instant_oip(delay_s=0.05) as url,
            plugin(Fussy(says=lambda n: Rated(score=1, label=n))),
        ):
            stage.serve(url)
            message = [batch for m in stage.send() for batch in m.batches]
            stage.generator.rate(message, task_id=uuid.uuid4())
            assert states(workflow) == ["COMPLETED", "PENDING", "COMPLETED"]
            stage.rate(times=6)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE fulfillment_rating DROP CONSTRAINT no_poison")

    assert errors(workflow) == [None, "internal_error", None]
    counts_add_up(workflow)


def test_a_plug_in_of_another_version_computes_nothing(stage: Stage) -> None:
    workflow = submit(["a"])
    newer = Fussy(says=good)
    newer.version = "2"
    with scripted(oip(1.0)) as server:
        stage.serve(server.url)
        with plugin(newer):
            stage.rate(times=6)
        assert not server.seen
        assert (only(workflow).state, only(workflow).attempts) == (BatchState.DELAYED, 0)
        stage.rate()

    assert states(workflow) == ["COMPLETED"]


# Trouble that passes


def test_a_failing_server_is_tried_again_and_split_from_the_third_try(stage: Stage) -> None:
    workflow = submit(["a", "b"])
    no = refusal(500)
    with scripted(no, no, no, oip(1.0), no, no) as server:
        stage.serve(server.url)
        for attempts in (1, 2):
            stage.rate()
            batch = only(workflow)
            assert (batch.state, batch.attempts) == (BatchState.DELAYED, attempts)
            assert batch.not_before is not None
            assert batch.not_before <= database_now() + timedelta(seconds=2**attempts)
            assert len(server.seen) == attempts
        stage.rate()
        assert [asked(seen) for seen in server.seen[2:]] == [["a", "b"], ["a"], ["b"]]
        assert states(workflow) == ["COMPLETED", "PENDING"]
        stage.rate()

    assert errors(workflow) == [None, "http_500"]
    assert [r.attempts for r in requests(workflow)] == [3, 4]
    counts_add_up(workflow)
    check_all()
    assert finished(workflow) == "PARTIAL"


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_address_pauses_the_rater_and_keeps_its_items(
    stage: Stage, status: int
) -> None:
    workflow = submit(["a", "b"])
    with scripted(refusal(status, "who are you?"), oip(1.0, 2.0)) as server:
        stage.serve(server.url)
        stage.rate()

        rater = Rater.objects.get()
        assert rater.paused_code in {"unauthorized", "forbidden", "not_found"}
        assert "who are you?" in rater.paused_detail
        batch = only(workflow)
        assert (batch.state, batch.attempts) == (BatchState.DELAYED, 0)
        stage.rate()
        assert len(server.seen) == 1
        assert states(workflow) == ["PENDING", "PENDING"]
        Rater.objects.update(paused_code="", paused_at=None)
        stage.rate()

    assert states(workflow) == ["COMPLETED", "COMPLETED"]


def test_what_was_rated_before_the_rater_was_paused_is_kept(stage: Stage) -> None:
    workflow = submit(["a", "b"])
    with scripted(refusal(422), oip(1.0), refusal(401)) as server:
        stage.serve(server.url)
        stage.rate()

    assert states(workflow) == ["COMPLETED", "PENDING"]
    assert Rater.objects.get().paused_code == "unauthorized"


def test_a_server_that_is_warming_up_costs_no_attempt(stage: Stage) -> None:
    workflow = submit(["a"])
    with scripted(refusal(503, "the model is loading")) as server:
        stage.serve(server.url)
        stage.rate(times=6)

    assert (only(workflow).attempts, states(workflow)) == (0, ["PENDING"])
    with closed_port() as port:
        stage.serve(f"http://127.0.0.1:{port}")
        stage.generator._endpoints.clear()
        stage.rate()

    assert (only(workflow).attempts, states(workflow)) == (0, ["PENDING"])


def test_an_answer_of_another_version_is_thrown_away(stage: Stage) -> None:
    workflow = submit(["a"])
    with scripted(oip(1.0, model_version="2"), oip(2.0)) as server:
        stage.serve(server.url)
        stage.rate()
        assert not Rating.objects.exists()
        assert (only(workflow).attempts, states(workflow)) == (0, ["PENDING"])
        stage.rate()

    assert [r.score for r in requests(workflow)] == [2.0]


@pytest.mark.parametrize(
    ("found", "asked"),
    [({"version": "2", "key_version": "2"}, 0), ({"version": "", "key_version": ""}, 1)],
    ids=["a replica of another version", "one that has not said its version"],
)
def test_what_another_version_of_our_own_answers_is_never_stored(
    stage: Stage, found: dict[str, str], asked: int
) -> None:
    workflow = submit(["a"])
    with scripted(oip(1.0, model_version="2")) as server:
        stage.serve(server.url, **found)
        stage.rate(times=5)
        assert len(server.seen) == asked * 5
    assert not Rating.objects.exists()
    assert (only(workflow).attempts, states(workflow)) == (0, ["PENDING"])
    assert Rater.objects.get().paused_at is None

    with scripted(oip(2.0)) as server:
        stage.serve(server.url)
        stage.rate()
    assert [r.score for r in requests(workflow)] == [2.0]
    check_all()


def test_a_replica_that_is_gone_costs_no_attempt(stage: Stage) -> None:
    workflow = submit(["a"])
    with scripted(oip(1.0)) as server:
        stage.serve(server.url)
        stage.directory.endpoints.clear()
        stage.rate()

        assert not server.seen
        batch = only(workflow)
        assert (batch.state, batch.attempts, batch.lost) == (BatchState.DELAYED, 0, 0)
        stage.serve(server.url)
        stage.rate()

    assert states(workflow) == ["COMPLETED"]


def test_retry_after_is_kept(stage: Stage) -> None:
    workflow = submit(["a"])
    with scripted(refusal(429, Retry_After="100")) as server:
        stage.serve(server.url)
        stage.rate()

    not_before = only(workflow).not_before
    assert not_before is not None
    assert not_before > database_now() + timedelta(seconds=90)


def test_no_try_starts_that_cannot_end_before_the_deadline(stage: Stage) -> None:
    workflow = submit(["a", "b"], deadline_in=timedelta(seconds=20))
    with scripted(refusal(422), oip(1.0), refusal(429, Retry_After="100")) as server:
        stage.serve(server.url)
        stage.rate()

    assert states(workflow) == ["COMPLETED", "TIMED_OUT"]
    assert errors(workflow) == [None, "deadline"]
    check_all()
    assert finished(workflow) == "PARTIAL"


def test_the_first_version_an_external_server_reports_counts(stage: Stage) -> None:
    workflow = submit(["a"])
    with scripted(oip(1.0, model_version="v7")) as server:
        stage.serve(server.url, version="", managed=False)
        stage.rate()

    assert stage.directory.reports == ["v7"]
    assert states(workflow) == ["COMPLETED"]


@pytest.mark.parametrize("version", ["", "v6"])
def test_another_version_of_an_external_server_pauses_the_rater(stage: Stage, version: str) -> None:
    workflow = submit(["a", "b"])
    stage.directory.known = "v6"
    with scripted(oip(1.0, 99.0, model_version="v7")) as server:
        stage.serve(server.url, version=version, managed=False)
        stage.rate()

    assert Rater.objects.get().paused_code == "model_version_changed"
    assert states(workflow) == ["PENDING", "PENDING"], "a score out of its scale is an answer too"
    assert not Rating.objects.exists()
    assert not FailedFlight.objects.exists()
    assert only(workflow).attempts == 0


# Leases


def outside(sql: str, *values: Any, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Run SQL from any thread, in a session of its own."""
    session = psycopg2.connect(**parameters)
    try:
        session.autocommit = True
        with session.cursor() as cursor:
            cursor.execute(sql, values)
            return cursor.fetchall() if cursor.description else []
    finally:
        session.close()


def session_parameters() -> dict[str, Any]:
    return {
        name: value
        for name, value in connection.get_connection_params().items()
        if name not in {"cursor_factory", "context"}
    }


def meanwhile(step: Step, do: Callable[[Seen], Any]) -> Step:
    """Do something while the server has the call."""

    def body(seen: Seen) -> bytes:
        do(seen)
        return step.body(seen) if callable(step.body) else step.body

    return Step(status=step.status, headers=step.headers, body=body)


def test_after_two_losses_items_run_singly_each_named_before_its_call(stage: Stage) -> None:
    workflow = submit(["a", "b", "c", "b"])
    Batch.objects.update(lost=2)
    parameters = session_parameters()
    named: list[tuple[list[str], int]] = []

    def look(seen: Seen) -> None:
        ((probing,),) = outside("SELECT probing FROM fulfillment_batch", parameters=parameters)
        named.append((asked(seen), probing))

    with scripted(meanwhile(oip(1.0), look)) as server:
        stage.serve(server.url)
        stage.rate()

    assert named == [(["a"], 0), (["b"], 1), (["c"], 2)]
    batch = only(workflow)
    assert (batch.state, batch.lost, batch.probing) == (BatchState.DONE, 0, None)
    assert set(states(workflow)) == {"COMPLETED"}


def test_one_loss_does_not_make_singles(stage: Stage) -> None:
    submit(["a", "b"])
    Batch.objects.update(lost=1)
    with scripted(oip(1.0, 2.0)) as server:
        stage.serve(server.url)
        stage.rate()

    assert len(server.seen) == 1


def test_the_item_that_kills_executors_is_found_and_its_neighbours_are_rated(
    stage: Stage,
) -> None:
    """Each executor that calls with `bad` dies; what it leaves is what the database has."""
    workflow = submit(["a", "bad", "c"])
    deaths = 0

    class Died(BaseException):
        pass

    def die(name: str) -> str:
        if name == "bad":
            raise Died
        return name

    with instant_oip() as url:
        stage.serve(url)
        for _ in range(12):
            messages = stage.send()
            if not messages:
                break
            for message in messages:
                with plugin(Fussy(prepares=die, says=good)), ExitStack() as stack:
                    stack.enter_context(pytest.MonkeyPatch.context()).setattr(
                        leases, "finish", _unless_died(leases.finish)
                    )
                    try:
                        stage.generator.rate(message.batches, task_id=uuid.uuid4())
                    except Died:
                        deaths += 1
            now = database_now() + timedelta(hours=1)
            ExecutorBoot.objects.update(heartbeat_at=now)
            leases.expire(now=now, trust_heartbeats=True)
            ExecutorBoot.objects.update(heartbeat_at=database_now())

    assert errors(workflow) == [None, "worker_lost", None]
    assert deaths == 3
    check_all()
    assert finished(workflow) == "PARTIAL"


def _unless_died(finish: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """A dead executor gives nothing back: drop what it would say on its way out."""

    def filtered(finishes: Sequence[leases.Finish]) -> list[int]:
        return finish([f for f in finishes if f.scored or f.failed])

    return filtered


def test_an_executor_that_lost_its_lease_stops_and_writes_nothing(stage: Stage) -> None:
    workflow = submit(["a", "b", "c", "d"])
    parameters = session_parameters()

    def lose(seen: Seen) -> None:
        outside("UPDATE fulfillment_batch SET fence = fence + 1", parameters=parameters)

    with scripted(refusal(422), meanwhile(oip(1.0, 2.0), lose), oip(1.0, 2.0)) as server:
        stage.serve(server.url)
        stage.rate()

    assert len(server.seen) == 2
    assert set(states(workflow)) == {"PENDING"}
    assert not Rating.objects.exists()
    assert not StatsDelta.objects.exists()
    assert only(workflow).state == BatchState.LEASED


def test_a_batch_that_was_started_before_a_pause_goes_on_to_its_end(stage: Stage) -> None:
    workflow = submit(["a", "b", "c", "d"])
    parameters = session_parameters()

    def pause(seen: Seen) -> None:
        outside("UPDATE fulfillment_workflow SET state = 3", parameters=parameters)

    with scripted(refusal(422), meanwhile(oip(1.0, 2.0), pause), oip(3.0, 4.0)) as server:
        stage.serve(server.url)
        stage.rate()

    assert len(server.seen) == 3
    assert set(states(workflow)) == {"COMPLETED"}
    counts_add_up(workflow)


def test_a_cancel_in_the_middle_stops_the_calls_and_keeps_the_ratings(stage: Stage) -> None:
    workflow = submit(["a", "b", "c", "d"])

    def cancel(seen: Seen) -> None:
        with threads(1) as pool:
            pool.submit(control.cancel, workflow_id=workflow.pk).result(10)

    with scripted(refusal(422), meanwhile(oip(1.0, 2.0), cancel), oip(3.0, 4.0)) as server:
        stage.serve(server.url)
        stage.rate()

    assert len(server.seen) == 2
    assert finished(workflow) == "CANCELLED"
    assert set(states(workflow)) == {"CANCELLED"}
    assert Rating.objects.count() == 2
    assert only(workflow).state == BatchState.DONE
    assert not flights()


def test_a_finish_is_repeated_when_the_database_goes_away(stage: Stage) -> None:
    workflow = submit(["a", "b"], batch_size=1)
    parameters = session_parameters()
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()

    def hang_up(seen: Seen) -> None:
        outside("SELECT pg_terminate_backend(%s)", pid, parameters=parameters)

    with scripted(meanwhile(oip(1.0), hang_up)) as server:
        stage.serve(server.url)
        stage.rate()

    assert set(states(workflow)) == {"COMPLETED"}
    assert Rating.objects.count() == 2
    counts_add_up(workflow)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        assert cursor.fetchone() != (pid,)


def test_a_lease_is_extended_when_the_database_went_away_before(stage: Stage) -> None:
    workflow = submit(["a", "bad"])
    parameters = session_parameters()

    def hang_up(seen: Seen) -> None:
        outside(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()",
            parameters=parameters,
        )

    with scripted(refusal(422), meanwhile(oip(1.0), hang_up), refusal(422)) as server:
        stage.serve(server.url)
        stage.rate()

    assert states(workflow) == ["COMPLETED", "FAILED"]
    assert len(server.seen) == 3


def test_an_unexpected_error_gives_the_batches_back_a_little_later(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    workflow = submit(["a"])

    def fail(*_: Any) -> Any:
        raise RuntimeError("a fault of ours")

    with instant_oip() as url:
        stage.serve(url)
        (message,) = stage.send()
        with monkeypatch.context() as patched:
            patched.setattr(stage.generator, "_spec", fail)
            with pytest.raises(RuntimeError):
                stage.generator.rate(message.batches, task_id=uuid.uuid4())
        batch = only(workflow)
        assert (batch.state, batch.boot_id) == (BatchState.DELAYED, None)
        stage.rate()

    assert states(workflow) == ["COMPLETED"]


def test_the_plug_ins_that_ship_are_found() -> None:
    assert load("oip_score").name == "oip_score"
