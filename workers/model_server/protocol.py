"""Open Inference Protocol v2 on the wire: bodies to values and back. No sockets, no model.

Inputs and outputs are the loaded model's (`loader.Signature`): as a rule `query` and `text`, BYTES
[N,1] (or [N]; `data` flat or nested), and

    score         FP32  [N,1]
    tokens        INT32 [N,1]  tokens of the text before it was cut to the model's `max_tokens`
    query_tokens  INT32 [N,1]  the same of the query
    embedding     FP32  [N,D]  a vector of the model's; only when asked for by name

A request that names no outputs gets the signature's default ones. A row was shortened where one of
its counts is above `max_tokens`, which stands in every answer's `parameters` and in the metadata:
two small integers a row tell both the fact and the original length. `parameters.compute_us` is the
answer's share of the devices' time, in microseconds of one device.

Triton's binary data extension is read and written too, because Triton's own client uses it unless
told otherwise: raw tensors follow the JSON, whose length stands in a header.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workers.model_server.loader import Signature

HEADER_LENGTH = "Inference-Header-Content-Length"
DEFAULT_PRIORITY = 51
"""What priority 0 or none stands for: the middle of 1 to 101."""

EXTENSIONS = [
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "schedule_policy",
    "statistics",
]


class BadRequest(Exception):
    """The request cannot be understood; the text names the field."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(f"{field}: {detail}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedOutput:
    """One output and the form that it is wanted in."""

    name: str
    binary: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class InferRequest:
    """A call that can be served; its inputs are equally long and not empty."""

    id: str | None
    inputs: Mapping[str, Sequence[str]]
    rows: int
    outputs: Sequence[RequestedOutput]
    priority: int
    timeout_s: float | None


