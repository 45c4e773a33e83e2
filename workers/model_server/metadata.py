"""What the server says of its model: the protocol's metadata, and Triton's configuration."""

from typing import Any, Final

from workers.model_server.loader import Signature
from workers.model_server.serving import Serving

PLATFORM: Final = "jax_flax"
_CONFIG_TYPES: Final = {"BYTES": "TYPE_STRING", "FP32": "TYPE_FP32", "INT32": "TYPE_INT32"}
"""Triton's configuration has its own names of the protocol's types."""


def model_metadata(
    name: str, version: str, signature: Signature, *, loader: str, size: str, max_tokens: int
) -> dict[str, Any]:
    """The body of `GET /v2/models/{m}`."""
    return {
        "name": name,
        "versions": [version],
        "model_version": version,
        "platform": PLATFORM,
        "inputs": [
            {"name": name, "datatype": "BYTES", "shape": [-1, 1]} for name in signature.inputs
        ],
        "outputs": [
            {
                "name": output.name,
                "datatype": output.datatype,
                "shape": [-1, output.columns],
            }
            for output in signature.outputs
        ],
        "parameters": {"loader": loader, "size": size, "max_tokens": max_tokens},
    }


def model_config(
    name: str, signature: Signature, serving: Serving, *, largest_call: int
) -> dict[str, Any]:
    """The body of `GET /v2/models/{m}/config`: what Triton's clients and tools look for."""
    return {
        "name": name,
        "platform": PLATFORM,
        "backend": "airs",
        "max_batch_size": largest_call,
        "input": [
            {"name": name, "data_type": "TYPE_STRING", "dims": [1]} for name in signature.inputs
        ],
        "output": [
            {
                "name": output.name,
                "data_type": _CONFIG_TYPES[output.datatype],
                "dims": [output.columns],
            }
            for output in signature.outputs
        ],
        "instance_group": [{"count": serving.lanes}],
        "dynamic_batching": {
            "priority_levels": 101,
            "preferred_batch_size": [serving.shaping.rows(step) for step in serving.shaping.steps],
        },
    }


def model_statistics(
    name: str,
    version: str,
    *,
    calls_ok: int,
    calls_failed: int,
    rows: int,
    batches: int,
    busy_s: float,
    queue_s: float,
    waits: int,
) -> dict[str, Any]:
    """One entry of Triton's `model_stats`; `queue_s` is summed over `waits` sequences."""
    return {
        "name": name,
        "version": version,
        "inference_count": rows,
        "execution_count": batches,
        "inference_stats": {
            "success": {"count": calls_ok, "ns": round(1e9 * busy_s)},
            "fail": {"count": calls_failed, "ns": 0},
            "queue": {"count": waits, "ns": round(1e9 * queue_s)},
            "compute_infer": {"count": batches, "ns": round(1e9 * busy_s)},
        },
        "batch_stats": [],
    }
