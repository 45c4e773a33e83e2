"""The archive of ratings."""

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
