"""The duty cycle over time: by REST and on pages of the admin."""

import re
from datetime import datetime, timedelta
from typing import Any
from xml.etree import ElementTree

import pytest
from django.contrib.auth.models import User
from django.test import Client

from fulfillment import tokens
from models_admin import duty_history, services
from models_admin.clock import database_now
from models_admin.duty_history import Span
from models_admin.models import AcceleratorPool, ReplicaSample, UtilizationSample
from tests.builders import NOW

pytestmark = pytest.mark.django_db

MINUTE = timedelta(minutes=1)
SPAN = Span(since=NOW, until=NOW + 60 * MINUTE, step=10 * MINUTE)


@pytest.fixture(autouse=True)
def _registered() -> None:
    services.register_pool(AcceleratorPool(id="box", devices=8), actor="qa")
    for name in ("mini", "big"):
        services.register_model(name, now=NOW, kind="hosted", checkpoint="tiny:0", pool="box")


def sample(model: str, at: datetime, busy_s: float, lived_s: float, devices: int = 1) -> None:
    UtilizationSample.objects.create(
        at=at, agent="local", model_id=model, pool_id="box", replicas=1, busy_s=busy_s,
        replica_s=lived_s, devices=devices,
    )  # fmt: skip


def of_replica(ordinal: int, at: datetime, busy_s: float, agent: str = "local") -> None:
    ReplicaSample.objects.create(
        at=at, agent=agent, model_id="mini", pool_id="box", ordinal=ordinal, busy_s=busy_s,
        lived_s=30.0,
    )  # fmt: skip


def get(path: str) -> tuple[int, Any]:
    _, secret = tokens.issue(user="qa", role="viewer", expires_at=None, now=NOW)
    response = Client(headers={"Authorization": f"Bearer {secret}"}).get(f"/api/v1/{path}")
    return response.status_code, response.json()


def test_a_sample_counts_for_the_step_that_it_is_of() -> None:
    for minutes, busy_s in ((0, 9.0), (5, 3.0), (10, 6.0), (10.5, 0.0), (40, 30.0), (60, 1.0)):
        sample("mini", NOW + minutes * MINUTE, busy_s, 30.0)
    sample("mini", NOW + 61 * MINUTE, 30.0, 30.0)

    line = duty_history.of_model("mini", SPAN)

    # The sample at the begin is of the time before; where nothing was sampled, nothing is told.
    assert [((b.at - NOW) / MINUTE, b.busy_s, b.replica_s, b.duty) for b in line] == [
        (0, 9.0, 60.0, 0.15),
        (10, 0.0, 30.0, 0.0),
        (30, 30.0, 30.0, 1.0),
        (50, 1.0, 30.0, pytest.approx(1 / 30)),
    ]


def test_no_step_is_busier_than_all_of_its_time() -> None:
    sample("mini", NOW + MINUTE, 31.0, 30.0)

    (bucket,) = duty_history.of_model("mini", SPAN)

    assert (bucket.busy_s, bucket.duty) == (31.0, 1.0)


def test_steps_begin_at_the_same_instants_whenever_it_is_asked() -> None:
    spans = [
        Span.ending(NOW + minutes * MINUTE, timedelta(hours=1), 15 * MINUTE)
        for minutes in (0, 1, 14, 15)
    ]

    assert [(span.since - NOW) / MINUTE for span in spans] == [-60, -60, -60, -45]


def test_a_replica_counts_in_its_pool_as_often_as_it_holds_devices() -> None:
    sample("mini", NOW + MINUTE, 0.0, 30.0)
    sample("big", NOW + MINUTE, 30.0, 30.0, devices=4)
    sample("gone", NOW + MINUTE, 0.0, 30.0)

    models = duty_history.of_models("box", SPAN)

    assert {name: line[0].duty for name, line in models.items()} == {
        "big": 1.0, "gone": 0.0, "mini": 0.0,
    }  # fmt: skip
    (bucket,) = duty_history.together(models.values())
    assert (bucket.busy_s, bucket.replica_s, bucket.device_s) == (30.0, 90.0, 180.0)
    assert bucket.duty == pytest.approx(4 / 6)


def test_a_replica_has_one_line_through_all_its_runs_and_the_longest_lived_are_kept() -> None:
    for ordinal, busy_s in ((0, 10.0), (0, 20.0), (1, 3.0)):
        of_replica(ordinal, NOW + MINUTE, busy_s)
    of_replica(0, NOW + MINUTE, 6.0, agent="other")

    lines = duty_history.of_replicas("mini", SPAN)

    assert {key: line[0].duty for key, line in lines.items()} == {
        ("local", 0): 0.5, ("local", 1): 0.1, ("other", 0): 0.2,
    }  # fmt: skip
    assert list(duty_history.longest(lines, 1)) == [("local", 0)]


