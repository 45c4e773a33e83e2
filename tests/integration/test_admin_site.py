"""The landing page, the archive's page and what browsers are told about all pages."""

import re
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from airs_site import admin_site
from fulfillment.admin import BigTableAdmin
from fulfillment.clock import database_now
from fulfillment.models import ExecutorBoot, Rating, ServiceRun, Workflow
from fulfillment.policy.fingerprint import url_digest
from fulfillment.policy.lifecycle import BatchState, RequestState, WorkflowState
from models_admin import services
from models_admin.models import ModelServer
from models_admin.policy.replicas import ServerState
from tests import builders
from tests.builders import NOW

RATING = "/admin/fulfillment/rating/"


@pytest.fixture(autouse=True)
def _plugins(settings: Settings, db: None) -> None:
    builders.use_plugins(settings)


@pytest.fixture
def admin() -> Client:
    client = Client()
    client.force_login(User.objects.create(username="root", is_staff=True, is_superuser=True))
    return client


def text(page: str) -> str:
    """Return what a page says, in one line."""
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def landing(client: Client) -> str:
    response = client.get("/admin/")
    assert response.status_code == 200
    return text(response.content.decode())


def sections(client: Client) -> Any:
    return client.get("/admin/").context["overview"]


def test_the_landing_page_sums_up_workflows_and_their_sources(admin: Client) -> None:
    builders.workflow(stats={"received": 1_000, "from_archive": 600, "from_model": 300})
    builders.workflow(stats={"received": 500, "failed": 7, "coalesced": 5})
    builders.workflow(state=WorkflowState.COMPLETED)

    page = landing(admin)

    assert "RUNNING 2 COMPLETED 1" in page
    assert "1,500 received, 600 from the archive, 5 coalesced, 300 by a model, 7 failed" in page


def test_the_queue_is_counted_by_rater_and_state(admin: Client) -> None:
    workflow = builders.workflow()
    states = (BatchState.READY, BatchState.READY, BatchState.LEASED, BatchState.WAITING)
    for position, state in enumerate((*states, BatchState.DELAYED, BatchState.DONE)):
        builders.batch(workflow, [position], state=state)
    builders.rater("idle", paused_code="operator")

    queue = {row["rater"]: row for row in sections(admin)["queue"]}

    assert queue[workflow.rater_id]["counts"] == [2, 1, 1, 1]
    assert (queue["idle"]["counts"], queue["idle"]["paused"]) == ([0, 0, 0, 0], "operator")
    assert "idle paused: operator" in landing(admin)


def test_the_queue_is_counted_up_to_a_cap(admin: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_site, "COUNTED", 3)
    workflow = builders.workflow()
    for position in range(5):
        builders.batch(workflow, [position])

    assert sections(admin)["queue"][0]["counts"][0] == 3


def test_what_does_not_run_is_said(admin: Client) -> None:
    now = database_now()
    ServiceRun.objects.create(name="dispatcher", ran_at=now)
    ServiceRun.objects.create(name="beat", ran_at=now - timedelta(minutes=5))

    before = landing(admin)
    ExecutorBoot.objects.create(
        boot_id=uuid4(), host="h", pid=1, slots=1, started_at=now, heartbeat_at=now
    )
    after = landing(admin)

    assert re.search(r"dispatcher \d\.\d s ago beat 30\d\.\d s ago: it does not run", before)
    assert "executors (0) never: it does not run" in before
    assert re.search(r"executors \(1\) \d\.\d s ago Flower", after)


def test_replicas_that_are_missing_show(admin: Client) -> None:
    model, _ = services.register_model(
        "mini", now=NOW, kind="hosted", checkpoint="tiny:0", replicas_default=2
    )
    services.start_model("mini", now=NOW)
    ModelServer.objects.create(
        model=model, agent="local", ordinal=0, state=ServerState.READY, address="http://x",
        ready_at=NOW, queue_rows=7,
    )  # fmt: skip
    ModelServer.objects.create(model=model, agent="local", ordinal=1, state=ServerState.STARTING)

    page = admin.get("/admin/").content.decode()

    assert '<span class="bad">1 of 2</span>' in page
    assert "1 of 2 1 STARTING, 1 READY 7" in text(page)


def test_sections_are_for_those_who_may_see_their_tables() -> None:
    viewer = User.objects.create(username="viewer", is_staff=True)
    viewer.user_permissions.add(Permission.objects.get(codename="view_workflow"))
    client = Client()
    client.force_login(viewer)

    assert set(sections(client)) == {"flower_url", "workflows", "sources", "newest"}
    assert "Queue" not in landing(client)


def test_the_landing_page_costs_the_same_for_much_work(admin: Client) -> None:
    for _ in range(10):
        builders.batch(builders.workflow(), [0])

    with CaptureQueriesContext(connection) as captured:
        landing(admin)

    assert len(captured) <= 15


# The archive


@pytest.fixture
def rated() -> Workflow:
    return builders.workflow(builders.version(builders.rater(freshness_s=3_600)))


