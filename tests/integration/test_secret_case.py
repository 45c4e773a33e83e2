"""The collected case X-08: a key that a server repeats is found nowhere.

From registration to a paused rater, with a trial and an error of ours on the way, then everything
that is kept or shown is searched: the database, logs, REST, the admin, the broker.
"""

import logging
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import current_app
from django.conf import settings as site_settings
from django.contrib.admin import site
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from pytest_django import Settings

from fulfillment.management.commands.dispatch import Publisher
from fulfillment.models import Rater
from models_admin.asking import Answer, Question
from models_admin.directory import EndpointData
from tests.collected_cases import case, load, rows, stub
from tests.judge_stage import TEMPLATE, Judge, judging

pytestmark = pytest.mark.django_db(transaction=True)

PATHS = [
    "/models", "/models/gpt", "/models/gpt/versions", "/models/gpt/address", "/pools", "/audit",
    "/raters", "/raters/judge", "/raters/judge/versions", "/webhook-endpoints", "/workflows",
]  # fmt: skip


@pytest.fixture
def publish() -> Iterator[Publisher]:
    """What the dispatcher sends with; the queue is empty before and after."""
    publisher = Publisher()
    with current_app.connection_for_read() as opened:
        channel: Any
        with opened.channel() as channel:
            channel.queue_purge("ratings")
            yield publisher
            channel.queue_purge("ratings")
    publisher.close()


@pytest.fixture
def judge() -> Iterator[Judge]:
    with judging() as made:
        yield made


def breaks(endpoint: EndpointData, question: Question, limit_s: float, now: object) -> Answer:
    """Be a bug with a secret at hand."""
    raise RuntimeError(f"it broke at {endpoint}")


def in_database() -> str:
    """Return all rows of all tables."""
    with connection.cursor() as cursor:
        found = []
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f'SELECT row_to_json(t)::text FROM "{table}" t')
            found += [row for (row,) in cursor.fetchall()]
    return "\n".join(found)


def in_broker() -> str:
    """Return all that the broker keeps."""
    opened: Any = redis.Redis.from_url(site_settings.REDIS_URL)
    readers = {
        b"list": lambda key: opened.lrange(key, 0, -1),
        b"hash": opened.hgetall,
        b"set": opened.smembers,
        b"zset": lambda key: opened.zrange(key, 0, -1),
        b"string": opened.get,
    }
    with opened:
        kept = [
            (key, readers[kind](key))
            for key in opened.scan_iter()
            if (kind := opened.type(key)) in readers
        ]
    return repr(kept)


def in_admin() -> str:
    """Return each list of the admin, and the page of each row."""
    User.objects.create(username="root", is_staff=True, is_superuser=True)
    browser = Client()
    browser.force_login(User.objects.get(username="root"))
    shown = [browser.get("/admin/").content.decode()]
    for model in site._registry:
        table = f"/admin/{model._meta.app_label}/{model._meta.model_name}/"
        pages = [table, *(f"{table}{pk}/change/" for pk in list(_keys(model))[:5])]
        for page in pages:
            response = browser.get(page, follow=True)
            assert response.status_code == 200, page
            shown.append(response.content.decode())
    return "\n".join(shown)


def _keys(model: Any) -> Any:
    return model._default_manager.order_by("pk").values_list("pk", flat=True)


def test_x_08_a_key_that_a_server_repeats_is_found_nowhere(
    judge: Judge, publish: Publisher, caplog: pytest.LogCaptureFixture, settings: Settings
) -> None:
    folder = case("X-08")
    expected = load(folder / "expected.json")["expect"]
    key, webhook_secret, in_url, key_hash = expected["needles"]
    caplog.set_level(logging.DEBUG)
    answers: list[Any] = []

    def post(path: str, body: Any = b"") -> Any:
        answers.append(judge.operator.post(path, body))
        return answers[-1]

    with stub(load(folder / "fault.json")) as server:
        model = {
            "id": "gpt", "kind": "external", "protocol": "openai", "model_name": "judge-7b",
            "url": server.url, "api_key": key, "headers": {"X-Key": f"{key}"},
        }  # fmt: skip
        refused = post("/models", {**model, "url": f"{server.url}/?key={in_url}"})
        assert post("/models", model).status_code == 201
        rater = {
            "id": "judge", "autorater": "llm_judge", "model": "gpt", "score_min": 0,
            "score_max": 4, "prompt_template": TEMPLATE,
        }  # fmt: skip
        assert post("/raters", rater).status_code == 201
        answers.append(
            judge.user.post(
                "/webhook-endpoints", {"url": "https://93.184.216.34/", "secret": webhook_secret}
            )
        )
        tried = post("/models/gpt/try", {"message": "hello"})
        ours = settings.AIRS_MODEL_TRIAL
        settings.AIRS_MODEL_TRIAL = f"{__name__}.breaks"
        broken = post("/models/gpt/try", {"message": "hello"})
        settings.AIRS_MODEL_TRIAL = ours
        (row,) = rows(folder / "row.jsonl").values()
        workflow = judge.submit({**row, "text": "a page"})
        sent = judge.send()
        publish(sent, 5)
        judge.generator.rate(sent, task_id=uuid.uuid4())
        broker = in_broker()

    paused = Rater.objects.get()
    assert refused.status_code == 422
    assert (paused.paused_code, broken.status_code) == ("unauthorized", 500)
    host = server.url.removeprefix("http://")
    for said in (paused.paused_detail, tried.json()["error"]["detail"]):
        assert "Invalid key" in said
        assert host in said
    assert "it broke at" in caplog.text
    assert sent
    assert str(sent[0][2]) in broker
    answers += [judge.operator.get(path) for path in PATHS]
    answers += [judge.user.get(f"/workflows/{workflow}{part}") for part in ("", "/ratings")]
    places = {
        "database": in_database(),
        "log": caplog.text + repr([vars(record) for record in caplog.records]),
        "REST": "\n".join(answer.getvalue().decode() for answer in answers),
        "admin": in_admin(),
        "broker": broker,
    }
    assert '"gpt"' in places["REST"]
    hits = [
        (needle, place)
        for needle in (key, webhook_secret, in_url, key_hash)
        for place, text in places.items()
        if needle in text
    ]
    assert hits == []
    assert expected["hits"] == 0
    assert f"…{key[-4:]}" in places["admin"]
