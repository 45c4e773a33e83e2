"""Everything that people do to pools and models, for the admin and the API alike.

Validation names the field and a stable code. Start, stop, restart and resize only write what is
wanted; the host agent brings it about within a second or two. Nothing here holds a transaction
across a network call or the reading of a checkpoint.
"""

from models_admin.services.acts import (
    PINNED_FOR,
    accept_version,
    resize_model,
    restart_model,
    retire_version,
    start_model,
    stop_model,
    unpin_model,
)
from models_admin.services.audit import (
    erase_old,
)
from models_admin.services.fields import (
    ModelFields,
)
from models_admin.services.looking import (
    Seen,
)
from models_admin.services.pools import (
    MAX_DEVICES,
    change_pool,
    devices_used,
    find_pool,
    pool_problems,
    register_pool,
    remove_pool,
    save_pool,
    with_use,
)
from models_admin.services.problems import (
    Problem,
    refuse,
)
from models_admin.services.registering import (
    find_model,
    look_at,
    model_problems,
    register_model,
    remove_model,
    update_model,
)
from models_admin.services.validation import (
    MAX_REPLICAS,
)

__all__ = [
    "MAX_DEVICES",
    "MAX_REPLICAS",
    "PINNED_FOR",
    "ModelFields",
    "Problem",
    "Seen",
    "accept_version",
    "change_pool",
    "devices_used",
    "erase_old",
    "find_model",
    "find_pool",
    "look_at",
    "model_problems",
    "pool_problems",
    "refuse",
    "register_model",
    "register_pool",
    "remove_model",
    "remove_pool",
    "resize_model",
    "restart_model",
    "retire_version",
    "save_pool",
    "start_model",
    "stop_model",
    "unpin_model",
    "update_model",
    "with_use",
]
