"""Tables of model management: what may serve, what is wanted, and which servers live.

Configuration is written by services (for admin and API), `ModelServer` rows by the host agent
only, `ModelVersion` by whoever sees a version first.
"""

from models_admin.models.audit import (
    ACTOR_LENGTH,
    AuditEntry,
)
from models_admin.models.configs import (
    CHAT,
    NO_PRIORITY,
    STYLES,
    ModelConfig,
    ModelKind,
    PriorityStyle,
    Protocol,
    ScoringEndpoint,
)
from models_admin.models.health import (
    ExternalHealth,
    health_of,
)
from models_admin.models.lengths import (
    VERSION_LENGTH,
)
from models_admin.models.pools import (
    AcceleratorPool,
    Outcome,
    PoolKind,
    PoolOutlook,
    RebalanceDecision,
    Rebalancing,
)
from models_admin.models.samples import (
    ReplicaSample,
)
from models_admin.models.servers import (
    ModelServer,
    UtilizationSample,
)
from models_admin.models.traffic import (
    MAX_POSITION,
    MAX_RULE_BATCHES,
    TrafficRule,
)
from models_admin.models.versions import (
    ModelLabel,
    ModelVersion,
)
from models_admin.models.windows import (
    TunedWindow,
    tuned_window,
    window_of,
)

__all__ = [
    "ACTOR_LENGTH",
    "CHAT",
    "MAX_POSITION",
    "MAX_RULE_BATCHES",
    "NO_PRIORITY",
    "STYLES",
    "VERSION_LENGTH",
    "AcceleratorPool",
    "AuditEntry",
    "ExternalHealth",
    "ModelConfig",
    "ModelKind",
    "ModelLabel",
    "ModelServer",
    "ModelVersion",
    "Outcome",
    "PoolKind",
    "PoolOutlook",
    "PriorityStyle",
    "Protocol",
    "RebalanceDecision",
    "Rebalancing",
    "ReplicaSample",
    "ScoringEndpoint",
    "TrafficRule",
    "TunedWindow",
    "UtilizationSample",
    "health_of",
    "tuned_window",
    "window_of",
]
