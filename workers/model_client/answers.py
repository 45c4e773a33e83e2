"""Turns the bytes of a model's answer into numbers, all of them or none.

A short, long, misplaced or not finite answer is thrown away whole: nothing tells which of its
numbers belongs to which row.
"""

import json
import re
from collections.abc import Mapping
from math import inf, isfinite
from typing import Any

import orjson

from workers.autoraters.protocol import OipAnswer, OipCall
from workers.model_client.outcomes import (
    CONTEXT_LENGTH,
    CallOutcome,
    Verdict,
    row_fault,
)

MAX_VERSION = 128
MARKUP = re.compile(r"<[^<>]*>")


def read_answer(
    body: bytes, *, call: OipCall, rows: int, request_id: str, expected_version: str
) -> OipAnswer | Verdict:
    """Return the numbers of a 200, or why it cannot be used.

    The version comes first: an answer of another version is no fault of anybody, whatever is in it.
    """
    document = parse(body)
    if not isinstance(document, dict):
        return unusable("bad_answer", "no JSON object: " + error_text(body))
    if "error" in document and "outputs" not in document:
        return error_in_200(error_text(body), rows=rows)
    named = document.get("model_version")
    version = kept_version(named) if isinstance(named, str) else ""
    if expected_version and version != expected_version:
        return other_version(version, expected_version)
    echoed = document.get("id")
    if echoed is not None and echoed != request_id:
        return unusable("wrong_id", "the answer belongs to another request")
    outputs = _numbers(document.get("outputs"), wanted=call.outputs, rows=rows)
    if isinstance(outputs, Verdict):
        return outputs
    parameters = document.get("parameters")
    return OipAnswer(
        outputs=outputs,
        model_version=version,
        parameters=parameters if isinstance(parameters, dict) else {},
        notes=call.notes,
    )


def kept_version(name: str) -> str:
    """Return what a server calls itself as it can be kept, "" for what cannot."""
    return name[:MAX_VERSION] if name.isprintable() else ""


def error_text(body: bytes) -> str:
    """Return a server's words: the message of the usual JSON errors, else the body without tags."""
    document = parse(body)
    if isinstance(document, dict):
        error = document.get("error", document.get("detail", document.get("message")))
        if isinstance(error, dict):
            parts = (error.get("code"), error.get("type"), error.get("message"))
            return ": ".join(part for part in parts if isinstance(part, str))
        if isinstance(error, str):
            return error
    return MARKUP.sub(" ", body.decode("utf-8", "replace"))


def parse(body: bytes) -> Any:
    """Return the document, None for no JSON. Python servers write NaN and Infinity: let them in,
    so that the answer is refused for what is wrong with it."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def error_in_200(text: str, *, rows: int) -> Verdict:
    """Return what an error means that came with a 200."""
    if CONTEXT_LENGTH.search(text):
        fault = row_fault("context_length_exceeded", rows=rows)
        return Verdict(outcome=fault.outcome, code=fault.code, detail=text)
    return unusable("bad_answer", text)


def _numbers(
    outputs: Any, *, wanted: tuple[str, ...], rows: int
) -> Mapping[str, list[float]] | Verdict:
    if not isinstance(outputs, list):
        return unusable("incomplete_response", "no list of outputs")
    found: dict[str, list[float]] = {}
    for tensor in outputs:
        name = tensor.get("name") if isinstance(tensor, dict) else None
        if not isinstance(name, str):
            return unusable("bad_answer", "an output without a name")
        column = _column(tensor, rows=rows)
        if isinstance(column, Verdict):
            if name in wanted:
                return column
            continue
        if name in found:
            return unusable("bad_answer", f"output {name!r} came twice")
        found[name] = column
    missing = [name for name in wanted if name not in found]
    if missing:
        return unusable("incomplete_response", f"no output {', '.join(missing)}")
    return found


def _column(tensor: Mapping[str, Any], *, rows: int) -> list[float] | Verdict:
    """Return a tensor that has one finite number a row: shape [n] or [n, 1, …], flat or nested."""
    name, data, shape = tensor["name"], tensor.get("data"), tensor.get("shape")
    if not isinstance(data, list):
        return unusable("incomplete_response", f"output {name!r} has no data")
    flat = data
    while len(flat) and all(type(cell) is list and len(cell) == 1 for cell in flat):
        flat = [cell[0] for cell in flat]
    if len(flat) != rows:
        return unusable("count_mismatch", f"{len(flat)} values of {name!r} for {rows} rows")
    if shape is not None and not _one_a_row(shape, rows):
        return unusable("bad_shape", f"output {name!r} has a shape other than one number a row")
    if not {float, int}.issuperset(map(type, flat)):
        return unusable("bad_type", f"output {name!r} holds something else than numbers")
    try:
        numbers = list(map(float, flat))
    except OverflowError:
        numbers = [inf]
    if not all(map(isfinite, numbers)):
        return unusable("not_finite", f"output {name!r} holds NaN or infinity")
    return numbers


def _one_a_row(shape: Any, rows: int) -> bool:
    return isinstance(shape, list) and shape == [rows] + [1] * (len(shape) - 1)


def other_version(version: str, expected: str) -> Verdict:
    """Return the verdict on an answer of another version; "" for one that names none."""
    return Verdict(
        outcome=CallOutcome.WRONG_VERSION,
        code="wrong_version" if version else "version_missing",
        detail=f"version {version!r} answered, {expected!r} was asked",
    )


def unusable(code: str, detail: str) -> Verdict:
    """Return the verdict on a 200 that is thrown away whole."""
    return Verdict(outcome=CallOutcome.INCOMPLETE, code=code, detail=detail)