def rating(of: Workflow, **changes: Any) -> Rating:
    fields: dict[str, Any] = {
        "fingerprint": uuid4(),
        "rater_version": of.rater_version,
        "workflow_id": of.pk,
        "score": 2.5,
        "produced_at": database_now(),
        **changes,
    }
    return Rating.objects.create(**fields)


def next_use(client: Client, of: Rating) -> str:
    response = client.get(f"{RATING}{of.pk}/change/")
    assert response.status_code == 200
    found = re.search(r"For the next equal request: (.*?) Computed for", text(_body(response)))
    assert found
    return found[1]


def _body(response: Any) -> str:
    body: str = response.content.decode()
    return body


def test_a_rating_says_whether_it_is_taken_and_why_not(admin: Client, rated: Workflow) -> None:
    taken = rating(rated)
    superseded = rating(
        rated, fingerprint=taken.fingerprint, produced_at=taken.produced_at - timedelta(minutes=5)
    )
    old = rating(rated, produced_at=database_now() - timedelta(hours=2))
    private = rating(rated, reusable=False)

    assert next_use(admin, taken).startswith("Taken until ")
    assert next_use(admin, superseded) == f"Not taken: rating {taken.pk} is newer."
    assert (
        next_use(admin, old) == f"Not taken: older than the freshness of {rated.rater_id}, 1:00:00."
    )
    assert next_use(admin, private) == "Not taken: its workflow kept it out of the archive."


def test_a_rating_of_an_older_version_says_so(admin: Client, rated: Workflow) -> None:
    before = rating(rated)
    builders.version(rated.rater, number=2, model_version="v2")

    assert "there is a newer version" in next_use(admin, before)


def test_ratings_are_found_by_fingerprint_url_and_request(admin: Client, rated: Workflow) -> None:
    address = "https://shop.example/1?a=b"
    first = rating(rated, url_digest=url_digest(address).hex())
    second = rating(rated)
    builders.request(
        rated, 0, request_id="a/b", fingerprint=second.fingerprint, state=RequestState.COMPLETED
    )

    def found(query: str) -> list[str]:
        page = _body(admin.get(RATING, {"q": query}))
        return re.findall(r'<th class="field-id"><a href="[^"]*">(\d+)</a>', page)

    assert found("") == [str(second.pk), str(first.pk)]
    assert found(str(first.fingerprint)) == [str(first.pk)]
    assert found(first.fingerprint.hex) == [str(first.pk)]
    assert found(address) == [str(first.pk)]
    assert found(f"{rated.public_id}/a/b") == [str(second.pk)]
    assert found(rated.public_id) == []
    assert found("nothing") == []


def test_a_request_leads_to_its_rating_and_a_rating_to_its_workflow(
    admin: Client, rated: Workflow
) -> None:
    kept = rating(rated)
    request = builders.request(rated, 0, state=RequestState.COMPLETED, rating_id=kept.pk)

    of_request = _body(admin.get(f"/admin/fulfillment/ratingrequest/{request.pk}/change/"))
    of_rating = _body(admin.get(f"{RATING}{kept.pk}/change/"))

    assert f'href="{RATING}{kept.pk}/change/"' in of_request
    assert f'href="/admin/fulfillment/workflow/{rated.pk}/change/"' in of_rating


def test_the_archive_is_read_only_and_neither_counted_nor_sorted(
    admin: Client, rated: Workflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BigTableAdmin, "list_per_page", 1)
    rating(rated)
    kept = rating(rated)

    with CaptureQueriesContext(connection) as captured:
        admin.get(f"{RATING}?o=3")

    statements = [q["sql"] for q in captured if 'FROM "fulfillment_rating"' in q["sql"]]
    assert statements
    assert all(" LIMIT " in statement for statement in statements)
    assert not [statement for statement in statements if '"score" DESC' in statement]
    assert admin.post(f"{RATING}{kept.pk}/delete/", {"post": "yes"}).status_code == 403
    assert admin.get(f"{RATING}add/").status_code == 403


# What browsers are told


def test_the_bare_address_leads_to_the_admin() -> None:
    assert Client().get("/").headers["Location"] == "/admin/"


@pytest.fixture
def policies(admin: Client) -> dict[str, str]:
    paths = ("/admin/", "/admin/login/", "/api/docs", "/api/v1/workflows", "/healthz", "/nothing")
    return {path: admin.get(path).headers["Content-Security-Policy"] for path in paths}


def test_no_page_may_run_inline_scripts_or_be_framed(policies: dict[str, str]) -> None:
    for path, policy in policies.items():
        assert "script-src 'self';" in policy, path
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe-eval" not in policy


def test_inline_styles_are_for_swagger_alone(policies: dict[str, str]) -> None:
    assert [path for path in policies if "unsafe-inline" in policies[path]] == ["/api/docs"]


def test_an_instant_is_shown_to_the_second_and_as_utc(admin: Client) -> None:
    builders.workflow(created_at=NOW)

    assert f"{NOW:%Y-%m-%d %H:%M:%S}Z" in _body(admin.get("/admin/fulfillment/workflow/"))
