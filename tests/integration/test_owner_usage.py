"""What owners were served of late: written down by the leader, and told to who has had too much."""

from collections import Counter
from datetime import timedelta

import pytest

from fulfillment import usage
from fulfillment.clock import database_now
from fulfillment.models import Batch, OwnerUsage, RaterCost, Workflow
from fulfillment.policy import ordering
from fulfillment.policy.fairness import LONG, OverShare, Usage
from tests import builders
from tests.builders import NOW
from tests.rating_queue import Queue, Replica, boot, queue, submit

pytestmark = pytest.mark.django_db

FULL = 3600 / 0.6931
"""Requests in the hour's memory of whoever takes all of a rater that does one a second."""


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def sent_by_workflow(dispatcher: Queue) -> Counter[int]:
    """Return how many batches of each workflow were sent."""
    ids = [batch_id for message in dispatcher.take_sent() for batch_id in message.ids]
    return Counter(Batch.objects.filter(pk__in=ids).values_list("workflow_id", flat=True))


def memory(**owners: float) -> ordering.Memory:
    return ordering.Memory(usage=Usage(at=NOW, recent=owners, contended=owners))


def measured(workflow: Workflow, *, requests_per_s: float = 1.0) -> None:
    """Let it be known what the workflow's rater can do."""
    now = database_now()
    RaterCost.objects.create(
        rater=workflow.rater,
        seconds_a_request=1 / requests_per_s,
        call_seconds_a_request=1 / requests_per_s,
        requests=1000,
        exact=True,
        measured_at=now,
        read_to=now,
        servers=1.0,
        looked_at=now,
    )


def test_a_new_leader_goes_on_with_what_the_last_one_wrote() -> None:
    version = builders.version()
    usage.remember({version.pk: memory(ann=100, bob=40)}, {}, NOW)

    found = usage.recall(NOW + LONG)[version.pk].usage

    assert found.contended == {"ann": pytest.approx(50), "bob": pytest.approx(20)}
    assert found.recent == {"ann": pytest.approx(100 / 64), "bob": pytest.approx(40 / 64)}


def test_what_is_written_again_replaces_what_was_written() -> None:
    version = builders.version()
    usage.remember({version.pk: memory(ann=100)}, {}, NOW)
    usage.remember({version.pk: memory(ann=70)}, {}, NOW)

    assert OwnerUsage.objects.get().contended == 70


def test_what_has_faded_is_erased() -> None:
    version = builders.version()
    usage.remember({version.pk: memory(ann=100)}, {}, NOW)
    usage.remember({}, {}, NOW + usage.REMEMBERED + timedelta(seconds=1))

    assert not OwnerUsage.objects.exists()


def test_only_the_owners_that_count_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MOST_WRITTEN", 2)
    version = builders.version()
    over = {version.pk: {"cem": OverShare(used=0.5, allowed=0.2)}}
    usage.remember({version.pk: memory(ann=100, bob=40, cem=1)}, over, NOW)

    assert set(OwnerUsage.objects.values_list("owner", flat=True)) == {"ann", "cem"}


def test_an_owner_is_told_for_a_minute_why_it_waits() -> None:
    workflow = builders.workflow(builders.version(), owner="flood")
    other = builders.workflow(workflow.rater_version, owner="ann")
    over = {workflow.rater_version_id: {"flood": OverShare(used=0.5, allowed=0.2)}}
    usage.remember({workflow.rater_version_id: memory(flood=100, ann=9)}, over, NOW)

    told = usage.standings([workflow, other], NOW + timedelta(seconds=59))

    assert set(told) == {workflow.pk}
    assert "took 50% of the rater of late while others waited" in told[workflow.pk]
    assert usage.standings([workflow], NOW + timedelta(seconds=61)) == {}


def test_an_owner_that_floods_is_served_after_the_others_and_told_so() -> None:
    boot(slots=100)
    dispatcher = queue(Replica(window=4))
    flood = submit(names("f", 60), batch_size=1, owner="flood")
    other = submit(names("o", 90), batch_size=1, owner="ann")
    measured(flood, requests_per_s=0.001)
    version_id = flood.rater_version_id
    most = 0.001 * FULL
    dispatcher.memory.orders[version_id] = ordering.Memory(
        usage=Usage(at=database_now(), contended={"flood": 0.5 * most})
    )

    dispatcher.run()

    sent = sent_by_workflow(dispatcher)
    assert sent == {other.pk: 4}, "the smaller flood stands behind"
    usage.remember(dispatcher.memory.orders, dispatcher.memory.over, database_now())
    assert flood.pk in usage.standings([flood, other], database_now())


def test_without_usage_the_smaller_job_goes_first() -> None:
    boot(slots=100)
    dispatcher = queue(Replica(window=4))
    small = submit(names("f", 60), batch_size=1, owner="flood")
    submit(names("o", 90), batch_size=1, owner="ann")
    measured(small, requests_per_s=0.001)

    dispatcher.run()

    assert sent_by_workflow(dispatcher) == {small.pk: 4}


def test_what_leaves_is_charged_to_its_owner() -> None:
    boot(slots=100)
    dispatcher = queue(Replica(window=4))
    workflow = submit(names("f", 60), batch_size=2, owner="ann")

    dispatcher.run()

    charged = dispatcher.memory.orders[workflow.rater_version_id].usage
    assert charged.recent == {"ann": 8.0}
    assert charged.contended == {}, "nobody else waited"
