"""The client for model servers: one call in, one outcome out."""

from workers.model_client.client import CallResult, ModelClient, ModelMetadata
from workers.model_client.endpoint import Endpoint
from workers.model_client.outcomes import CallOutcome
from workers.model_client.retry_after import LONGEST_S, parse_retry_after

__all__ = [
    "LONGEST_S",
    "CallOutcome",
    "CallResult",
    "Endpoint",
    "ModelClient",
    "ModelMetadata",
    "parse_retry_after",
]
