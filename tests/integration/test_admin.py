import re
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from fulfillment import raters, tokens
from fulfillment.admin import BigTableAdmin
from fulfillment.clock import database_now
from fulfillment.models import (
    ApiToken,
    ExecutorBoot,
    OwnerUsage,
    Rater,
    ServiceRun,
    Workflow,
)
from fulfillment.policy.lifecycle import BatchState, RequestState, WorkflowState
from tests import builders
from tests.builders import MODEL, NOW

HOSTILE = "<script>alert(1)</script>"
LISTS = (
    "apitoken",
    "batch",
    "delivery",
    "event",
    "executorboot",
    "ownershare",
    "priorityrule",
    "purge",
    "rater",
    "raterversion",
    "ratingrequest",
    "servicerun",
    "webhookendpoint",
    "workflow",
)


@pytest.fixture(autouse=True)
def _plugins(settings: Settings, db: None) -> None:
    builders.use_plugins(settings)


@pytest.fixture
def admin() -> Client:
    client = Client()
    client.force_login(User.objects.create(username="root", is_staff=True, is_superuser=True))
    return client


def url(name: str, rest: str = "") -> str:
    return f"/admin/fulfillment/{name}/{rest}"


def listed(client: Client, name: str, query: str = "") -> str:
    response = client.get(url(name, query))
    assert response.status_code == 200
    return response.content.decode()


def column(page: str, name: str) -> list[str]:
    """Return the texts of a column of a list."""
    cells = re.findall(rf'<t[hd] class="field-{name}[^"]*">(.*?)</t[hd]>', page)
    return [re.sub(r"<[^>]+>", "", cell) for cell in cells]


def test_anonymous_visitors_are_sent_to_the_login() -> None:
    for name in LISTS:
        response = Client().get(url(name))
        assert (response.status_code, response["Location"].split("?")[0]) == (302, "/admin/login/")


def test_the_site_is_called_airs(admin: Client) -> None:
    assert ">AIRS<" in admin.get("/admin/").content.decode()


def test_hostile_texts_are_shown_as_text(admin: Client) -> None:
    workflow = builders.workflow(name=HOSTILE, owner=HOSTILE)
    request = builders.request(
        workflow,
        0,
        request_id=HOSTILE,
        query_id=HOSTILE,
        state=RequestState.FAILED,
        error=HOSTILE,
        output={"raw": HOSTILE},
    )
    ExecutorBoot.objects.create(
        boot_id=workflow.public_id[3:],
        host=HOSTILE,
        pid=1,
        slots=1,
        started_at=NOW,
        heartbeat_at=NOW,
    )
    Rater.objects.update(paused_code="x", paused_detail=HOSTILE)

    pages = [
        *(url(name) for name in LISTS),
        url("workflow", f"{workflow.pk}/change/"),
        url("ratingrequest", f"{request.pk}/change/"),
        url("rater", f"{workflow.rater_id}/change/"),
        url("ratingrequest", f"?q={workflow.public_id}/%3Cscript%3E"),
        url("workflow", "?q=%3Cscript%3Ealert(1)%3C/script%3E"),
    ]

    for page in pages:
        response = admin.get(page)
        assert response.status_code == 200
        assert HOSTILE not in response.content.decode(), page
    assert "&lt;script&gt;" in listed(admin, "ratingrequest")


@pytest.mark.parametrize("name", ["workflow", "ratingrequest", "batch", "raterversion"])
def test_state_is_read_only(admin: Client, name: str) -> None:
    workflow = builders.workflow()
    rows = {
        "workflow": workflow,
        "ratingrequest": builders.request(workflow, 0),
        "batch": builders.batch(workflow, [0]),
        "raterversion": workflow.rater_version,
    }

    assert admin.get(url(name, "add/")).status_code == 403
    assert admin.post(url(name, f"{rows[name].pk}/delete/"), {"post": "yes"}).status_code == 403
    assert admin.post(url(name, f"{rows[name].pk}/change/"), {"name": "x"}).status_code == 403


def test_the_page_of_a_workflow_says_when_its_owner_is_over_its_share(admin: Client) -> None:
    workflow = builders.workflow(owner="flood")
    page = url("workflow", f"{workflow.pk}/change/")

    before = admin.get(page).content.decode()
    OwnerUsage.objects.create(
        rater_version=workflow.rater_version, owner="flood", recent=9, contended=9, used=0.5,
        allowed=0.2, written_at=database_now(),
    )  # fmt: skip

    assert "It is not over its share" in before
    assert "took 50% of the rater of late" in admin.get(page).content.decode()


