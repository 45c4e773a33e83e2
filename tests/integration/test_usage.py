"""Accounts of accelerator-seconds: right at any moment, by whatever they are summed up."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from pytest_django import Settings

from airs_site import service_report
from fulfillment import completion, leases, progress, retention
from fulfillment.clock import database_now
from fulfillment.folding import fold
from fulfillment.models import AcceleratorUse, Role, StatsDelta, Workflow
from tests import builders
from tests.builders import Api
from tests.rating_queue import boot, queue, rated, submit, take

HOUR = timedelta(hours=1)
AT = datetime(2026, 11, 30, 12, 30, tzinfo=UTC)


def worked(workflow: Workflow, seconds: float, *, calls: int = 1, at: datetime = AT) -> None:
    """Let a message have said what its calls took."""
    StatsDelta.objects.create(
        workflow=workflow, model_calls=calls, device_seconds=seconds, added_at=at
    )


def usage(api: Api | None = None, /, **asked: Any) -> dict[str, Any]:
    by_default = {"from": "2026-11-30T12:00:00Z", "until": "2026-11-30T14:00:00Z"}
    query = "&".join(f"{name}={value}" for name, value in {**by_default, **asked}.items())
    answer: dict[str, Any] = (api or Api("root", Role.OPERATOR)).get(f"/usage?{query}").json()
    return answer


def seconds_by(by: str) -> dict[str, float]:
    return {item[by]: item["accelerator_seconds"] for item in usage(by=by)["items"]}


@pytest.mark.django_db
def test_sums_are_the_same_by_rater_by_owner_and_by_workflow_folded_or_not() -> None:
    other = builders.rater("other")
    ann, bob = builders.workflow(owner="ann"), builders.workflow(owner="bob")
    third = builders.workflow(builders.version(other), owner="ann")
    worked(ann, 2.0, calls=3)
    worked(bob, 5.0)
    assert fold() == 2
    worked(third, 1.5)
    worked(ann, 0.25)
    worked(ann, 100.0, at=AT - HOUR)

    for _ in range(2):
        assert seconds_by("rater") == {builders.RATER: 7.25, "other": 1.5}
        assert seconds_by("owner") == {"ann": 3.75, "bob": 5.0}
        assert seconds_by("workflow") == {
            ann.public_id: 2.25, bob.public_id: 5.0, third.public_id: 1.5,
        }  # fmt: skip
        for by in ("rater", "owner", "workflow"):
            answer = usage(by=by)
            assert (answer["accelerator_seconds"], answer["calls"]) == (8.75, 6)
        fold()
    assert not StatsDelta.objects.exists()
    assert progress.read(ann)["accelerator_seconds"] == 102.25


@pytest.mark.django_db
def test_what_is_folded_as_a_workflow_ends_is_accounted_for() -> None:
    workflow = builders.workflow(owner="ann", closed_at=AT)
    worked(workflow, 2.0, calls=3)

    assert completion.check(workflow.pk)

    assert not StatsDelta.objects.exists()
    (account,) = usage(by="owner")["items"]
    assert (account["owner"], account["accelerator_seconds"], account["calls"]) == ("ann", 2.0, 3)


@pytest.mark.django_db
def test_what_took_nothing_of_devices_has_no_account() -> None:
    worked(builders.workflow(), 0.0, calls=0)

    assert fold() == 1

    assert not AcceleratorUse.objects.exists()


@pytest.mark.django_db
def test_a_list_is_cut_and_its_sums_are_not() -> None:
    for number in range(5):
        worked(builders.workflow(owner=f"owner{number}"), number + 1)

    answer = usage(by="owner", limit=2)

    assert [item["owner"] for item in answer["items"]] == ["owner4", "owner3"]
    assert (answer["others"], answer["accelerator_seconds"]) == (3, 15.0)
    assert (answer["from"], answer["until"]) == ("2026-11-30T12:00:00Z", "2026-11-30T14:00:00Z")


@pytest.mark.django_db
def test_everybody_sees_their_own_account_and_operators_all() -> None:
    worked(builders.workflow(owner="ann"), 2.0)
    worked(builders.workflow(owner="bob"), 3.0)

    own = usage(Api("ann"), by="owner")

    assert [(item["owner"], item["accelerator_seconds"]) for item in own["items"]] == [("ann", 2.0)]
    assert own["accelerator_seconds"] == 2.0


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("by=colour", "by"),
        ("limit=0", "limit"),
        ("from=yesterday", "from"),
        ("from=0001-01-01T00:00:00Z", "from"),
        ("until=0001-01-01T00:00:00Z", "until"),
        ("until=9999-12-31T23:30:00Z", "until"),
        ("from=2026-11-30T14:00:00Z&until=2026-11-30T14:00:00Z", "from"),
        ("when=now", "when"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(query: str, field: str) -> None:
    response = Api("root", Role.OPERATOR).get(f"/usage?{query}")

    assert response.status_code == 422
    assert [error["field"] for error in response.json()["errors"]] == [field]


@pytest.mark.django_db
def test_what_a_finish_says_of_devices_stands_beside_what_its_calls_took() -> None:
    executor = boot()
    workflow = submit(["a", "b"])
    running = queue()
    running.run()
    (taken,) = take(running.take_sent()[0], by=executor)
    told = rated(taken)

    leases.finish([told])
    leases.finish([told])

    delta = StatsDelta.objects.exclude(model_calls=0).get()
    assert (delta.device_seconds, delta.accelerator_seconds) == (
        told.device_seconds, told.accelerator_seconds,
    )  # fmt: skip
    assert told.device_seconds != told.accelerator_seconds
    assert progress.read(workflow)["accelerator_seconds"] == told.device_seconds


@pytest.mark.django_db(transaction=True)
def test_a_kill_between_finish_and_fold_loses_nothing_and_counts_nothing_twice() -> None:
    workflow = builders.workflow(owner="ann")
    now = database_now()
    worked(workflow, 2.0, at=now)
    worked(workflow, 0.5, at=now)

    with suppress(OperationalError), transaction.atomic():
        assert fold() == 2
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
    connection.close()
    assert not AcceleratorUse.objects.exists()
    span = {"from": f"{now - HOUR:%Y-%m-%dT%H:%M:%SZ}", "until": f"{now:%Y-%m-%dT%H:%M:%S.%fZ}"}
    assert usage(by="owner", **span)["accelerator_seconds"] == 2.5

    assert (fold(), fold()) == (2, 0)

    (use,) = AcceleratorUse.objects.all()
    assert (use.device_s, use.calls, use.owner) == (2.5, 2, "ann")
    assert usage(by="owner", **span)["accelerator_seconds"] == 2.5


@pytest.mark.django_db
def test_accounts_outlive_their_workflow_and_are_kept_as_long_as_samples(
    settings: Settings,
) -> None:
    workflow = builders.workflow(owner="ann")
    worked(workflow, 2.0)
    worked(workflow, 1.0, at=AT - timedelta(days=40))
    fold()
    workflow.delete()

    (item,) = usage(by="workflow")["items"]
    assert (item["workflow"], item["owner"]) == (None, "ann")

    settings.AIRS_KEEP_QUEUE_SAMPLES = timedelta(days=30)
    retention.run_once(AT)
    assert [use.device_s for use in AcceleratorUse.objects.all()] == [2.0]


@pytest.mark.django_db
def test_the_admin_lists_accounts(admin_client: Any) -> None:
    workflow = builders.workflow(owner="ann")
    worked(workflow, 2.0)
    fold()

    address = "/admin/fulfillment/acceleratoruse/"

    for term in ("", builders.RATER, "ann", workflow.public_id):
        assert workflow.public_id in admin_client.get(address, {"q": term}).content.decode()
    assert workflow.public_id not in admin_client.get(address, {"q": "nobody"}).content.decode()


@pytest.mark.django_db
def test_the_service_report_tells_who_had_most() -> None:
    worked(builders.workflow(owner="ann"), 2.0)
    worked(builders.workflow(owner="bob"), 3.5)

    written = service_report.document(AT - HOUR, AT)

    assert written["accelerator_seconds"] == {
        "rater": {builders.RATER: 5.5},
        "owner": {"bob": 3.5, "ann": 2.0},
    }
    assert "accelerator-seconds by owner: bob 3.5, ann 2.0" in service_report.text(written)
