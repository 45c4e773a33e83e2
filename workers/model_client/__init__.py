"""The client for model servers: one call in, one outcome out."""

from fulfillment.retry_after import LONGEST_S, parse_retry_after
from workers.model_client.client import CallResult, ModelClient
from workers.model_client.endpoint import Endpoint
from workers.model_client.oip import ModelMetadata
from workers.model_client.outcomes import CallOutcome

__all__ = [
    "LONGEST_S",
    "CallOutcome",
    "CallResult",
    "Endpoint",
    "ModelClient",
    "ModelMetadata",
    "parse_retry_after",
]