def test_lists_of_big_tables_never_count_or_sort_them(
    admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BigTableAdmin, "list_per_page", 10)
    workflow = builders.workflow()
    for position in range(30):
        builders.request(workflow, position)
        builders.batch(workflow, [position])
    searches = ("", f"?q={workflow.public_id}", f"?q={workflow.public_id}&state=0", "?o=3")

    for name in ("ratingrequest", "batch"):
        for search in searches:
            with CaptureQueriesContext(connection) as captured:
                listed(admin, name, search)
            table = f'FROM "fulfillment_{name}"'
            statements = [query["sql"] for query in captured if table in query["sql"]]
            assert len(captured) <= 15
            assert len(statements) == 2
            for statement in statements:
                order = re.search(r"ORDER BY (.+?) LIMIT", statement)
                assert order, statement
                assert order[1] in {f'"fulfillment_{name}"."id" DESC', "1 DESC"}


def test_a_request_is_found_by_workflow_and_id(admin: Client) -> None:
    workflow, other = builders.workflow(), builders.workflow()
    for of in (workflow, other):
        builders.request(of, 0, request_id="a/b")
        builders.request(of, 1, request_id="c", state=RequestState.CANCELLED)
    cancelled = int(RequestState.CANCELLED)

    def found(query: str) -> list[str]:
        return column(listed(admin, "ratingrequest", query), "request_id")

    assert found("") == ["c", "a/b", "c", "a/b"]
    assert found(f"?q={workflow.public_id}") == ["c", "a/b"]
    assert found(f"?q={workflow.public_id}/a/b") == ["a/b"]
    assert found(f"?q={workflow.public_id}&state={cancelled}") == ["c"]
    assert found(f"?q={workflow.public_id}/nothing") == []
    assert found("?q=a/b") == []
    assert found("?q=wf_" + "0" * 32) == []


def test_the_open_batches_of_a_workflow_are_found(admin: Client) -> None:
    workflow = builders.workflow()
    builders.batch(workflow, [0], state=BatchState.DONE)
    builders.batch(workflow, [1, 2], open_mask=0b10)
    builders.batch(builders.workflow(), [3])

    page = listed(admin, "batch", f"?q={workflow.public_id}")

    assert column(page, "position") == ["1"]
    assert column(page, "open_items") == ["1 of 2"]


def test_workflows_show_how_far_they_are(admin: Client) -> None:
    workflow = builders.workflow(
        name="mine", owner="alice", stats={"received": 10, "completed": 4, "failed": 1}
    )
    builders.workflow(owner="bob", name="other")

    page = listed(admin, "workflow", "?q=alice")
    detail = admin.get(url("workflow", f"{workflow.pk}/change/")).content.decode()

    assert column(page, "how_far") == ["5 / 10, 1 failed"]
    assert column(listed(admin, "workflow", "?q=mine"), "name") == ["mine"]
    assert column(listed(admin, "workflow", f"?q={workflow.public_id}"), "name") == ["mine"]
    assert "10 total, 5 pending" in detail


def test_cancelling_from_the_list_says_what_happened(admin: Client) -> None:
    running = builders.workflow()
    done = builders.workflow(state=WorkflowState.COMPLETED)

    chosen = {"action": "cancel", "_selected_action": [running.pk, done.pk]}

    asked = admin.post(url("workflow"), chosen).content.decode()
    running.refresh_from_db()
    assert running.state == WorkflowState.RUNNING
    page = admin.post(url("workflow"), {**chosen, "confirmed": "yes"}, follow=True).content.decode()

    assert "Cancel 2 workflows" in asked
    assert running.public_id in asked
    running.refresh_from_db()
    assert running.state == WorkflowState.CANCELLED
    assert f"{running.public_id} is CANCELLED" in page
    assert "has ended as COMPLETED" in page
    assert LogEntry.objects.get().object_id == str(running.pk)


@pytest.mark.parametrize(
    ("act", "before", "after"),
    [
        ("pause", WorkflowState.RUNNING, WorkflowState.PAUSED),
        ("resume", WorkflowState.PAUSED, WorkflowState.RUNNING),
        ("complete", WorkflowState.OPEN, WorkflowState.COMPLETED),
        ("retry", WorkflowState.CANCELLED, WorkflowState.COMPLETED),
    ],
)
def test_every_act_upon_a_workflow_can_be_done_from_the_list(
    admin: Client, act: str, before: WorkflowState, after: WorkflowState
) -> None:
    """They have no requests: a round of one is over at once."""
    workflow = builders.workflow(state=before)
    chosen = {"action": act, "_selected_action": [workflow.pk], "confirmed": "yes"}

    page = admin.post(url("workflow"), chosen, follow=True).content.decode()

    workflow.refresh_from_db()
    assert workflow.state == after
    assert f"Workflow {workflow.public_id} is {after.name}" in page
    assert LogEntry.objects.get().object_id == str(workflow.pk)


