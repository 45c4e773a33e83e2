"""Rules for traffic: what operators leave of a model's room to whom."""

from typing import Final

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import Q

from models_admin.models.lengths import ID_LENGTH
from models_admin.policy.traffic_rules import TrafficClass, TrafficPurpose, TrafficTrigger

MAX_POSITION: Final = 1_000_000
MAX_RULE_BATCHES: Final = 100_000


# The labels are those that fulfillment has, so that the API's schema knows each choice once.
CLASSES: Final = [(each.value, each.value) for each in TrafficClass]
TRIGGERS: Final = [(each.value, each.value.capitalize()) for each in TrafficTrigger]
PURPOSES: Final = [(each.value, each.value.capitalize()) for each in TrafficPurpose]


class TrafficRule(models.Model):
    """How much of a model's room some traffic may take; see models_admin.policy.traffic_rules.

    An empty condition holds for all traffic. Raters, owners and workflows are known to whoever
    sends, so that they stand here by name.
    """

    position = models.PositiveIntegerField(
        validators=[MaxValueValidator(MAX_POSITION)],
        help_text="Where it stands in lists: of the rules that hold the strictest decides",
    )
    name = models.CharField(
        max_length=ID_LENGTH, unique=True, help_text="Told to those whose work it holds back"
    )
    enabled = models.BooleanField(default=True)
    rater = models.CharField(max_length=ID_LENGTH, blank=True, default="")
    model = models.CharField(max_length=ID_LENGTH, blank=True, default="")
    priority_class = models.CharField(max_length=16, choices=CLASSES, blank=True, default="")
    trigger = models.CharField(max_length=16, choices=TRIGGERS, blank=True, default="")
    purpose = models.CharField(max_length=16, choices=PURPOSES, blank=True, default="")
    owner = models.CharField(max_length=150, blank=True, default="")
    workflow = models.CharField(
        max_length=ID_LENGTH, blank=True, default="", help_text="Its id, wf_…"
    )
    min_load = models.FloatField(
        default=0.0,
        validators=[MinValueValidator(0.0), MaxValueValidator(1.0)],
        help_text="The share of the window in use from which it holds, 0 to 1; 0 for always",
    )
    max_share = models.FloatField(
        null=True,
        blank=True,
        validators=[MinValueValidator(0.0), MaxValueValidator(1.0)],
        help_text="Of the window of each model, up to 1; a batch at a time is left in any case",
    )
    max_batches = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1), MaxValueValidator(MAX_RULE_BATCHES)],
        help_text="At a time, of all models together",
    )
    block = models.BooleanField(default=False, help_text="Nothing is sent")
    reason = models.CharField(
        max_length=256, blank=True, default="", help_text="Told to those whose work it holds back"
    )

    class Meta:
        ordering = ["position", "name"]
        constraints = [
            models.CheckConstraint(condition=~Q(name=""), name="traffic_rule_name"),
            # Refuses NaN and infinity as well, which PostgreSQL sorts above every number.
            models.CheckConstraint(
                condition=Q(min_load__gte=0.0, min_load__lte=1.0), name="traffic_rule_load"
            ),
            models.CheckConstraint(
                condition=Q(max_share__isnull=True) | Q(max_share__gt=0.0, max_share__lte=1.0),
                name="traffic_rule_share",
            ),
            models.CheckConstraint(
                condition=Q(max_batches__isnull=True) | Q(max_batches__gte=1),
                name="traffic_rule_batches",
            ),
            models.CheckConstraint(
                condition=Q(block=True, max_share__isnull=True, max_batches__isnull=True)
                | (Q(block=False) & (Q(max_share__isnull=False) | Q(max_batches__isnull=False))),
                name="traffic_rule_effect",
            ),
        ]

    def __str__(self) -> str:
        return self.name
