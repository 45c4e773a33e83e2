"""Who may call the API."""

from django.db import models


class Role(models.TextChoices):
    """What a token may do; each role includes those before it."""

    VIEWER = "viewer"
    SUBMITTER = "submitter"
    OPERATOR = "operator"
    ADMIN = "admin"

    @property
    def rank(self) -> int:
        """How many roles it includes: 0 for the lowest."""
        return list(Role).index(self)


class ApiToken(models.Model):
    """A bearer token; only its SHA-256 is kept."""

    user = models.CharField(max_length=150)
    role = models.CharField(max_length=16, choices=Role.choices, default=Role.SUBMITTER)
    digest = models.CharField(max_length=64, unique=True, editable=False)
    hint = models.CharField(
        max_length=8, editable=False, help_text="Last characters, to tell apart"
    )
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"{self.user} ({self.role}) …{self.hint}"
