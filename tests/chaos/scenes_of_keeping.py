"""What is kept and for how long: retention of each kind of row, and the samples of the queue."""

import uuid
from collections import Counter
from datetime import timedelta
from itertools import pairwise

from django.conf import settings
from django.contrib.sessions.models import Session

from fulfillment import deliveries, notify, queue_history, recovery, retention
from fulfillment.clock import database_now
from fulfillment.models import (
    Batch,
    BatchPayload,
    Delivery,
    Erasure,
    Event,
    ExecutorBoot,
    FailedFlight,
    Flow,
    QueueSample,
    Rating,
    RatingRequest,
    ServiceRun,
    Upload,
    WebhookEndpoint,
    Workflow,
    WorkflowStats,
)
from fulfillment.policy.lifecycle import RequestState
from tests.builders import RATER
from tests.chaos.scenes import Ground, Scene, busy, names
from tests.chaos.world import World, documents_of

DAY = timedelta(days=1)
MINUTE = timedelta(minutes=1)


def _of_all_ages(world: World, tag: str) -> Ground:
    """Rows of each kind that are due to be erased, and their like that are not.

    Four workflows: one past all its time; one whose payloads and one whose delivery are; and a
    young one.
    """
    world.forget()
    now = database_now()
    _ratings(world, [200, 150, 101, 99, 1])
    workflows = [_told_of(world, f"{tag}{name}") for name in ("gone", "kept", "told", "young")]
    world.settle()
    notify.run_once(now)
    deliveries.run_once(now)
    for workflow, days in zip(workflows, (91, 15, 31, 13), strict=True):
        Workflow.objects.filter(pk=workflow.pk).update(finished_at=now - days * DAY)
        Upload.objects.filter(workflow=workflow).update(finished_at=now - days * DAY)
    Upload.objects.filter(workflow=workflows[3]).update(finished_at=now)
    told = Delivery.objects.filter(event__workflow=workflows[2])
    told.update(finished_at=now - 31 * DAY)
    FailedFlight.objects.update(failed_at=now)
    for age in (9 * MINUTE, 11 * MINUTE):
        FailedFlight.objects.create(fingerprint=uuid.uuid4(), code="x", failed_at=now - age)
    for key, age in ((f"{tag}old", 1 * DAY), (f"{tag}new", -DAY)):
        Session.objects.create(session_key=key, session_data="", expire_date=now - age)
        ServiceRun.objects.create(name=key, ran_at=now - age - DAY / 2)
    ExecutorBoot.objects.exclude(pk=world.executor.boot_id).update(heartbeat_at=now - 2 * DAY)
    return Ground(tag=tag, workflows=workflows)


def _ratings(world: World, ages: list[int]) -> None:
    """Store ratings of so many days, the oldest first, as time would."""
    version_id = world.look("SELECT current_version_id FROM fulfillment_rater")[0][0]
    now = database_now()
    for days in ages:
        Rating.objects.create(
            fingerprint=uuid.UUID(int=days), rater_version_id=version_id, workflow_id=0, score=1,
            produced_at=now - days * DAY,
        )  # fmt: skip


def _told_of(world: World, tag: str) -> Workflow:
    """Submit five rows, one of them bad, with a webhook and a key."""
    answer = world.api.post(
        "/workflows",
        {
            "rater": RATER,
            "batch_size": 2,
            "requests": documents_of([*names(tag, 4), *names(tag, 1, "bad")]),
            "webhook": {"url": world.receiver},
        },
        Idempotency_Key=f"key-{tag}",
    )
    assert answer.status_code == 202, answer.content
    return Workflow.objects.get(public_id=answer.json()["id"])


def _retain(world: World, ground: Ground) -> None:
    retention.run_once(database_now())


