"""Windows: granted calls, falling back when model management is silent, and new leaders."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import orjson
import pytest
from django.test import Client
from pytest_django import Settings

from fulfillment import bell, dispatch, windows
from fulfillment.clock import database_now
from fulfillment.model_directory import LastKnown
from fulfillment.models import Batch, Rater, SendWindow, Workflow
from fulfillment.policy import traffic
from fulfillment.policy.lifecycle import BatchState
from fulfillment.policy.priority import PriorityClass
from tests import builders
from tests.builders import Api
from tests.executor_stage import Stage, staged
from tests.fakes import Step, instant_oip, scripted
from tests.rating_queue import (
    Fleet,
    Queue,
    Replica,
    batches,
    boot,
    queue,
    rater,
    requests,
    states,
    submit,
)

pytestmark = pytest.mark.django_db
with_commits = pytest.mark.django_db(transaction=True)

CHAT = Replica(key="ext-chat", window=30, protocol="openai", managed=False)
TEMPLATE = "{query_text}"


def names(count: int, prefix: str = "n") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def leased(workflow: Workflow) -> list[int]:
    """Return the calls granted to each leased batch."""
    return [b.calls for b in batches(workflow) if b.state == BatchState.LEASED]


# Granted calls


def test_a_chat_batch_is_as_many_calls_as_it_has_items_or_as_there_is_room() -> None:
    boot(slots=100)
    workflow = submit(names(48), batch_size=12)
    dispatcher = queue(CHAT)

    first, second = dispatcher.run(), dispatcher.run()

    assert leased(workflow) == [12, 12, 6]
    assert (first.sent, first.calls, second.sent) == (3, 36, 0)


def test_an_oip_batch_is_one_call() -> None:
    boot(slots=100)
    workflow = submit(names(48), batch_size=12)

    queue(replace(CHAT, protocol="oip", window=3)).run()

    assert leased(workflow) == [1, 1, 1]


def test_what_is_left_of_batches_fills_the_room_in_further_passes() -> None:
    boot(slots=100)
    workflow = submit(names(60), batch_size=12)
    Batch.objects.update(open_mask=0b1)
    dispatcher = queue(CHAT)

    done = dispatcher.run()
    passes = 1
    while done.full:
        done, passes = dispatcher.run(), passes + 1

    assert leased(workflow) == [1] * 5
    assert passes <= 3


def test_raters_of_one_model_share_its_calls() -> None:
    boot(slots=100)
    one = submit(names(12, "a"), of=rater("one"))
    two = submit(names(60, "b"), of=rater("two"), batch_size=12)

    queue(CHAT).run()

    assert sum(leased(one)) + sum(leased(two)) == 30


def test_granted_calls_count_until_the_lease_ends() -> None:
    boot(slots=100)
    submit(names(12, "a"))
    dispatcher = queue(replace(CHAT, window=12))
    dispatcher.run()
    later = submit(names(12, "b"))

    assert dispatcher.run().sent == 0
    Batch.objects.filter(state=BatchState.LEASED).update(
        state=BatchState.DONE, open_mask=0, lease_until=None
    )
    assert dispatcher.run().sent == 1
    assert leased(later) == [12]


@pytest.fixture
def chat_stage() -> Iterator[Stage]:
    with staged(autorater="llm_judge", protocol="openai", prompt_template=TEMPLATE) as made:
        yield made


def says(text: str) -> bytes:
    message = {"role": "assistant", "content": text}
    answer = {"model": "1", "choices": [{"message": message, "finish_reason": "stop"}]}
    made: bytes = orjson.dumps(answer)
    return made


@with_commits
@pytest.mark.parametrize("window", [1, 3])
def test_an_executor_makes_no_more_calls_at_once_than_its_lease_grants(
    chat_stage: Stage, window: int
) -> None:
    workflow = submit(names(9))
    with scripted(Step(body=says("3"), every_s=0.02, piece=20)) as server:
        chat_stage.serve(server.url)
        (replica,) = chat_stage.dispatcher.fleet.live
        chat_stage.dispatcher.fleet.live = [replace(replica, window=window)]
        chat_stage.rate()

    assert {r.score for r in requests(workflow)} == {3.0}
    assert len(server.seen) == 9
    assert server.connections == window, "each call at once needs a connection of its own"


# max_qps


def test_a_chat_batch_is_paid_for_call_by_call() -> None:
    boot(slots=100)
    submit(names(24), of=rater(max_qps=4), batch_size=12)
    dispatcher = queue(CHAT)
    now = database_now()

    def sent_at(second: float) -> int:
        return dispatch.run_once(
            now + timedelta(seconds=second),
            memory=dispatcher.memory,
            directory=dispatcher.fleet,
            publish=lambda batches, priority: None,
        ).sent

    assert sent_at(0) == 1
    assert sent_at(1) == sent_at(2) == 0
    assert sent_at(2.3) == 1, "twelve calls take 3 s at 4 a second; one second's worth was saved"


def test_further_calls_are_paid_for_afterwards() -> None:
    boot(slots=100)
    submit(names(10), of=rater(max_qps=5), batch_size=1)
    dispatcher = queue()
    assert dispatcher.run().sent == 5
    now = database_now()

    dispatch.observe(dispatcher.memory, [{"rater": builders.RATER, "further": 10}], now)

    bucket = dispatcher.memory.buckets[builders.RATER]
    assert bucket.calls == pytest.approx(-10)
    for second, sent in ((1, 0), (2, 0), (2.5, 2)):
        done = dispatch.run_once(
            bucket.filled_at + timedelta(seconds=second),
            memory=dispatcher.memory,
            directory=dispatcher.fleet,
            publish=lambda batches, priority: None,
        )
        assert done.sent == sent


@with_commits
def test_an_executor_keeps_the_pace_within_a_batch_and_tells_what_was_not_foreseen() -> None:
    with (
        staged(max_qps=5.0) as stage,
        scripted(Step(status=422), Step(status=422)) as server,
    ):
        submit(["a", "b", "c"])
        bell.listen(timeout_s=0.01)
        stage.serve(server.url)
        began_at = database_now()
        stage.rate()
        took = database_now() - began_at

    calls = len(server.seen)
    assert calls == 5
    assert took >= timedelta(seconds=(calls - 1) / 5)
    (told,) = [signal for signal in bell.listen(timeout_s=1) if "rater" in signal]
    assert told == {"rater": builders.RATER, "further": calls - 1}


# Model management away


class Away:
    """A directory that can be unreachable."""

    def __init__(self, *live: Replica) -> None:
        self.live: list[Replica] = list(live)
        self.reachable = True

    def describe(self, model_id: str) -> None:
        return None

    def replicas(self, now: datetime) -> Sequence[Replica]:
        if not self.reachable:
            raise ConnectionError("no model management")
        return list(self.live)


def test_dispatch_goes_on_to_the_last_known_addresses_when_model_management_is_away() -> None:
    boot(slots=100, age_s=-60)  # it lives on through what follows
    now = database_now()
    away = Away(Replica(window=4, seen_at=now))
    known = LastKnown(away)
    dispatcher = Queue(fleet=Fleet())
    submit(names(20), batch_size=1)

    def run(later: timedelta) -> int:
        return dispatch.run_once(
            now + later,
            memory=dispatcher.memory,
            directory=known,
            publish=lambda batches, priority: None,
        ).sent

    assert run(timedelta()) == 4
    assert not dispatcher.memory.windows.open
    away.reachable = False
    Batch.objects.filter(state=BatchState.LEASED).update(
        state=BatchState.DONE, open_mask=0, lease_until=None
    )
    assert run(timedelta(seconds=29)) == 4
    assert not dispatcher.memory.windows.open, "its last word still counts"
    Batch.objects.filter(state=BatchState.LEASED).update(
        state=BatchState.DONE, open_mask=0, lease_until=None
    )
    overload = {
        "replica": "r1", "cls": int(PriorityClass.MIDDLE), "succeeded": 0, "overloaded": 1,
    }  # fmt: skip
    assert run(timedelta(seconds=31)) == 4
    assert dispatcher.memory.windows.used["r1"][1] == windows.SILENT
    dispatch.observe(dispatcher.memory, [overload], now + timedelta(seconds=32))
    assert dispatcher.memory.windows.open["r1"].limits[PriorityClass.MIDDLE] == 4 * 0.7
    away.reachable = True
    away.live = [Replica(window=4, seen_at=now + timedelta(seconds=40))]
    Batch.objects.filter(state=BatchState.LEASED).update(
        state=BatchState.DONE, open_mask=0, lease_until=None
    )
    assert run(timedelta(seconds=41)) == 4, "model management is back, and its window"


def test_nothing_is_known_of_a_directory_that_was_never_reached() -> None:
    away = Away(Replica())
    away.reachable = False

    assert not LastKnown(away).replicas(database_now())


def test_an_isolated_rater_finds_the_window_of_a_hosted_model_by_itself() -> None:
    boot(slots=100)
    submit(names(4), of=rater(mode="isolated"), batch_size=1)
    dispatcher = queue(Replica(window=2))

    dispatcher.run()

    assert dispatcher.memory.windows.used["r1"][1] == windows.ISOLATED
    assert dispatcher.memory.windows.open["r1"].ceiling == 2


@with_commits
def test_an_executor_goes_on_with_the_last_known_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(replica_key: str) -> Any:
        raise ConnectionError("no model management")

    with staged() as stage, instant_oip() as url:
        first = submit(["a"])
        stage.serve(url)
        stage.rate()
        monkeypatch.setattr(stage.directory, "endpoint", unreachable)
        monkeypatch.setattr("workers.rating_generator.ENDPOINT_MEMORY_S", 0.0)
        second = submit(["b"])
        stage.rate()
        stage.generator._endpoints.clear()
        third = submit(["c"])
        stage.rate()

    assert states(first) == states(second) == ["COMPLETED"]
    assert states(third) == ["PENDING"], "nothing is known of it"
    (batch,) = batches(third)
    assert (batch.state, batch.attempts) == (BatchState.DELAYED, 0)


# New leaders


def shrunk(now: datetime) -> windows.Windows:
    """Return the windows of a leader whose external model is overloaded."""
    dispatcher = queue(replace(CHAT, window=20))
    boot(slots=100)
    submit(names(40), batch_size=1)
    dispatcher.run()
    overload = {
        "replica": CHAT.key, "cls": int(PriorityClass.LOW), "succeeded": 0, "overloaded": 1,
    }  # fmt: skip
    dispatch.observe(dispatcher.memory, [overload], now)
    return dispatcher.memory.windows


def test_a_new_leader_goes_on_with_the_windows_of_the_old_one() -> None:
    now = database_now()
    old = shrunk(now)
    windows.remember(old, now)

    new = windows.recall(now + timedelta(minutes=4))

    assert new.open[CHAT.key].limits == old.open[CHAT.key].limits == (20, 20, 14, 14)
    assert new.open[CHAT.key].dropped_at == old.open[CHAT.key].dropped_at
    assert not old.used, "it is written again when it is used again"


def test_what_was_written_long_ago_is_learned_anew() -> None:
    now = database_now()
    windows.remember(shrunk(now), now)

    assert not windows.recall(now + windows.RECALLED + timedelta(seconds=1)).open


def test_a_window_that_nobody_uses_is_forgotten() -> None:
    now = database_now()
    windows.remember(shrunk(now), now)

    windows.remember(windows.Windows(), now + windows.FORGOTTEN + timedelta(seconds=1))

    assert not SendWindow.objects.exists()


def test_writing_a_window_twice_keeps_the_last() -> None:
    now = database_now()
    learned = shrunk(now)
    windows.remember(learned, now)
    learned.open[CHAT.key] = traffic.open_window(20)
    learned.used[CHAT.key] = (CHAT.model_id, windows.EXTERNAL)

    windows.remember(learned, now)

    assert SendWindow.objects.get().limits == [20, 20, 20, 20]


# What people see


def test_a_rater_shows_the_windows_of_its_model(settings: Settings) -> None:
    builders.use_plugins(settings)
    now = database_now()
    windows.remember(shrunk(now), now)

    shown = Api().get(f"/raters/{builders.RATER}").json()
    listed = Api("bob").get("/raters").json()["items"]

    (window,) = shown["windows"]
    assert window["reason"] == "external"
    assert (window["replica"], window["ceiling"]) == (CHAT.key, 20)
    assert window["limits"] == {"high": 20, "middle": 20, "low": 14, "best_effort": 14}
    assert listed[0]["windows"] == shown["windows"]
    assert Rater.objects.count() == 1


def test_readiness_says_that_model_management_is_silent() -> None:
    SendWindow.objects.create(
        replica="ms-1-1",
        model_id="m",
        ceiling=4,
        limits=[4.0] * 4,
        dropped_at=[None] * 4,
        reason=windows.SILENT,
        written_at=database_now(),
    )

    checks = Client().get("/readyz").json()["checks"]

    assert checks["models"]["ok"]
    assert checks["models"]["detail"].startswith("model_management_silent: 1 ")
