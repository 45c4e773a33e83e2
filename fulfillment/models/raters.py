"""Raters and their versions."""

from django.db import models
from django.db.models import Q


class Mode(models.TextChoices):
    """Whether model management tells a rater's window, or the rater finds it by itself."""

    INTEGRATED = "integrated"
    ISOLATED = "isolated"


class KeyLevel(models.TextChoices):
    """How much of a request decides its score."""

    RESULT = "result"
    QUERY = "query"
    PROMPT = "prompt"


class Rater(models.Model):
    """An autorater bound to a model: what workflows name as `rater`."""

    id = models.SlugField(primary_key=True, max_length=64)
    autorater = models.CharField(max_length=64, help_text="Name of the installed plug-in")
    model_id = models.CharField(max_length=64)
    mode = models.CharField(max_length=16, choices=Mode.choices, default=Mode.INTEGRATED)
    key_level = models.CharField(max_length=8, choices=KeyLevel.choices, default=KeyLevel.RESULT)
    freshness_s = models.PositiveIntegerField(default=90 * 86_400)
    deadline_s = models.PositiveIntegerField(default=7_200)
    max_qps = models.FloatField(null=True, blank=True)
    batch_size = models.PositiveSmallIntegerField(default=12)
    max_attempts = models.PositiveSmallIntegerField(default=8)
    score_min = models.FloatField(default=0.0)
    score_max = models.FloatField(default=4.0)
    integer_scores = models.BooleanField(default=False)
    prompt_template = models.TextField(blank=True, default="")
    config = models.JSONField(default=dict, blank=True)
    current_version = models.ForeignKey(
        "RaterVersion", null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    paused_code = models.CharField(max_length=64, blank=True, default="")
    paused_detail = models.TextField(blank=True, default="")
    paused_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(score_min__lt=models.F("score_max")), name="rater_score_range"
            ),
            models.CheckConstraint(
                condition=Q(batch_size__gte=1, batch_size__lte=60), name="rater_batch_size"
            ),
            models.CheckConstraint(condition=Q(max_attempts__gte=1), name="rater_max_attempts"),
        ]

    def __str__(self) -> str:
        return self.id


class RaterVersion(models.Model):
    """Everything that decides a score, frozen; a workflow keeps the version it was made with."""

    rater = models.ForeignKey(Rater, on_delete=models.PROTECT, related_name="versions")
    number = models.PositiveIntegerField()
    digest = models.UUIDField()
    spec = models.JSONField(help_text="The fields of workers.autoraters.RaterSpec")
    created_at = models.DateTimeField()
    retired_at = models.DateTimeField(null=True, blank=True)
    erased_to = models.BigIntegerField(
        default=0,
        db_default=0,
        editable=False,
        help_text="Up to this id, retention has left no rating of it to erase",
    )

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["rater", "digest"], name="rater_version_digest"),
            models.UniqueConstraint(fields=["rater", "number"], name="rater_version_number"),
        ]

    def __str__(self) -> str:
        return f"{self.rater_id}@{self.number}"
