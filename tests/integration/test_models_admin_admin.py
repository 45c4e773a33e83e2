"""The hosting pages of the admin, through the test client."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from models_admin import services
from models_admin.clock import database_now
from models_admin.models import (
    AcceleratorPool,
    ModelConfig,
    ModelServer,
    ModelVersion,
    PoolOutlook,
    RebalanceDecision,
    ReplicaSample,
    UtilizationSample,
)
from models_admin.policy.replicas import ServerState
from tests.fakes import Step, scripted

pytestmark = pytest.mark.django_db

TINY: Any = {"kind": "hosted", "checkpoint": "tiny:0"}
NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = "sk-qa-0123456789abcdef"
LIST = "/admin/models_admin/modelconfig/"
AGO = re.compile(r'<td class="field-seen">[^<]*</td>')
SCRIPT = "<script>window.__qa=1</script>"

HOSTED = {
    "id": "mini",
    "kind": "hosted",
    "protocol": "oip",
    "model_name": "mini",
    "timeout_s": "60",
    "url": "",
    "max_concurrency": "16",
    "version_label": "",
    "pool": "",
    "loader": "bert_encoder",
    "checkpoint": "tiny:0",
    "serving": "{}",
    "devices_per_replica": "1",
    "replicas_min": "0",
    "replicas_default": "1",
    "replicas_max": "1",
    "window": "16",
    "new_api_key": "",
    "new_headers": "",
}
EXTERNAL = HOSTED | {
    "id": "ext",
    "kind": "external",
    "url": "http://127.0.0.1:9",
    "loader": "",
    "checkpoint": "",
}


@pytest.fixture
def operator() -> User:
    return User.objects.create(username="operator", is_staff=True, is_superuser=True)


@pytest.fixture
def browser(operator: User) -> Client:
    client = Client()
    client.force_login(operator)
    return client


def change_page(model_id: str) -> str:
    return f"{LIST}{model_id}/change/"


def page(browser: Client, path: str) -> str:
    response = browser.get(path)
    assert response.status_code == 200, path
    return response.content.decode()


def errors(response: Any) -> dict[str, list[str]]:
    assert response.status_code == 200, "the form was taken"
    return dict(response.context["adminform"].form.errors)


def act(browser: Client, name: str, *ids: str, **more: str) -> str:
    """Confirm an act; return the page that says what became of it."""
    chosen = {"action": name, "_selected_action": ids}
    response = browser.post(LIST, chosen | {"confirmed": "yes"} | more, follow=True)
    assert response.status_code == 200
    return response.content.decode()


def test_a_hosted_model_is_registered_through_the_form(browser: Client) -> None:
    AcceleratorPool.objects.create(id="box", devices=2)

    response = browser.post(f"{LIST}add/", HOSTED | {"pool": "box"})

    assert response.status_code == 302
    model = ModelConfig.objects.get()
    assert (model.id, model.pool_id, model.checkpoint) == ("mini", "box", "tiny:0")
    assert model.version.startswith("tiny-0")
    assert LogEntry.objects.get().object_id == "mini"


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (HOSTED | {"checkpoint": "../x"}, "checkpoint"),
        (HOSTED | {"checkpoint": "/etc/passwd"}, "checkpoint"),
        (HOSTED | {"url": "http://x"}, "url"),
        (HOSTED | {"protocol": "openai"}, "protocol"),
        (HOSTED | {"replicas_min": "2"}, "replicas_default"),
        (HOSTED | {"serving": '{"exec": 1}'}, "serving"),
        (HOSTED | {"serving": "[]"}, "serving"),
        (HOSTED | {"pool": "box", "devices_per_replica": "2"}, "pool"),
        (EXTERNAL | {"url": "file:///etc/passwd"}, "url"),
        (EXTERNAL | {"url": "http://host/?key=a"}, "url"),
        (EXTERNAL | {"new_api_key": "env:A B"}, "new_api_key"),
        (EXTERNAL | {"new_headers": '{"Host": "x"}'}, "new_headers"),
        (EXTERNAL | {"new_headers": '{"X": 1}'}, "new_headers"),
        (EXTERNAL | {"id": "taken"}, "id"),
    ],
)
def test_what_cannot_work_is_said_at_its_field(
    browser: Client, form: dict[str, str], field: str
) -> None:
    AcceleratorPool.objects.create(id="box", devices=1)
    services.register_model("taken", now=NOW, kind="hosted", checkpoint="tiny:0")

    response = browser.post(f"{LIST}add/", form)

    assert field in errors(response)
    assert ModelConfig.objects.count() == 1


def test_secrets_are_written_and_never_shown(browser: Client) -> None:
    headers = f'{{"X-Key": "{KEY}"}}'
    browser.post(f"{LIST}add/", EXTERNAL | {"new_api_key": KEY, "new_headers": headers})

    shown = page(browser, change_page("ext")) + page(browser, LIST)
    history = page(browser, f"{LIST}ext/history/")

    model = ModelConfig.objects.get()
    assert KEY not in model.api_key + str(model.headers)
    assert "…cdef" in shown
    for text in [shown, history]:
        assert KEY not in text
        assert model.api_key not in text


def test_a_refused_form_does_not_send_the_secret_back(browser: Client) -> None:
    secrets = {"new_api_key": KEY, "new_headers": f'{{"X-Key": "{KEY}"}}'}

    response = browser.post(f"{LIST}add/", EXTERNAL | {"url": "x"} | secrets)

    assert "url" in errors(response)
    assert KEY not in response.content.decode()


def test_a_secret_stays_until_it_is_replaced_or_removed(browser: Client) -> None:
    browser.post(f"{LIST}add/", EXTERNAL | {"new_api_key": KEY})

    browser.post(change_page("ext"), EXTERNAL | {"timeout_s": "5"})
    kept = ModelConfig.objects.get()
    browser.post(change_page("ext"), EXTERNAL | {"drop_api_key": "on"})

    assert (kept.timeout_s, bool(kept.api_key)) == (5.0, True)
    assert ModelConfig.objects.get().api_key == ""


def test_start_stop_and_restart_report_what_happened_and_are_logged(browser: Client) -> None:
    services.register_model("mini", now=NOW, kind="hosted", checkpoint="tiny:0")
    services.register_model(
        "ext", now=NOW, kind="external", url="http://127.0.0.1:9", model_name="m"
    )

    started = act(browser, "start", "mini", "ext")
    assert "Started mini." in started
    assert "is external" in started
    assert ModelConfig.objects.get(pk="mini").started

    assert "Restarted mini." in act(browser, "restart", "mini")
    assert "Stopped mini." in act(browser, "stop", "mini")
    assert "is not started" in act(browser, "restart", "mini")

    model = ModelConfig.objects.get(pk="mini")
    assert (model.started, model.restart_generation) == (False, 1)
    logged = LogEntry.objects.order_by("pk").values_list("object_id", "change_message")
    assert list(logged) == [
        ("mini", "Started mini."),
        ("mini", "Restarted mini."),
        ("mini", "Stopped mini."),
    ]


def test_an_act_is_confirmed_on_a_page_that_says_what_it_does(browser: Client) -> None:
    services.register_model("mini", now=NOW, replicas_max=3, **TINY)

    from_list = browser.post(LIST, {"action": "stop", "_selected_action": ["mini"]})
    from_page = page(browser, f"{LIST}mini/act/resize/")

    for text in ("finish what they have and end", "0 of 0 ready", 'name="confirmed"'):
        assert text in from_list.content.decode()
    for text in ("leaves them alone for an hour", 'name="replicas"', f'"{change_page("mini")}"'):
        assert text in from_page
    assert browser.get(f"{LIST}mini/act/explode/").status_code == 404
    assert browser.get(f"{LIST}none/act/stop/").status_code == 404


def test_a_model_is_resized_and_what_cannot_be_is_said(browser: Client) -> None:
    services.register_model("mini", now=NOW, replicas_max=3, **TINY)

    done = act(browser, "resize", "mini", replicas="3", back=change_page("mini"))
    too_many = act(browser, "resize", "mini", replicas="4")
    no_number = act(browser, "resize", "mini", replicas="many", back="//evil.example/")

    assert ModelConfig.objects.get().wanted_replicas == 3
    assert "Resized mini." in done
    assert 'id="modelconfig_form"' in done
    assert "Not done to mini: replicas: from 0 to 3" in too_many
    assert "Enter a whole number" in no_number
    assert "evil" not in no_number


def test_the_page_of_a_model_shows_its_replicas_and_offers_what_can_be_done(
    browser: Client,
) -> None:
    model, _ = services.register_model("mini", now=NOW, **TINY)
    services.register_model(
        "ext", now=NOW, kind="external", url="http://127.0.0.1:9", model_name="m"
    )
    ModelServer.objects.create(
        model=model, agent="local", ordinal=0, state=ServerState.READY, address="http://127.0.0.1:1",
        pid=4711, version="v-1", starts=3, failures=2, ready_at=NOW, queue_rows=17,
        heartbeat_at=NOW + timedelta(seconds=100), busy_seconds=42.0, last_error=SCRIPT,
        reason="serves", host="box-1", devices=[2, 5], log_tail=f"loading {SCRIPT}",
    )  # fmt: skip

    ReplicaSample.objects.create(
        at=database_now(), agent="local", model_id="mini", ordinal=0, busy_s=11.1, lived_s=30.0
    )

    shown, external = page(browser, change_page("mini")), page(browser, change_page("ext"))
    live = page(browser, f"{LIST}mini/replicas/")

    for text in ("READY", "serves", "4711", "v-1", "42%", ">17<", "2, failed 2 times in a row"):
        assert text in live
    for text in ("box-1 4711", "2, 5", ">37%<", "loading &lt;script&gt;"):
        assert text in live
    # Two looks may lie on two sides of a second.
    assert AGO.sub("", live) in AGO.sub("", shown)
    assert SCRIPT not in live
    for name in ("start", "stop", "restart", "resize"):
        assert f"{LIST}mini/act/{name}/" in shown
        assert f"/act/{name}/" not in external
    assert "/act/accept_version/" in external
    assert 'id="replicas"' not in external
    assert browser.get(f"{LIST}ext/replicas/").status_code == 404


def test_an_old_version_is_retired_from_the_page_of_its_model(browser: Client) -> None:
    services.register_model("mini", now=NOW, **TINY)
    old = ModelVersion.objects.create(
        model_id="mini", version="v-old", checkpoint="tiny:9", state="retiring", first_seen_at=NOW,
        reason="work waits for it",
    )  # fmt: skip
    address = f"/admin/models_admin/modelversion/{old.pk}/act/retire/"

    shown, asked = page(browser, change_page("mini")), page(browser, address)
    done = browser.post(
        "/admin/models_admin/modelversion/",
        {
            "action": "retire",
            "_selected_action": [old.pk],
            "confirmed": "yes",
            "back": change_page("mini"),
        },
        follow=True,
    ).content.decode()

    assert f'href="{address}"' in shown
    assert "work waits for it" in shown
    assert "retiring work waits for it" in asked
    assert "Retired mini: v-old." in done
    assert 'id="modelconfig_form"' in done
    old.refresh_from_db()
    assert old.is_withdrawn


def test_who_may_only_look_cannot_start() -> None:
    viewer = User.objects.create(username="viewer", is_staff=True)
    viewer.user_permissions.add(Permission.objects.get(codename="view_modelconfig"))
    services.register_model("mini", now=NOW, kind="hosted", checkpoint="tiny:0")
    browser = Client()
    browser.force_login(viewer)

    assert "mini" in page(browser, LIST)
    assert "/act/" not in page(browser, change_page("mini"))
    assert "READY" not in page(browser, f"{LIST}mini/replicas/")
    assert browser.get(f"{LIST}mini/act/start/").status_code == 403
    act(browser, "start", "mini")

    assert not ModelConfig.objects.get().started
    assert browser.post(change_page("mini"), HOSTED).status_code == 403


def test_a_started_model_is_not_deleted(browser: Client) -> None:
    services.register_model("mini", now=NOW, kind="hosted", checkpoint="tiny:0")
    services.start_model("mini", now=NOW)

    refused = browser.post(f"{LIST}mini/delete/", {"post": "yes"})
    services.stop_model("mini", now=NOW)
    done = browser.post(f"{LIST}mini/delete/", {"post": "yes"})

    assert (refused.status_code, done.status_code) == (403, 302)
    assert not ModelConfig.objects.exists()


def test_a_pool_in_use_cannot_shrink_below_it(browser: Client) -> None:
    address = "/admin/models_admin/acceleratorpool/"
    form = {
        "id": "box",
        "kind": "cpu",
        "devices": "2",
        "agent": "local",
        "rebalancing": "off",
        "notes": "",
    }
    assert browser.post(f"{address}add/", form).status_code == 302
    services.register_model(
        "mini", now=NOW, kind="hosted", checkpoint="tiny:0", pool="box", devices_per_replica=2
    )
    services.start_model("mini", now=NOW)

    refused = browser.post(f"{address}box/change/", form | {"devices": "1"})
    grown = browser.post(f"{address}box/change/", form | {"devices": "4"})

    assert "devices" in errors(refused)
    assert grown.status_code == 302
    assert AcceleratorPool.objects.get().devices == 4


def test_servers_and_versions_are_for_reading_and_text_stays_text(browser: Client) -> None:
    model, _ = services.register_model("mini", now=NOW, kind="hosted", checkpoint="tiny:0")
    server = ModelServer.objects.create(
        model=model,
        agent="local",
        ordinal=0,
        state=ServerState.FAILED,
        next_start_at=NOW,
        last_error=SCRIPT,
        reason=SCRIPT,
        version=SCRIPT,
    )
    ModelConfig.objects.update(version=SCRIPT)

    pages = [
        page(browser, path)
        for path in [
            "/admin/models_admin/modelserver/",
            f"/admin/models_admin/modelserver/{server.pk}/change/",
            "/admin/models_admin/modelversion/",
            LIST,
            change_page("mini"),
        ]
    ]

    assert SCRIPT not in "".join(pages)
    assert "&lt;script&gt;" in pages[0]
    assert browser.get("/admin/models_admin/modelserver/add/").status_code == 403
    assert browser.post(f"/admin/models_admin/modelserver/{server.pk}/delete/").status_code == 403


def test_the_list_costs_the_same_for_many_models(browser: Client) -> None:
    for number in range(20):
        model, _ = services.register_model(
            f"m{number}", now=NOW, kind="hosted", checkpoint="tiny:0"
        )
        ModelServer.objects.create(model=model, agent="local", ordinal=0)

    with CaptureQueriesContext(connection) as queries:
        page(browser, LIST)

    assert len(queries) <= 10


def test_a_pool_is_rebalanced_from_its_page_which_says_what_was_found(browser: Client) -> None:
    pool = AcceleratorPool.objects.create(id="box", devices=2)
    PoolOutlook.objects.create(pool=pool, at=NOW, needs={}, reason="one and a half are needed")
    path = "/admin/models_admin/acceleratorpool/"

    form = {"kind": "cpu", "devices": "2", "agent": "local", "rebalancing": "on", "notes": ""}
    assert browser.post(f"{path}box/change/", form).status_code == 302

    pool.refresh_from_db()
    assert pool.rebalancing == "on"
    for shown in (page(browser, path), page(browser, f"{path}box/change/")):
        assert "2026-01-01 00:00:00 UTC: one and a half are needed" in shown


def test_saving_a_model_leaves_the_pin_of_a_resize_and_the_action_ends_it(
    browser: Client,
) -> None:
    services.register_model("mini", now=NOW, kind="hosted", checkpoint="tiny:0")
    services.resize_model("mini", 1, now=NOW)

    browser.post(change_page("mini"), HOSTED | {"window": "9"})
    kept = ModelConfig.objects.get()
    assert (kept.window, kept.pinned_until) == (9, NOW + services.PINNED_FOR)

    browser.post(change_page("mini"), HOSTED | {"pinned": "on"})
    assert ModelConfig.objects.get().pinned

    assert "Unpinned mini." in act(browser, "unpin", "mini")
    free = ModelConfig.objects.get()
    assert (free.pinned, free.pinned_until) == (False, None)


def test_decisions_are_listed_with_filters_and_only_read(browser: Client) -> None:
    for pool_id, applied in (("box", True), ("other", False)):
        RebalanceDecision.objects.create(
            pool_id=pool_id,
            at=NOW,
            mode="on",
            outcome="moves",
            applied=applied,
            moves=[{"model": SCRIPT, "before": 1, "after": 3}],
            needs={},
            targets={},
            reason=f"because of {pool_id}",
            signal_age_s=31.4,
        )
    path = "/admin/models_admin/rebalancedecision/"

    shown = page(browser, f"{path}?pool_id=box")

    assert "because of box" in shown
    assert "because of other" not in shown
    assert "1 → 3" in shown
    assert "31 s old" in shown
    assert SCRIPT not in shown
    assert browser.get(f"{path}add/").status_code == 403
    one = RebalanceDecision.objects.first()
    assert one is not None
    assert 'name="_save"' not in page(browser, f"{path}{one.pk}/change/")


def sample(model_id: str, *, at: datetime, pool_id: str = "box", busy_s: float = 6.0) -> None:
    UtilizationSample.objects.create(
        at=at, agent="local", model_id=model_id, pool_id=pool_id, replicas=1, busy_s=busy_s,
        replica_s=8.0,
    )  # fmt: skip


def test_samples_of_use_are_listed_with_filters_and_only_read(browser: Client) -> None:
    AcceleratorPool.objects.create(id="box")
    services.register_model("mini", now=NOW, kind="hosted", checkpoint="tiny:0", pool="box")
    sample("mini", at=NOW)
    sample("gone", at=NOW, busy_s=2.0)
    sample("mini", at=NOW + timedelta(days=40), pool_id="other", busy_s=4.0)
    path = "/admin/models_admin/utilizationsample/"

    found = {
        query: {share for share in ("75.0%", "25.0%", "50.0%") if share in page(browser, query)}
        for query in (
            path,
            f"{path}?model_id=mini",
            f"{path}?pool_id=box",
            f"{path}?q=gone",
            f"{path}?at__year=2026&at__month=1",
        )
    }

    assert list(found.values()) == [
        {"75.0%", "25.0%", "50.0%"},
        {"75.0%", "50.0%"},
        {"75.0%", "25.0%"},
        {"25.0%"},
        {"75.0%", "25.0%"},
    ]
    assert "?model_id=mini" in page(browser, path)
    assert browser.get(f"{path}add/").status_code == 403
    one = UtilizationSample.objects.first()
    assert one is not None
    assert 'name="_save"' not in page(browser, f"{path}{one.pk}/change/")
    assert browser.post(f"{path}{one.pk}/delete/", {"post": "yes"}).status_code == 403


def test_pages_of_a_model_and_of_its_pool_say_how_busy_they_were(browser: Client) -> None:
    AcceleratorPool.objects.create(id="box")
    for name in ("mini", "idle"):
        services.register_model(name, now=NOW, kind="hosted", checkpoint="tiny:0", pool="box")
    now = database_now()
    sample("mini", at=now)
    sample("mini", at=now - timedelta(hours=2), busy_s=2.0)
    sample("other", at=now, busy_s=0.0)
    pool = "/admin/models_admin/acceleratorpool/box/change/"

    assert "75.0% in the last hour, 50.0% in the last day" in page(browser, change_page("mini"))
    assert "No replica lived in the last day." in page(browser, change_page("idle"))
    assert "37.5% in the last hour, 33.3% in the last day" in page(browser, pool)


def test_an_external_server_that_is_down_is_a_warning_and_a_wrong_one_an_error(
    browser: Client,
) -> None:
    with scripted(Step(body=b"<html>")) as server:
        refused = browser.post(f"{LIST}add/", EXTERNAL | {"url": server.url})
    taken = browser.post(f"{LIST}add/", EXTERNAL, follow=True)

    assert "something else than a JSON object" in errors(refused)["url"][0]
    assert "is registered all the same" in taken.content.decode()
    assert ModelConfig.objects.get().pk == "ext"
