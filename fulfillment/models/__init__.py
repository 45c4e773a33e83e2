"""Tables of Rating Fulfillment: the state of every workflow, request and batch, and the archive.

PostgreSQL is the truth. Hot tables carry no database foreign key (a key check would lock the
workflow row, and no lock may stop the dispatcher); bulk paths write them by COPY and set-based
SQL in intake, dispatch, finish and completion. The invariants I1-I13 are those of
docs/architecture.md.
"""

from fulfillment.models.access import (
    ApiToken,
    Role,
)
from fulfillment.models.archive import (
    Purge,
    PurgeStage,
    Rating,
    ShadowSample,
    ShadowScore,
)
from fulfillment.models.events import (
    Delivery,
    DeliveryAttempt,
    Event,
    WebhookEndpoint,
    new_event_id,
)
from fulfillment.models.forecasts import (
    RaterCost,
    WorkflowForecast,
)
from fulfillment.models.operations import (
    AcceleratorUse,
    Flow,
    QueueSample,
)
from fulfillment.models.queue import (
    Batch,
    BatchPayload,
    BatchWait,
    ExecutorBoot,
    FailedFlight,
    Flight,
    OwnerUsage,
    SendWindow,
    ServiceRun,
)
from fulfillment.models.raters import (
    KeyLevel,
    Mode,
    Rater,
    RaterVersion,
)
from fulfillment.models.scheduling import (
    MAX_CHECKPOINT_AGE_S,
    MAX_POSITION,
    MAX_WEIGHT,
    MIN_WEIGHT,
    OwnerShare,
    PriorityRule,
)
from fulfillment.models.workflows import (
    POSITION_BITS,
    PROGRESS_FIELDS,
    Erasure,
    Purpose,
    RatingRequest,
    Side,
    StatsDelta,
    Trigger,
    Upload,
    Workflow,
    WorkflowStats,
    new_workflow_id,
    request_key,
)

__all__ = [
    "MAX_CHECKPOINT_AGE_S",
    "MAX_POSITION",
    "MAX_WEIGHT",
    "MIN_WEIGHT",
    "POSITION_BITS",
    "PROGRESS_FIELDS",
    "AcceleratorUse",
    "ApiToken",
    "Batch",
    "BatchPayload",
    "BatchWait",
    "Delivery",
    "DeliveryAttempt",
    "Erasure",
    "Event",
    "ExecutorBoot",
    "FailedFlight",
    "Flight",
    "Flow",
    "KeyLevel",
    "Mode",
    "OwnerShare",
    "OwnerUsage",
    "PriorityRule",
    "Purge",
    "PurgeStage",
    "Purpose",
    "QueueSample",
    "Rater",
    "RaterCost",
    "RaterVersion",
    "Rating",
    "RatingRequest",
    "Role",
    "SendWindow",
    "ServiceRun",
    "ShadowSample",
    "ShadowScore",
    "Side",
    "StatsDelta",
    "Trigger",
    "Upload",
    "WebhookEndpoint",
    "Workflow",
    "WorkflowForecast",
    "WorkflowStats",
    "new_event_id",
    "new_workflow_id",
    "request_key",
]
