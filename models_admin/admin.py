"""Admin of model management: pools and models with their actions, servers and versions to read.

Forms and actions call the services that the API calls; each action is permission-checked, reports
what happened and leaves a log entry. Secrets are written here and never shown.
"""

# Each registers its pages; Django itself loads a module named `admin` only.
from models_admin import (
    admin_audit,
    admin_externals,
    admin_models,
    admin_pools,
    admin_samples,
    admin_servers,
    admin_traffic,
)

__all__ = [
    "admin_audit",
    "admin_externals",
    "admin_models",
    "admin_pools",
    "admin_samples",
    "admin_servers",
    "admin_traffic",
]