def _kept_as_long_as_due(world: World, ground: Ground) -> None:
    gone, kept, told, young = ground.workflows
    assert not Erasure.objects.exists()
    assert _rows_of(gone) == Counter()
    whole = Counter(requests=5, stats=1, workflows=1, events=1, endpoints=1, deliveries=1)
    assert _rows_of(kept) == whole
    assert _rows_of(told) == whole - Counter(deliveries=1)
    assert _rows_of(young) == whole + Counter(batches=3, payloads=3, uploads=1)
    stored = dict(WorkflowStats.objects.values_list("pk", "stored_bytes"))
    assert (stored[kept.pk], stored[told.pk], stored[young.pk] > 0) == (0, 0, True)
    ages = [rating.fingerprint.int for rating in Rating.objects.filter(workflow_id=0)]
    assert sorted(ages) == [1, 99]
    # Ratings outlive the workflow that they were made for.
    assert Rating.objects.filter(workflow_id=gone.pk).count() == 4
    assert list(FailedFlight.objects.filter(code="x").values_list("code")) == [("x",)]
    left = [f"{ground.tag}new"]
    assert [s.pk for s in Session.objects.filter(pk__startswith=ground.tag)] == left
    assert [s.pk for s in ServiceRun.objects.filter(pk__startswith=ground.tag)] == left
    silent = database_now() - DAY
    assert not ExecutorBoot.objects.filter(heartbeat_at__lt=silent).exists()


def _rows_of(workflow: Workflow) -> Counter[str]:
    """Count what there is of a workflow in each table."""
    first, end = workflow.pk << 31, (workflow.pk + 1) << 31
    found = {
        "workflows": Workflow.objects.filter(pk=workflow.pk),
        "requests": RatingRequest.objects.filter(pk__gte=first, pk__lt=end),
        "stats": WorkflowStats.objects.filter(pk=workflow.pk),
        "batches": Batch.objects.filter(workflow_id=workflow.pk),
        "payloads": BatchPayload.objects.filter(workflow_id=workflow.pk),
        "uploads": Upload.objects.filter(workflow_id=workflow.pk),
        "events": Event.objects.filter(workflow_id=workflow.pk),
        "endpoints": WebhookEndpoint.objects.filter(workflow_id=workflow.pk),
        "deliveries": Delivery.objects.filter(event__workflow_id=workflow.pk),
    }
    return Counter({name: rows.count() for name, rows in found.items() if rows.exists()})


def _observed(world: World, tag: str) -> Ground:
    """A queue that was sampled, where more has ended since; old samples and flows beside it."""
    world.forget()
    ServiceRun.objects.filter(pk=queue_history.SERVICE).delete()
    now = database_now()
    ground = busy(world, tag)
    recovery.run(queue_history.SERVICE, now - 3 * MINUTE)
    world.check()
    recovery.run(queue_history.SERVICE, now - 2 * MINUTE)
    world.deliver()
    world.check()
    Flow.objects.create(
        workflow_id=ground.workflow.pk, at=now - 6 * MINUTE, ended=99, worked=99, model_calls=99,
        accelerator_seconds=0, sampled=True,
    )  # fmt: skip
    old = QueueSample.objects.earliest("pk")
    old.pk, old.at = None, now - settings.AIRS_KEEP_QUEUE_SAMPLES - MINUTE
    old.save()
    return ground


def _sample(world: World, ground: Ground) -> None:
    recovery.run(queue_history.SERVICE, database_now())


def _sampled_once(world: World, ground: Ground) -> None:
    """All that ended is in one sample, and no second of a series in two."""
    world.check()
    _sample(world, ground)
    samples = list(QueueSample.objects.order_by("at"))
    ended = RatingRequest.objects.exclude(state=RequestState.PENDING).count()
    assert sum(sample.ended for sample in samples) == ended
    assert not Flow.objects.filter(sampled=False).exists()
    assert not Flow.objects.filter(ended=99).exists()
    oldest = database_now() - settings.AIRS_KEEP_QUEUE_SAMPLES
    assert samples[0].at > oldest
    series = {(sample.rater_id, sample.priority_class) for sample in samples}
    for key in series:
        ours = [s for s in samples if (s.rater_id, s.priority_class) == key]
        for before, after in pairwise(ours):
            assert after.at - timedelta(seconds=after.period_s) >= before.at


KEEPING_SCENES = [
    Scene(name="retain", arrange=_of_all_ages, act=_retain, go_on=_retain,
          check=_kept_as_long_as_due),
    Scene(name="sample", arrange=_observed, act=_sample, go_on=_sample, check=_sampled_once),
]  # fmt: skip
