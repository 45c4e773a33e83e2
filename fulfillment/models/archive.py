"""The archive of ratings, what is erased of it on demand, and how stale it was found to be."""

import uuid

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q

from fulfillment.models.raters import RaterVersion


class Rating(models.Model):
    """The archive: append-only; the newest reusable and fresh one of a fingerprint is the entry."""

    fingerprint = models.UUIDField()
    rater_version = models.ForeignKey(
        RaterVersion,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        related_name="+",
    )
    workflow_id = models.BigIntegerField(help_text="The workflow that had it computed")
    score = models.FloatField()
    label = models.TextField(null=True)  # noqa: DJ001
    output = models.JSONField(null=True)
    url_digest = models.UUIDField(null=True)
    produced_at = models.DateTimeField()
    reusable = models.BooleanField(default=True, db_default=True)

    class Meta:
        indexes = [
            models.Index(fields=["fingerprint"], name="rating_fingerprint"),
            models.Index(
                fields=["url_digest"],
                condition=Q(url_digest__isnull=False),
                name="rating_url",
            ),
        ]

    def __str__(self) -> str:
        return f"rating {self.pk}"


def new_purge_id() -> str:
    """Return a fresh public id of a purge."""
    return f"prg_{uuid.uuid4().hex}"


class PurgeStage(models.IntegerChoices):
    """What a purge walks through next."""

    RATINGS = 0
    REQUESTS = 1
    DONE = 2


class Purge(models.Model):
    """One purge, how far it is, and the record of who ordered it.

    `position` and what was erased below it are committed together, so that whoever goes on after a
    crash goes on there. The url itself is not kept: it may be what must be forgotten.
    """

    public_id = models.CharField(max_length=40, unique=True, default=new_purge_id)
    actor = models.CharField(max_length=150)
    rater_id = models.CharField(max_length=64, blank=True, default="")
    version_number = models.PositiveIntegerField(null=True)
    version_ids = ArrayField(models.BigIntegerField(), null=True, help_text="NULL: all versions")
    before = models.DateTimeField(null=True)
    url_digest = models.UUIDField(null=True)
    dry_run = models.BooleanField()
    stage = models.PositiveSmallIntegerField(choices=PurgeStage.choices, default=PurgeStage.RATINGS)
    position = models.BigIntegerField(default=0, help_text="The last id looked at in this stage")
    last_rating_id = models.BigIntegerField(help_text="Younger rows are not touched")
    last_request_id = models.BigIntegerField(help_text="Younger rows are not touched")
    ratings = models.BigIntegerField(default=0)
    requests = models.BigIntegerField(default=0)
    failed = models.BigIntegerField(default=0, help_text="Of these requests: open ones")
    payloads = models.BigIntegerField(default=0)
    created_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(stage=PurgeStage.DONE, finished_at__isnull=False)
                | (~Q(stage=PurgeStage.DONE) & Q(finished_at__isnull=True)),
                name="purge_done_has_time",
            ),
        ]
        indexes = [
            models.Index(
                fields=["id"], condition=Q(finished_at__isnull=True), name="purge_unfinished"
            ),
        ]

    def __str__(self) -> str:
        return self.public_id


class ShadowSample(models.Model):
    """A hit that was drawn to be computed again when its rater has nothing else to do."""

    rater_version = models.ForeignKey(
        RaterVersion, on_delete=models.DO_NOTHING, db_constraint=False, related_name="+"
    )
    fingerprint = models.UUIDField(unique=True)
    url_digest = models.UUIDField(null=True)
    score = models.FloatField(help_text="What the archive answered")
    produced_at = models.DateTimeField(help_text="When that had been rated")
    sampled_at = models.DateTimeField()
    data = models.BinaryField(help_text="The key fields, as `documents.pack` made them")
    workflow_id = models.BigIntegerField(
        null=True, db_index=True, help_text="The workflow that computes it again"
    )

    def __str__(self) -> str:
        return f"shadow sample {self.pk}"


class ShadowScore(models.Model):
    """What the archive answered at some age, and what the same rater version says now."""

    rater_version = models.ForeignKey(
        RaterVersion, on_delete=models.DO_NOTHING, db_constraint=False, related_name="+"
    )
    old_score = models.FloatField()
    new_score = models.FloatField()
    age_s = models.PositiveIntegerField(help_text="Age of the old score when it was taken")
    recorded_at = models.DateTimeField(db_index=True)

    def __str__(self) -> str:
        return f"{self.old_score} after {self.age_s} s: {self.new_score}"
