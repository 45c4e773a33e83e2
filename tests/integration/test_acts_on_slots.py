"""Acts upon a workflow take effect at the next free slot, however many workflows wait.

Of thousands the dispatcher believes what it read for a while, until somebody rings.
"""

from collections.abc import Callable
from datetime import timedelta

import pytest

from fulfillment import bell, control, dispatch, leases, ready
from fulfillment.clock import database_now
from fulfillment.leases import Taken
from fulfillment.models import Workflow
from tests.rating_queue import Queue, Replica, boot, queue, rated, submit, take

pytestmark = pytest.mark.django_db


def pause(workflow: Workflow) -> None:
    control.pause(workflow_id=workflow.pk)


def cancel(workflow: Workflow) -> None:
    control.cancel(workflow_id=workflow.pk)


def complete(workflow: Workflow) -> None:
    control.complete(workflow_id=workflow.pk)


def lower(workflow: Workflow) -> None:
    changes = control.Changes(priority=10)
    control.change(workflow_id=workflow.pk, changes=changes, now=database_now())


@pytest.fixture(params=["few workflows", "thousands of workflows"])
def dispatcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """Return a dispatcher with two slots; as of thousands, it believes its reading till a ring."""
    if request.param == "thousands of workflows":
        monkeypatch.setattr(ready, "FEW", 0)
        monkeypatch.setattr(ready, "LONGEST", timedelta(days=1))
        monkeypatch.setattr(ready, "BELIEVED", 10**9)
        monkeypatch.setattr(ready, "BELIEVED_AFTER_RING", -1)
    bell.listen(timeout_s=0.01)
    return queue(Replica(window=2))


def sent(dispatcher: Queue) -> list[Taken]:
    """Run a pass and let an executor take over what it sent."""
    executor = boot()
    dispatcher.run()
    return [taken for message in dispatcher.take_sent() for taken in take(message, by=executor)]


@pytest.mark.parametrize("act", [pause, cancel, complete, lower])
def test_the_next_free_slot_goes_to_another_workflow(
    dispatcher: Queue, act: Callable[[Workflow], None]
) -> None:
    first = submit([f"first {n}" for n in range(6)], batch_size=1, priority=90)
    second = submit([f"second {n}" for n in range(6)], batch_size=1, priority=50)
    running = sent(dispatcher)
    assert {taken.workflow_id for taken in running} == {first.pk}
    assert not sent(dispatcher)

    act(first)
    dispatch.observe(dispatcher.memory, bell.listen(timeout_s=5), database_now())
    leases.finish([rated(running[0])])

    assert [taken.workflow_id for taken in sent(dispatcher)] == [second.pk]


def test_a_raised_workflow_takes_the_next_free_slot(dispatcher: Queue) -> None:
    submit([f"first {n}" for n in range(6)], batch_size=1, priority=50)
    second = submit([f"second {n}" for n in range(6)], batch_size=1, priority=10)
    running = sent(dispatcher)

    changes = control.Changes(priority=90)
    control.change(workflow_id=second.pk, changes=changes, now=database_now())
    dispatch.observe(dispatcher.memory, bell.listen(timeout_s=5), database_now())
    leases.finish([rated(running[0])])

    assert [taken.workflow_id for taken in sent(dispatcher)] == [second.pk]
