"""Removing what died half-way: uploads that nobody goes on with, and the workflows they began."""

from datetime import datetime, timedelta

from django.db.models import Exists, OuterRef

from fulfillment.control import UPLOAD_SILENCE
from fulfillment.erasing import Budget, begin_erasure
from fulfillment.models import Upload, Workflow
from fulfillment.policy.lifecycle import WorkflowState


def remove_dead_uploads(budget: Budget, now: datetime, *, keep_keys: timedelta) -> None:
    """Remove RECEIVING workflows whose upload stands still; the client's retry starts afresh.

    An append that stands still may be resumed for as long as its key is kept.
    """
    silent = now - UPLOAD_SILENCE
    dead = Upload.objects.filter(
        finished_at=None,
        creates=True,
        heartbeat_at__lt=silent,
        workflow__state=WorkflowState.RECEIVING,
    ).values_list("id", "holder")
    for upload_id, holder in dead:
        # Whoever takes it over changes the holder, and who goes on with it the heartbeat: then it
        # lives, and is left alone.
        budget.erased += Upload.objects.filter(
            pk=upload_id, holder=holder, heartbeat_at__lt=silent, finished_at=None
        ).delete()[0]
    budget.erased += Upload.objects.filter(
        finished_at=None, heartbeat_at__lt=now - keep_keys
    ).delete()[0]
    # Without its record nobody can go on with a workflow: what is left of it is only erased, also
    # when the run that removed the record died before it came here.
    left = Workflow.objects.filter(
        ~Exists(Upload.objects.filter(workflow_id=OuterRef("pk"))),
        state=WorkflowState.RECEIVING,
        finished_at=None,  # as the index of unfinished ones has it
        created_at__lt=silent,
    ).values_list("pk", flat=True)
    for workflow_id in left:
        budget.erased += begin_erasure(workflow_id, now)
