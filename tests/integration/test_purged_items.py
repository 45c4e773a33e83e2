"""An executor and items whose text a purge has taken, as a retry sends them again."""

from collections.abc import Iterator

import pytest

from fulfillment import control, documents
from fulfillment.models import BatchPayload, FailedFlight
from tests.executor_stage import Stage, staged
from tests.fakes import instant_oip, scripted
from tests.rating_queue import batches, check_all, counts_add_up, finished, requests, states, submit

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def stage() -> Iterator[Stage]:
    with staged() as made:
        yield made


def purge_text(name: str) -> None:
    for payload in BatchPayload.objects.all():
        rows = documents.unpack(bytes(payload.data))
        payload.data = documents.pack(
            [[None, None] if item and item["text"] == name else [item, d] for item, d in rows]
        )
        payload.save()


def test_an_item_without_text_fails_alone_and_without_a_call(stage: Stage) -> None:
    workflow = submit(["a", "b"])
    purge_text("a")
    with instant_oip() as url:
        stage.serve(url)
        stage.rate()

    assert states(workflow) == ["FAILED", "COMPLETED"]
    assert requests(workflow)[0].error == "purged"
    assert not FailedFlight.objects.exists(), "others may have the text still"
    counts_add_up(workflow)


def test_a_batch_without_any_text_makes_no_call(stage: Stage) -> None:
    workflow = submit(["a"])
    purge_text("a")
    with scripted() as server:
        stage.serve(server.url)
        stage.rate()

    assert server.seen == []
    check_all()
    assert finished(workflow) == "FAILED"


def test_a_retry_ends_them_as_purged_again(stage: Stage) -> None:
    workflow = submit(["a", "b"])
    control.cancel(workflow_id=workflow.pk)
    purge_text("a")
    control.retry(workflow_id=workflow.pk)
    with instant_oip() as url:
        stage.serve(url)
        stage.rate()

    assert states(workflow) == ["FAILED", "COMPLETED"]
    assert len(batches(workflow)) == 1
    counts_add_up(workflow)
