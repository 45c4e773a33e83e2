"""Checks of external models: what servers of each make make of them, and what follows."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from pytest_django import Settings

from fulfillment.clock import database_now
from fulfillment.models import Rater
from models_admin import checking, external, secrets, services, tasks
from models_admin.checking import Checked, Target
from models_admin.directory import LAST_RESORT_CALLS, directory
from models_admin.models import ExternalHealth, ModelConfig, ModelVersion
from models_admin.policy.health import BELIEVED, DOWN_AFTER, UP_AFTER, Finding, Sign
from tests.builders import Api
from tests.fake_servers import CHAT, MAKES, OIP, Life, Server, running
from tests.fakes import Step, closed_port, scripted
from tests.judge_stage import Judge, judging, row, says

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 1, 1, tzinfo=UTC)
STEP = external.PERIOD
QUICK = partial(checking.check, answer_s=0.3)


def register(url: str, model_id: str = "ext", **fields: Any) -> None:
    """Store a model as registering does, which would look at its server."""
    settings = {"protocol": "oip", "url": url, "model_name": "m", **fields}
    ModelConfig.objects.create(
        id=model_id, kind="external", created_at=NOW, updated_at=NOW, **settings
    )


def change(at: datetime, **fields: Any) -> None:
    ModelConfig.objects.update(updated_at=at, **fields)


def register_make(server: Server, **fields: Any) -> None:
    protocol = "oip" if server.make in OIP else "openai"
    register(server.url, protocol=protocol, model_name=server.model, **fields)


def check(*, times: int = 1, since: datetime = NOW, **how: Any) -> datetime:
    """Check all models so many times, a period apart; return when it was last."""
    for number in range(times):
        since += STEP
        assert external.run_once(since, **how) == ModelConfig.objects.count(), number
    return since


def health(model_id: str = "ext") -> ExternalHealth:
    return ExternalHealth.objects.get(pk=model_id)


def finding(sign: Sign, *, version: str = "") -> Any:
    """A check that finds this of every model."""

    def found(targets: Sequence[Target]) -> Mapping[str, Checked]:
        what = Finding(sign=sign, detail=sign.value, version=version)
        return {target.id: Checked(finding=what, latency_s=0.1) for target in targets}

    return found


def window(now: datetime) -> int:
    (replica,) = directory.replicas(now)
    return replica.window


# What servers say


@pytest.mark.parametrize("make", MAKES)
def test_a_server_of_each_make_goes_down_and_comes_back(make: str) -> None:
    with running(make) as server:
        register_make(server)
        last = check()
        assert (health().up, health().failures) == (True, 0), health().detail
        server.life = Life.LOADING
        last = check(times=DOWN_AFTER, since=last)
        assert health().up is False
        assert "503" in health().detail or "not ready" in health().detail
        server.life = Life.READY
        last = check(times=UP_AFTER, since=last)

    assert health().up is True
    assert not server.seen, "nothing is rated by a check"
    assert ModelConfig.objects.get().version == ("1" if make in ("triton", "mlserver") else "")


@pytest.mark.parametrize("make", CHAT)
def test_a_busy_or_failing_chat_server_is_up(make: str) -> None:
    with running(make) as server:
        register_make(server)
        for life in (Life.OVERLOADED, Life.BROKEN, Life.TOO_LONG):
            server.life = life
            ExternalHealth.objects.all().delete()
            check()
            assert health().up is True


@pytest.mark.parametrize(
    ("make", "life", "words"),
    [
        ("triton", Life.NO_KEY, "refuses our key (HTTP 401)"),
        ("kserve", Life.NO_KEY, "may not ask for this (HTTP 403)"),
        ("kserve", Life.NO_MODEL, "no model 'm' (HTTP 404)"),
        ("mlserver", Life.NO_MODEL, "no model 'm' (HTTP 404)"),
        ("vllm", Life.NO_KEY, "refuses our key (HTTP 401)"),
        ("vllm", Life.NO_MODEL, "lists no model 'org/judge-7b'; it has org/other"),
        ("sglang", Life.NO_MODEL, "lists no model 'org/judge-7b'; it has org/other"),
    ],
)
def test_a_wrong_key_or_name_is_named_and_lets_nothing_rest(
    make: str, life: Life, words: str
) -> None:
    with running(make) as server:
        server.life = life
        register_make(server, max_concurrency=9)
        last = check(times=DOWN_AFTER + 1)

    assert health().up is None
    assert words in health().detail
    assert window(last) == 9


def test_a_server_that_is_not_there_is_down_and_its_address_rests() -> None:
    with closed_port() as port:
        register(f"http://127.0.0.1:{port}", max_concurrency=9)
        last = check(times=DOWN_AFTER - 1)
        assert (health().up, window(last)) == (None, 9)
        last = check(since=last)

    assert (health().up, health().detail) == (False, "connection refused")
    assert window(last) == LAST_RESORT_CALLS
    assert window(last + BELIEVED + STEP) == 9, "whoever checks is away"


def test_a_name_that_does_not_resolve_is_said() -> None:
    register("http://no-such-host.invalid", protocol="openai")
    check()

    assert health().detail == "the name of its host does not resolve"


def test_a_slow_server_holds_up_no_other() -> None:
    drip = Step(body=b" " * 1_000, piece=1, every_s=0.05)
    with scripted(Step(hang=True)) as hung, scripted(drip) as slow, running("vllm") as good:
        for number in range(3):
            register(hung.url, f"hung-{number}")
        register(slow.url, "slow")
        register(good.url, protocol="openai", model_name=good.model)
        check(check=QUICK)

    assert health().up is True
    for model_id in ("hung-0", "hung-2", "slow"):
        assert health(model_id).detail == "no whole answer within 0.3 s"
        assert health(model_id).failures == 1
        assert health(model_id).latency_s < 2


def test_neither_a_redirect_nor_an_endless_body_nor_rubbish_is_followed() -> None:
    with scripted(Step()) as secret:
        away = Step(status=302, headers={"Location": secret.url})
        with (
            scripted(away) as redirecting,
            scripted(Step(endless=True)) as endless,
            scripted(Step(raw=b"SSH-2.0-x\r\n")) as other,
            scripted(Step(body=b"[" * 100_000)) as deep,
            scripted(Step(body=b"\x1f\x8b\x08", headers={"Content-Encoding": "gzip"})) as packed,
        ):
            register(redirecting.url, "redirecting")
            register(endless.url, "endless")
            register(other.url, "other")
            register(deep.url, "deep")
            register(packed.url, "packed")
            check()

    assert not secret.seen
    assert "redirects (HTTP 302)" in health("redirecting").detail
    assert "no answer that is HTTP" in health("other").detail
    for model_id in ("endless", "deep", "packed"):
        assert (health(model_id).up, health(model_id).detail) == (True, "the model is ready")
    assert ModelConfig.objects.filter(version="").count() == 5


def test_keys_are_sent_and_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    key = "sk-qa-0123456789abcdef"
    echo = Step(status=401, body=f'{{"error": "bad key {key}"}}'.encode())
    with scripted(echo) as server:
        register(server.url, api_key=secrets.seal(key))
        check(times=DOWN_AFTER)

    assert {seen.headers["authorization"] for seen in server.seen} == {f"Bearer {key}"}
    assert key not in health().detail + caplog.text


def test_a_server_that_lists_our_key_as_a_model_gives_it_away_to_nobody() -> None:
    with running("vllm") as server:
        key = server.model
        register(server.url, protocol="openai", api_key=secrets.seal(key))
        check()

    assert "it has ***" in health().detail
    assert key not in health().detail


def test_a_server_that_names_its_version_by_our_key_gives_it_away_to_nobody() -> None:
    with running("triton") as server:
        server.version = "sk-qa-0123456789abcdef"
        register_make(server, api_key=secrets.seal(server.version))
        check()

    assert ModelConfig.objects.get().version == ""
    assert not ModelVersion.objects.exists()


# Versions


def test_the_first_version_counts_and_another_one_is_noted_for_the_operator() -> None:
    with running("triton") as server:
        register_make(server)
        last = check()
        assert (ModelConfig.objects.get().version, ModelConfig.objects.get().reported) == ("1", "")
        server.version = "2"
        check(since=last)

    model = ModelConfig.objects.get()
    assert (model.version, model.reported) == ("1", "2")
    assert set(ModelVersion.objects.values_list("version", flat=True)) == {"1", "2"}


def test_what_was_asked_of_another_address_is_not_kept() -> None:
    register("http://127.0.0.1:9")

    def changing(targets: Sequence[Target]) -> Mapping[str, Checked]:
        change(NOW + STEP, url="http://127.0.0.1:8")
        return finding(Sign.GOOD, version="old")(targets)  # type: ignore[no-any-return]

    external.run_once(NOW + STEP, check=changing)

    assert not ExternalHealth.objects.exists()
    assert ModelConfig.objects.get().version == ""


def test_a_model_that_is_removed_meanwhile_has_no_health() -> None:
    register("http://127.0.0.1:9")

    def removing(targets: Sequence[Target]) -> Mapping[str, Checked]:
        ModelConfig.objects.all().delete()
        return finding(Sign.GOOD)(targets)  # type: ignore[no-any-return]

    external.run_once(NOW + STEP, check=removing)

    assert not ExternalHealth.objects.exists()


def test_a_changed_model_is_not_judged_by_what_was_found_before() -> None:
    register("http://127.0.0.1:9", max_concurrency=9)
    last = check(times=DOWN_AFTER, check=finding(Sign.BAD))
    assert window(last) == LAST_RESORT_CALLS

    change(last + timedelta(seconds=1), timeout_s=5.0)

    assert window(last + timedelta(seconds=1)) == 9
    check(since=last, check=finding(Sign.BAD))
    assert (health().up, health().failures) == (None, 1)


# When


def test_a_tick_that_comes_twice_counts_once() -> None:
    register("http://127.0.0.1:9")
    check(check=finding(Sign.BAD))

    assert external.run_once(NOW + STEP * 1.2, check=finding(Sign.BAD)) == 0
    assert health().failures == 1


def test_who_waited_for_a_later_check_does_not_set_it_back() -> None:
    register("http://127.0.0.1:9")
    later = check(times=2, check=finding(Sign.BAD))

    external.check_model("ext", later - STEP, check=finding(Sign.GOOD))
    assert health().checked_at == later
    external.check_model("ext", later - timedelta(hours=1), check=finding(Sign.GOOD))
    assert health().checked_at == later - timedelta(hours=1), "the clock was set back"


def test_who_finds_another_at_work_leaves_it_alone() -> None:
    register("http://127.0.0.1:9")
    other = connection.copy()
    try:
        with other.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(%s)", [external._LOCK])
        assert external.run_once(NOW + STEP, check=finding(Sign.BAD)) == 0
    finally:
        other.close()

    assert not ExternalHealth.objects.exists()


def test_who_asks_for_a_check_waits_for_the_one_that_runs() -> None:
    register("http://127.0.0.1:9")
    other = connection.copy()
    other.inc_thread_sharing()
    with other.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s)", [external._LOCK])
    ends = threading.Timer(0.1, other.close)
    ends.start()
    external.check_model("ext", NOW + STEP, check=finding(Sign.GOOD))
    ends.join()

    assert health().up is True


@pytest.mark.django_db(transaction=True)
def test_beat_has_models_checked_each_ten_seconds(settings: Settings) -> None:
    with running("vllm") as server:
        register_make(server)
        tasks.check_externals()

    assert health().up is True
    due = settings.CELERY_BEAT_SCHEDULE["externals"]
    assert due == {"task": tasks.check_externals.name, "schedule": STEP.total_seconds()}


def test_hosted_models_are_not_asked() -> None:
    services.register_model("mini", now=NOW, kind="hosted", checkpoint="tiny:0")

    assert external.run_once(NOW + STEP) == 0


# What people see


def test_the_api_shows_health_and_checks_at_once() -> None:
    operator, viewer = Api("olga", "operator"), Api("vera", "viewer")
    services.register_model("mini", now=NOW, kind="hosted", checkpoint="tiny:0")
    with running("vllm") as server:
        register_make(server)
        assert viewer.get("/models/ext").json()["health"] is None
        assert viewer.post("/models/ext/check").status_code == 403
        found = operator.post("/models/ext/check")

    assert (found.status_code, found.json()["state"]) == (200, "up")
    assert found.json()["detail"] == "it lists the model"
    assert viewer.get("/models/ext").json()["health"] == found.json()
    assert viewer.get("/models/mini").json()["health"] is None
    refused = operator.post("/models/mini/check")
    assert (refused.status_code, refused.json()["code"]) == (409, "not_external")
    assert operator.post("/models/none/check").status_code == 404


@pytest.mark.parametrize(("removed", "status"), [(True, 404), (False, 409)])
def test_a_model_that_is_changed_while_it_is_checked_has_no_answer(
    removed: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    register("http://127.0.0.1:9")

    def changing(model_id: str, now: datetime) -> None:
        if removed:
            ModelConfig.objects.all().delete()

    monkeypatch.setattr(external, "check_model", changing)

    assert Api("olga", "operator").post("/models/ext/check").status_code == status


def test_the_admin_shows_health() -> None:
    register("http://127.0.0.1:9")
    check(times=DOWN_AFTER, check=finding(Sign.BAD))
    browser = Client()
    browser.force_login(User.objects.create_superuser("root"))

    for page in ("modelconfig/", "modelconfig/ext/change/", "externalhealth/"):
        shown = browser.get(f"/admin/models_admin/{page}").content.decode()
        assert "down" in shown
        assert "bad" in shown


# What goes on


@pytest.fixture
def judge() -> Iterator[Judge]:
    with judging() as made:
        yield made


@pytest.mark.django_db(transaction=True)
def test_a_wrong_check_never_stops_work_and_pauses_nobody(judge: Judge) -> None:
    with scripted(says("3")) as server:
        judge.register(server)
        workflow = judge.submit(*(row(f"q{number}") for number in range(5)))
        now = database_now()
        for number in range(DOWN_AFTER):
            external.run_once(now + number * STEP, check=finding(Sign.BAD))
        assert health("gpt").up is False
        judge.work(passes=2)

    assert [rating["score"] for rating in judge.ratings(workflow)] == [3] * 5
    assert Rater.objects.get().paused_code == ""


@pytest.mark.parametrize(
    ("endpoint", "base"), [("", "/v2"), ("", "/v2/v1"), ("rerank", "/v2"), ("rerank", "/v1")]
)
def test_models_are_listed_where_calls_go(endpoint: str, base: str) -> None:
    """Hosted services that rank behind `/v2` list their models behind `/v1`."""
    with scripted(Step(status=404), Step(status=404)) as server:
        register(server.url + base, protocol="openai", endpoint=endpoint)
        check(check=QUICK)

    # The script's server does not tell of /v1/models.
    asked = {"/health"} if endpoint else {"/v2/health", "/v2/v1/models"}
    assert {seen.path for seen in server.seen} == asked