def test_rest_tells_of_a_model_and_its_replicas() -> None:
    now = database_now()
    sample("mini", now, 15.0, 60.0)
    for ordinal, busy_s in ((0, 15.0), (1, 0.0)):
        of_replica(ordinal, now, busy_s)

    status, told = get("models/mini/utilisation?hours=2&step=600")

    assert status == 200
    assert (told["model"], told["step_s"]) == ("mini", 600.0)
    (bucket,) = told["items"]
    assert (bucket["busy_s"], bucket["replica_s"], bucket["duty"]) == (15.0, 60.0, 0.25)
    assert [(r["agent"], r["ordinal"], r["items"][0]["duty"]) for r in told["replicas"]] == [
        ("local", 0, 0.5),
        ("local", 1, 0.0),
    ]
    assert get("models/big/utilisation")[1]["items"] == []


def test_rest_tells_of_a_pool_and_its_models() -> None:
    now = database_now()
    sample("mini", now, 0.0, 30.0)
    sample("big", now, 30.0, 30.0, devices=4)

    status, told = get("pools/box/utilisation")

    assert status == 200
    # Without a step a day has some hundred.
    assert (told["pool"], told["step_s"]) == ("box", 900.0)
    assert told["duty"] == {"hour": 0.8, "day": 0.8}
    (bucket,) = told["items"]
    assert (bucket["device_s"], bucket["duty"]) == (150.0, 0.8)
    assert {m["model"]: m["items"][0]["duty"] for m in told["models"]} == {"big": 1.0, "mini": 0.0}


@pytest.mark.parametrize("path", ["models/mini", "pools/box"])
@pytest.mark.parametrize(
    ("query", "fields"),
    [
        ("hours=0", ["hours"]),
        ("hours=1.5&step=x", ["hours", "step"]),
        ("hours=745", ["hours"]),
        ("step=29", ["step"]),
        ("hours=24&step=60", ["step"]),
        ("days=2", ["days"]),
    ],
)
def test_rest_says_what_cannot_be_asked(path: str, query: str, fields: list[str]) -> None:
    status, problem = get(f"{path}/utilisation?{query}")

    assert status == 422
    assert [error["field"] for error in problem["errors"]] == fields
    if query.endswith("step=60"):
        assert "from 173 s it does not" in problem["errors"][0]["detail"]


def test_rest_knows_only_what_is_registered() -> None:
    assert get("models/nobody/utilisation")[0] == get("pools/nobody/utilisation")[0] == 404


@pytest.fixture
def browser() -> Client:
    client = Client()
    client.force_login(User.objects.create(username="op", is_staff=True, is_superuser=True))
    return client


def charts_of(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg xmlns.*?</svg>", page)]


def test_pages_of_a_model_and_of_a_pool_draw_hours_and_days(browser: Client) -> None:
    now = database_now()
    for hours in (1, 50):
        sample("mini", now - timedelta(hours=hours), 15.0, 30.0)
        of_replica(0, now - timedelta(hours=hours), 15.0)

    model = browser.get("/admin/models_admin/modelconfig/mini/change/").content.decode()
    pool = browser.get("/admin/models_admin/acceleratorpool/box/change/").content.decode()
    idle = browser.get("/admin/models_admin/modelconfig/big/change/").content.decode()

    for page, names in ((model, ["mini", "replica 0"]), (pool, ["pool box", "mini"])):
        of_hours, of_days = charts_of(page)
        for chart, bars in ((of_hours, 1), (of_days, 2)):
            assert [t.text for t in chart.iter() if t.get("class") == "name"] == names
            drawn = [p.get("d", "") for p in chart.iter() if p.get("class") == "bars"]
            assert [d.count("M") for d in drawn] == [bars, bars]
        assert page.count("<td>50%</td>") == 2 * 3
    assert charts_of(idle) == []
    assert "Nothing was sampled." in idle


def test_the_list_of_pools_says_how_busy_they_were(browser: Client) -> None:
    sample("mini", database_now(), 0.0, 30.0)
    sample("big", database_now(), 30.0, 30.0, devices=4)

    page = browser.get("/admin/models_admin/acceleratorpool/").content.decode()

    assert "80% / 80%" in page
