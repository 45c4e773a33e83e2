"""What operators decide about scheduling: rules for priorities, weights of owners."""

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import F, Q

from fulfillment.models.access import Role
from fulfillment.models.raters import Rater
from fulfillment.models.workflows import Purpose, Trigger

MAX_POSITION = 1_000_000
MAX_CHECKPOINT_AGE_S = 10 * 365 * 86_400
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
_SCORES = (MinValueValidator(0), MaxValueValidator(100))


class PriorityRule(models.Model):
    """Which priority workflows of a kind get; see fulfillment.policy.priority_rules.

    An empty condition holds for every workflow.
    """

    position = models.PositiveIntegerField(
        unique=True,
        validators=[MaxValueValidator(MAX_POSITION)],
        help_text="Of the rules that match, the lowest position decides",
    )
    name = models.CharField(
        max_length=64, unique=True, help_text="Told to those whose priority it decides"
    )
    enabled = models.BooleanField(default=True)
    trigger = models.CharField(max_length=16, choices=Trigger.choices, blank=True, default="")
    purpose = models.CharField(max_length=16, choices=Purpose.choices, blank=True, default="")
    min_role = models.CharField(
        max_length=16,
        choices=Role.choices,
        default=Role.VIEWER,
        help_text="Of who asks; it holds for higher roles as well",
    )
    owner = models.CharField(max_length=150, blank=True, default="")
    rater = models.ForeignKey(Rater, null=True, blank=True, on_delete=models.CASCADE)
    max_checkpoint_age_s = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1), MaxValueValidator(MAX_CHECKPOINT_AGE_S)],
        help_text="Only while its rater has had its checkpoint for less than this. A "
        "new-checkpoint launch is purpose launch with 604,800 s (a week) here",
    )
    default_score = models.PositiveSmallIntegerField(
        default=50, validators=_SCORES, help_text="0-100, for a workflow that asks for no priority"
    )
    ceiling = models.PositiveSmallIntegerField(
        default=100, validators=_SCORES, help_text="0-100; more is not given, whatever is asked"
    )

    class Meta:
        ordering = ["position"]
        constraints = [
            models.CheckConstraint(condition=~Q(name=""), name="priority_rule_name"),
            models.CheckConstraint(
                condition=Q(trigger__in=["", *Trigger.values]), name="priority_rule_trigger"
            ),
            models.CheckConstraint(
                condition=Q(purpose__in=["", *Purpose.values]), name="priority_rule_purpose"
            ),
            models.CheckConstraint(
                condition=Q(min_role__in=Role.values), name="priority_rule_min_role"
            ),
            models.CheckConstraint(
                condition=Q(max_checkpoint_age_s__isnull=True) | Q(max_checkpoint_age_s__gte=1),
                name="priority_rule_checkpoint_age",
            ),
            models.CheckConstraint(
                condition=Q(default_score__lte=F("ceiling"), ceiling__lte=100),
                name="priority_rule_scores",
            ),
        ]

    def __str__(self) -> str:
        return self.name


class OwnerShare(models.Model):
    """How much of a contended rater an owner may have beside others; no row means weight 1."""

    owner = models.CharField(primary_key=True, max_length=150)
    weight = models.FloatField(
        default=1.0,
        validators=[MinValueValidator(MIN_WEIGHT), MaxValueValidator(MAX_WEIGHT)],
        help_text="2 means twice the share of an owner of weight 1 while both wait; 0.01 to 100",
    )
    note = models.CharField(max_length=256, blank=True, default="", help_text="Why")

    class Meta:
        ordering = ["owner"]
        constraints = [
            models.CheckConstraint(condition=~Q(owner=""), name="owner_share_owner"),
            # Refuses NaN and infinity as well, which PostgreSQL sorts above every number.
            models.CheckConstraint(
                condition=Q(weight__gte=MIN_WEIGHT, weight__lte=MAX_WEIGHT),
                name="owner_share_weight",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.owner}: {self.weight:g}"
