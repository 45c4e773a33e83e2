"""Which workflows were given up (`commitments`): they are served as best effort, all the way.

So their batches wait, leave, travel and are computed in that class, and are of their own again once
they are committed to. This is SQL, for statements that know a workflow as `w`.
"""

from datetime import timedelta
from typing import Final

BELIEVED: Final = timedelta(minutes=5)
"""A forecast, or a count of replicas, that is older says nothing any more."""
BEST_EFFORT: Final = "(w.best_effort OR coalesce(f.cut_batches, 0) > 0)"
"""Whether it is of that class, with `forecast` joined."""


def forecast(at: str) -> str:
    """Join the forecast that is believed at an instant, an SQL expression.

    It is one of this round that was made of late.
    """
    return (
        "LEFT JOIN fulfillment_workflowforecast f"
        " ON f.workflow_id = w.id AND f.round = w.round AND f.settled_at IS NULL"
        f" AND f.made_at > {at} - interval '{BELIEVED.total_seconds()} seconds'"
    )
