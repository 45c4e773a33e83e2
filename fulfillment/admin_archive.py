"""Admin page of purges: who had what erased, and how far that is.

Loaded by the app's configuration.
"""

from django.contrib import admin

from fulfillment.admin import ReadOnlyAdmin
from fulfillment.models import Purge


@admin.register(Purge)
class PurgeAdmin(ReadOnlyAdmin):
    """Purges of the archive; they are ordered by the API."""

    ordering = ("-pk",)
    list_display = (
        "public_id", "actor", "dry_run", "stage", "rater_id", "version_number", "by_url", "before",
        "ratings", "requests", "failed", "payloads", "created_at", "finished_at",
    )  # fmt: skip
    list_per_page = 100

    @admin.display(boolean=True, description="by url")
    def by_url(self, purge: Purge) -> bool:
        return purge.url_digest is not None
