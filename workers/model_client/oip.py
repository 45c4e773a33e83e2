"""What the Open Inference Protocol looks like: the body of a call, the metadata of a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from fulfillment.policy.priority import oip_priority
from workers.autoraters.protocol import OipCall
from workers.model_client.outcomes import CallOutcome, Verdict

TRITON = "triton"
"""The only direction of urgency that the protocol's servers know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelMetadata:
    """What a server says of its model; `outcome` is SUCCESS when it said it."""

    outcome: CallOutcome
    code: str = ""
    detail: str = ""
    versions: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """The version that answers; "" where the server names none or several."""
        return self.versions[0] if len(self.versions) == 1 else ""


def parameters(priority: int, limit_s: float) -> dict[str, int]:
    """Return Triton's parameters: its direction of urgency, its microseconds."""
    return {"priority": oip_priority(priority), "timeout": int(limit_s * 1_000_000)}


def infer_body(
    call: OipCall, *, rows: int, request_id: str, parameters: Mapping[str, int]
) -> bytes:
    """Return the request; raise orjson.JSONEncodeError for text that is no Unicode."""
    if any(len(column) != rows for column in call.inputs.values()):
        raise ValueError(f"every input of the call needs {rows} rows")
    document: dict[str, Any] = {
        "id": request_id,
        "inputs": [
            {"name": name, "shape": [rows, 1], "datatype": "BYTES", "data": column}
            for name, column in call.inputs.items()
        ],
    }
    if not call.all_outputs:
        document["outputs"] = [{"name": name} for name in call.outputs]
    if parameters:
        document["parameters"] = parameters
    return orjson.dumps(document)


def read_metadata(body: bytes) -> ModelMetadata | Verdict:
    """Return the metadata of a 200, or that there is none."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("name"), str):
        return Verdict(
            outcome=CallOutcome.INCOMPLETE, code="bad_answer", detail="no model metadata"
        )
    versions, parameters = document.get("versions"), document.get("parameters")
    return ModelMetadata(
        outcome=CallOutcome.SUCCESS,
        versions=tuple(map(str, versions)) if isinstance(versions, list) else (),
        inputs=_names(document.get("inputs")),
        outputs=_names(document.get("outputs")),
        parameters=parameters if isinstance(parameters, dict) else {},
    )


def _names(tensors: Any) -> tuple[str, ...]:
    if not isinstance(tensors, list):
        return ()
    return tuple(str(tensor.get("name")) for tensor in tensors if isinstance(tensor, dict))