def test_too_many_workflows_at_once_are_refused(admin: Client) -> None:
    version = builders.version()
    workflows = [builders.workflow(version) for _ in range(101)]
    chosen = {"action": "cancel", "_selected_action": [w.pk for w in workflows]}

    page = admin.post(url("workflow"), chosen, follow=True).content.decode()

    assert "Choose 100 at most" in page


def test_a_viewer_of_the_admin_cannot_cancel() -> None:
    workflow = builders.workflow()
    viewer = User.objects.create(username="viewer", is_staff=True)
    viewer.user_permissions.add(Permission.objects.get(codename="view_workflow"))
    client = Client()
    client.force_login(viewer)

    client.post(
        url("workflow"),
        {"action": "cancel", "_selected_action": [workflow.pk], "confirmed": "yes"},
    )

    workflow.refresh_from_db()
    assert workflow.state == WorkflowState.RUNNING
    assert "Cancel selected" not in listed(client, "workflow")


def rater_form(**changes: Any) -> dict[str, Any]:
    return {
        "id": "r1",
        "autorater": "stub",
        "model_id": MODEL,
        "mode": "integrated",
        "key_level": "result",
        "freshness_s": 60,
        "deadline_s": 60,
        "max_qps": "",
        "batch_size": 12,
        "max_attempts": 8,
        "score_min": 0,
        "score_max": 4,
        "prompt_template": "",
        "config": "{}",
        **changes,
    }


def test_a_rater_is_made_and_changed_as_by_the_api(admin: Client) -> None:
    made = admin.post(url("rater", "add/"), rater_form())
    changed = admin.post(url("rater", "r1/change/"), rater_form(score_max=5, batch_size=6))

    assert (made.status_code, changed.status_code) == (302, 302)
    rater = raters.find("r1")
    assert rater.batch_size == 6
    assert rater.current_version is not None
    assert (rater.current_version.number, rater.current_version.spec["score_max"]) == (2, 5.0)


def test_a_rater_that_cannot_work_is_refused_at_its_fields(admin: Client) -> None:
    page = admin.post(
        url("rater", "add/"), rater_form(model_id="nowhere", config='{"broken": 1}', batch_size=61)
    ).content.decode()

    assert "There is no model &#x27;nowhere&#x27;" in page
    assert "it says that it is broken" in page
    assert "Must lie in 1 to 60" in page
    assert not Rater.objects.exists()


def test_raters_are_paused_and_resumed(admin: Client) -> None:
    raters.register(Rater(id="r1", autorater="stub", model_id=MODEL), now=NOW)

    admin.post(url("rater"), {"action": "pause", "_selected_action": ["r1"]})
    paused = raters.find("r1").paused_code
    admin.post(url("rater"), {"action": "resume", "_selected_action": ["r1"]})

    assert (paused, raters.find("r1").paused_code) == ("operator", "")


def test_a_token_is_shown_once_and_works(admin: Client) -> None:
    form = {"user": "carol", "role": "viewer", "expires_at_0": "", "expires_at_1": ""}

    first = admin.post(url("apitoken", "add/"), form, follow=True).content.decode()
    second = listed(admin, "apitoken")

    (secret,) = re.findall(r"airs_[\w-]+", first)
    assert tokens.find(secret) == ApiToken.objects.get()
    assert ApiToken.objects.get().user == "carol"
    assert secret not in second
    assert secret not in str(LogEntry.objects.values_list("object_repr", "change_message"))


def test_a_token_can_be_revoked_but_not_changed(admin: Client) -> None:
    builders.token()
    token = ApiToken.objects.get()

    assert admin.post(url("apitoken", f"{token.pk}/change/"), {"role": "admin"}).status_code == 403
    admin.post(url("apitoken", f"{token.pk}/delete/"), {"post": "yes"})
    assert not ApiToken.objects.exists()


def test_every_list_opens(admin: Client) -> None:
    builders.request(builders.workflow(), 0)
    ServiceRun.objects.create(name="beat", ran_at=NOW)

    for name in LISTS:
        listed(admin, name)
    assert Workflow.objects.exists()
