"""Shadow refresh: how stale is the archive really? A small share of its hits is computed again.

1. Ingest draws samples (sampling): the row, the score it was answered with, and that score's age.
2. When nothing else is to be done for a model, a few samples of a rater become a best-effort
   workflow of ours that bypasses the archive. Its ratings enter the archive like any other.
3. When that has ended, old and new score are recorded by age, and the samples are gone.

Nothing here may delay real work: while anything of a model's raters is open, or half of the
executors' slots are taken, nothing is made; what is made is small, and last in every order.
"""

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta

from django.conf import settings
from django.db import connection, transaction

from fulfillment import documents, intake, leases
from fulfillment.errors import FulfillmentError
from fulfillment.intake import WorkflowForm
from fulfillment.models import RaterVersion, ShadowSample, ShadowScore, Workflow
from fulfillment.policy.lifecycle import RequestState
from fulfillment.spool import Record

logger = logging.getLogger(__name__)

OWNER = "airs-shadow"
"""Owner of the workflows made here: only operators see them."""
MOST_SAMPLES = 48
"""Samples of one workflow: a few batches, so that whoever comes next finds the windows free."""
MOST_KEPT = 10_000
"""Samples that wait: beyond it the oldest are dropped."""
SAMPLES_KEPT = timedelta(days=1)
DEADLINE_S = 600
_CHUNK = 10_000


def run_once(now: datetime) -> int:
    """Record what has ended, drop what is old, and make what idle models can compute."""
    recorded = sum(_record(workflow, now) for workflow in _ended())
    _forget(now)
    return recorded + sum(_make(version, now) for version in _idle_versions(now))


def _ended() -> list[Workflow]:
    return list(
        Workflow.objects.filter(
            pk__in=ShadowSample.objects.filter(workflow_id__isnull=False)
            .values_list("workflow_id", flat=True)
            .distinct(),
            finished_at__isnull=False,
        )
    )


def _record(workflow: Workflow, now: datetime) -> int:
    """Keep old and new score of a workflow's samples, and drop the samples, all at once."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            """
            WITH gone AS (
                DELETE FROM fulfillment_shadowsample WHERE workflow_id = %(workflow)s RETURNING *
            )
            INSERT INTO fulfillment_shadowscore
                (rater_version_id, old_score, new_score, age_s, recorded_at)
            SELECT g.rater_version_id, g.score, r.score,
                   greatest(0, extract(epoch FROM g.sampled_at - g.produced_at))::int, %(now)s
            FROM gone g JOIN fulfillment_ratingrequest r
              ON r.workflow_id = %(workflow)s AND r.fingerprint = g.fingerprint
            WHERE r.state = %(completed)s AND r.id >= %(workflow)s::bigint << 31
              AND r.id < (%(workflow)s::bigint + 1) << 31
            """,
            {
                "workflow": workflow.pk,
                "now": now,
                "completed": RequestState.COMPLETED,
            },
        )
        return int(cursor.rowcount)


def _forget(now: datetime) -> None:
    """Keep the tables within their bounds."""
    waiting = ShadowSample.objects.filter(workflow_id=None)
    beyond = waiting.order_by("-pk").values_list("pk", flat=True)[MOST_KEPT : MOST_KEPT + 1].first()
    if beyond is not None:
        waiting.filter(pk__lte=beyond).delete()
    ShadowSample.objects.filter(sampled_at__lt=now - SAMPLES_KEPT).delete()
    old = ShadowScore.objects.filter(recorded_at__lt=now - settings.AIRS_KEEP_SHADOW_SCORES)
    # A chunk a run, sixty times what a run can add.
    ShadowScore.objects.filter(pk__in=old.order_by("recorded_at")[:_CHUNK].values("pk")).delete()


def _idle_versions(now: datetime) -> list[RaterVersion]:
    """Return current rater versions with samples whose model has nothing to do.

    One version a model, so that the next sees the work of this one.
    """
    if not settings.AIRS_SHADOW_REFRESH or not _slots_free(now):
        return []
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT DISTINCT ON (r.model_id) r.current_version_id
            FROM fulfillment_rater r
            WHERE r.paused_at IS NULL
              AND EXISTS (SELECT FROM fulfillment_shadowsample s
                          WHERE s.rater_version_id = r.current_version_id
                            AND s.workflow_id IS NULL)
              AND NOT EXISTS (
                SELECT FROM fulfillment_workflow w JOIN fulfillment_rater o ON o.id = w.rater_id
                WHERE w.finished_at IS NULL AND o.model_id = r.model_id AND EXISTS (
                    SELECT FROM fulfillment_batch b
                    WHERE b.workflow_id = w.id AND b.state <> 4))
            ORDER BY r.model_id, r.id
            """
        )
        ids = [row[0] for row in cursor.fetchall()]
    return list(RaterVersion.objects.select_related("rater").filter(pk__in=ids))


def _slots_free(now: datetime) -> bool:
    """Say whether at least half of what live executors can hold is free."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT (SELECT coalesce(sum(slots), 0) FROM fulfillment_executorboot
                    WHERE heartbeat_at > %s),
                   (SELECT count(*) FROM fulfillment_batch WHERE state = 1)
            """,
            [now - leases.SILENCE],
        )
        slots, leased = cursor.fetchone()
    return bool(slots > 2 * leased)


def _make(version: RaterVersion, now: datetime) -> int:
    """Make a workflow of some samples; killed before they know of it, they are used again."""
    samples = list(
        ShadowSample.objects.filter(rater_version=version, workflow_id=None).order_by("pk")[
            :MOST_SAMPLES
        ]
    )
    try:
        workflow = intake.submit_own(
            form=WorkflowForm(
                rater=version.rater_id,
                name="shadow refresh",
                priority=0,
                best_effort=True,
                trigger="automatic",
                purpose="guardrail",
                deadline_s=DEADLINE_S,
                bypass=True,
            ),
            version=version,
            records=_records(samples),
            owner=OWNER,
        )
    except FulfillmentError as error:  # a full backlog, a model that is gone: another time
        logger.info("no shadow refresh of %s: %s", version.rater_id, error.detail)
        return 0
    if workflow is None:
        return 0
    ShadowSample.objects.filter(pk__in=[sample.pk for sample in samples]).update(
        workflow_id=workflow.pk
    )
    return len(samples)


def _records(samples: Sequence[ShadowSample]) -> list[Record]:
    return [
        Record(
            line=line,
            request_id=None,
            request_digest=None,
            query_id=None,
            result_id=None,
            side=None,
            result_weight=None,
            query_weight=None,
            fingerprint=sample.fingerprint.hex,
            url_digest=sample.url_digest.hex if sample.url_digest else None,
            item=documents.expanded(bytes(sample.data)),
            extra=None,
            warnings=(),
        )
        for line, sample in enumerate(samples, 1)
    ]