def parse_infer(
    body: bytes, json_length: str | None = None, *, signature: Signature
) -> InferRequest:
    """Read an infer request, or raise BadRequest. `json_length` is the value of HEADER_LENGTH."""
    head, raw = split_body(body, json_length)
    try:
        document = json.loads(head)
    except (ValueError, RecursionError) as error:
        raise BadRequest("body", f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise BadRequest("body", "not an object")
    parameters = mapping(document, "parameters", "parameters")
    inputs = read_inputs(document.get("inputs"), raw, signature.inputs)
    request_id = document.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise BadRequest("id", "not a string")
    rows = {name: len(strings) for name, strings in inputs.items()}
    if len(set(rows.values())) != 1:
        raise BadRequest("inputs", f"they differ in their numbers of rows: {rows}")
    timeout_us = natural(parameters, "timeout")
    return InferRequest(
        id=request_id,
        inputs=inputs,
        rows=next(iter(rows.values())),
        outputs=read_outputs(document.get("outputs"), parameters, signature),
        priority=natural(parameters, "priority") or DEFAULT_PRIORITY,
        timeout_s=timeout_us / 1e6 if timeout_us else None,
    )


def split_body(body: bytes, json_length: str | None) -> tuple[bytes, memoryview]:
    """The JSON part and the raw tensors behind it."""
    if json_length is None:
        return body, memoryview(b"")
    # A number of thousands of digits is none that Python reads.
    if not json_length.isdecimal() or len(json_length) > 19 or int(json_length) > len(body):
        shown = json_length[:40]
        raise BadRequest(HEADER_LENGTH, f"{shown!r} does not fit a body of {len(body)} bytes")
    end = int(json_length)
    return body[:end], memoryview(body)[end:]


def read_inputs(found: object, raw: memoryview, names: Sequence[str]) -> dict[str, list[str]]:
    """The strings of each of the model's inputs, by name."""
    if not isinstance(found, list):
        raise BadRequest("inputs", "missing, or not a list")
    values: dict[str, list[str]] = {}
    for number, tensor in enumerate(found):
        if not isinstance(tensor, dict):
            raise BadRequest(f"inputs[{number}]", "not an object")
        name = tensor.get("name")
        if not isinstance(name, str) or name not in names or name in values:
            raise BadRequest(f"inputs[{number}].name", f"{name!r} is unknown or given twice")
        values[name], raw = read_input(f"inputs.{name}", tensor, raw)
    for name in names:
        if name not in values:
            raise BadRequest(f"inputs.{name}", "missing")
    if len(raw):
        raise BadRequest("body", f"{len(raw)} bytes belong to no input")
    return values


def read_input(
    field: str, tensor: Mapping[str, Any], raw: memoryview
) -> tuple[list[str], memoryview]:
    """One input's strings, and the raw bytes that are left for the next."""
    if tensor.get("datatype") != "BYTES":
        raise BadRequest(f"{field}.datatype", "must be BYTES")
    rows = row_count(f"{field}.shape", tensor.get("shape"))
    size = natural(mapping(tensor, "parameters", f"{field}.parameters"), "binary_data_size")
    if size is None:
        strings = flat_strings(f"{field}.data", tensor.get("data"))
    elif size > len(raw):
        raise BadRequest(f"{field}.parameters.binary_data_size", f"only {len(raw)} bytes follow")
    else:
        strings, raw = binary_strings(f"{field}.data", raw[:size]), raw[size:]
    if len(strings) != rows:
        raise BadRequest(f"{field}.data", f"{len(strings)} strings, but the shape says {rows}")
    return strings, raw


def row_count(field: str, shape: object) -> int:
    """N of a shape [N] or [N,1]."""
    numbers = isinstance(shape, list) and all(type(n) is int for n in shape)
    if not isinstance(shape, list) or not numbers or len(shape) not in (1, 2):
        raise BadRequest(field, "must be [N,1] or [N]")
    if shape[1:] not in ([], [1]) or shape[0] < 1:
        raise BadRequest(field, f"must be [N,1] or [N] with N of at least 1, not {shape}")
    return int(shape[0])


def flat_strings(field: str, data: object) -> list[str]:
    """The strings of flat or nested row-major data."""
    if not isinstance(data, list):
        raise BadRequest(field, "missing, or not a list")
    strings = [
        row[0] if isinstance(row, list) and len(row) == 1 else row  # [["a"], ["b"]] or ["a", "b"]
        for row in data
    ]
    for number, string in enumerate(strings):
        if not isinstance(string, str):
            raise BadRequest(f"{field}[{number}]", "not a string")
        try:
            string.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(f"{field}[{number}]", "a lone surrogate is not text") from error
    return strings


def binary_strings(field: str, raw: memoryview) -> list[str]:
    """The strings of a raw BYTES tensor: each with its length before it, four bytes, little end."""
    strings: list[str] = []
    at = 0
    while at < len(raw):
        begin = at + 4
        at = begin + int.from_bytes(raw[at:begin], "little")
        if at > len(raw):
            raise BadRequest(f"{field}[{len(strings)}]", "ends after the tensor does")
        try:
            strings.append(str(raw[begin:at], "utf-8"))
        except UnicodeDecodeError as error:
            raise BadRequest(f"{field}[{len(strings)}]", f"not UTF-8: {error.reason}") from error
    return strings


def read_outputs(
    found: object, parameters: Mapping[str, Any], signature: Signature
) -> list[RequestedOutput]:
    """The outputs that are asked for, or the default ones."""
    all_binary = parameters.get("binary_data_output") is True
    if found is None:
        return [
            RequestedOutput(name=output.name, binary=all_binary)
            for output in signature.outputs
            if output.default
        ]
    if not isinstance(found, list):
        raise BadRequest("outputs", "not a list")
    known = [output.name for output in signature.outputs]
    outputs: list[RequestedOutput] = []
    for number, output in enumerate(found):
        field = f"outputs[{number}]"
        if not isinstance(output, dict):
            raise BadRequest(field, "not an object")
        if output.get("name") not in known:
            names = ", ".join(known)
            raise BadRequest(f"{field}.name", f"{output.get('name')!r} is none of {names}")
        if any(output["name"] == other.name for other in outputs):
            raise BadRequest(f"{field}.name", f"{output['name']!r} is given twice")
        binary = mapping(output, "parameters", f"{field}.parameters").get("binary_data", all_binary)
        outputs.append(RequestedOutput(name=output["name"], binary=binary is True))
    return outputs


def mapping(document: Mapping[str, Any], key: str, field: str) -> Mapping[str, Any]:
    """An object that may be absent."""
    found = document.get(key)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise BadRequest(field, "not an object")
    return found


def natural(parameters: Mapping[str, Any], name: str) -> int | None:
    """A parameter that is a whole number of at least 0, where it is given."""
    found = parameters.get(name)
    if found is None:
        return None
    if type(found) is not int or not 0 <= found < 2**63:
        raise BadRequest(f"parameters.{name}", "must be a whole number from 0 to 2^63 - 1")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """An answer's bytes; `json_length` is set when raw tensors follow the JSON."""

    content: bytes
    json_length: int | None


def render_infer(
    request: InferRequest,
    outputs: Mapping[str, np.ndarray],
    *,
    model_name: str,
    model_version: str,
    parameters: Mapping[str, int],
    signature: Signature,
) -> Body:
    """The answer to `request`; each array is (rows, columns)."""
    datatypes = {output.name: output.datatype for output in signature.outputs}
    tensors, raw = [], []
    for wanted in request.outputs:
        array = np.ascontiguousarray(outputs[wanted.name])
        tensor: dict[str, Any] = {
            "name": wanted.name,
            "datatype": datatypes[wanted.name],
            "shape": list(array.shape),
        }
        if wanted.binary:
            raw.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
            tensor["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            tensor["data"] = array.ravel().tolist()
        tensors.append(tensor)
    document = {
        "model_name": model_name,
        "model_version": model_version,
        **({} if request.id is None else {"id": request.id}),
        "parameters": parameters,
        "outputs": tensors,
    }
    head = json.dumps(document, allow_nan=False).encode()
    return Body(content=head + b"".join(raw), json_length=len(head) if raw else None)
