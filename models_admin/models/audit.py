"""Who did what to models and pools, and what that changed."""

from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.db.models.functions import Now

from models_admin.models.lengths import ID_LENGTH

ACTOR_LENGTH = 150
"""As long as a user's name may be."""


class AuditEntry(models.Model):
    """One act of a person or a service, written in the transaction of the act itself.

    No foreign keys: what was done outlives what it was done to.
    """

    at = models.DateTimeField(db_default=Now(), db_index=True, help_text="By the database's clock")
    actor = models.CharField(max_length=ACTOR_LENGTH, help_text="User, or part of AIRS")
    action = models.CharField(max_length=64)
    kind = models.CharField(max_length=32, help_text="Of the object: model, pool, …")
    object_id = models.CharField(max_length=ID_LENGTH)
    detail = models.JSONField(
        default=dict,
        encoder=DjangoJSONEncoder,
        help_text="What changed, by field: [before, after]; of a secret only that it changed",
    )

    class Meta:
        verbose_name_plural = "audit entries"
        indexes = [models.Index(fields=["kind", "object_id", "id"], name="audit_of_object")]

    def __str__(self) -> str:
        return f"{self.action} {self.object_id} by {self.actor}"
