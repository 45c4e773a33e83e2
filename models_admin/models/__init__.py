"""Tables of model management: what may serve, what is wanted, and which servers live.

Configuration is written by services (for admin and API), `ModelServer` rows by the host agent
only, `ModelVersion` by whoever sees a version first.
"""

from models_admin.models.configs import (
    ModelConfig,
    ModelKind,
    Protocol,
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
from models_admin.models.servers import (
    ModelServer,
    UtilizationSample,
)
from models_admin.models.versions import (
    ModelLabel,
    ModelVersion,
)

__all__ = [
    "VERSION_LENGTH",
    "AcceleratorPool",
    "ModelConfig",
    "ModelKind",
    "ModelLabel",
    "ModelServer",
    "ModelVersion",
    "Outcome",
    "PoolKind",
    "PoolOutlook",
    "Protocol",
    "RebalanceDecision",
    "Rebalancing",
    "UtilizationSample",
]
