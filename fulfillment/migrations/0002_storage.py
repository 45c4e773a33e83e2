"""Storage of the hot tables: room for updates in place, and a vacuum that keeps up.

A request row is written once and updated once: with room on its page the update touches no index
(HOT). Batches, flights and deltas live for seconds: their dead rows must go soon.
"""

from django.db import migrations

_SETTINGS = {
    "fulfillment_ratingrequest": "fillfactor = 50",
    "fulfillment_workflow": "fillfactor = 70",
    "fulfillment_workflowstats": "fillfactor = 70",
    "fulfillment_batch": (
        "fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02,"
        " autovacuum_vacuum_threshold = 5000, autovacuum_analyze_scale_factor = 0.05"
    ),
    "fulfillment_flight": (
        "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,"
        " autovacuum_vacuum_cost_delay = 0"
    ),
    "fulfillment_statsdelta": (
        "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000"
    ),
    "fulfillment_executorboot": "fillfactor = 50",
    "fulfillment_servicerun": "fillfactor = 50",
}


class Migration(migrations.Migration):
    dependencies = [("fulfillment", "0001_initial")]

    operations = [
        migrations.RunSQL(
            f"ALTER TABLE {table} SET ({settings})",
            f"ALTER TABLE {table} RESET ({', '.join(s.split('=')[0] for s in settings.split(','))})",
        )
        for table, settings in _SETTINGS.items()
    ]
