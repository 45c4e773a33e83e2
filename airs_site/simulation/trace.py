"""Traces: reading and writing rows of evaluations, and the requests they expand to.

A trace is one JSON object a line, gzipped or not, beside a `params.json`. One that a running system
exported has the same rows. This is the only module of the simulation that touches files.
"""

import gzip
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from airs_site.simulation.errors import BadWorkload
from airs_site.simulation.keys import listed_keys, request_keys
from airs_site.simulation.workload import (
    Evaluation,
    Params,
    read_evaluation,
    read_params,
    row_of,
)

Progress = Callable[[float], None]
"""Told the share that is done, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Workload:
    """Evaluations in the order of submission, at one scale, with the ratings they ask for."""

    params: Params
    scale: int
    evaluations: Sequence[Evaluation]
    ids: NDArray[np.int32]
    """Of the ratings asked for, those of all evaluations on end; equal ids, equal ratings."""
    starts: NDArray[np.int64]
    """Where each evaluation's ids start; one more than there are evaluations."""
    distinct: int
    """Ids run from 0 to below this."""
    stored: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """Ids that the archive has from the start, besides those that earlier rows ask for."""

    def requests(self, place: int) -> NDArray[np.int32]:
        """Return the ids of the evaluation at that place."""
        return self.ids[self.starts[place] : self.starts[place + 1]]


def read_parameters(path: Path) -> Params:
    """Return the parameters in a JSON file."""
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise BadWorkload(f"{path.name} is not JSON: {error}") from error
    return read_params(document)


def read_trace(path: Path, params: Params) -> Sequence[Evaluation]:
    """Return the rows of a trace in the order of their time."""
    raters = {rater.id: number for number, rater in enumerate(params.raters)}
    raw = path.read_bytes()
    text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    found: list[Evaluation] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            found.append(read_evaluation(json.loads(line), raters))
        except (BadWorkload, ValueError) as error:
            raise BadWorkload(f"{path.name}, line {number}: {error}") from error
    if not found:
        raise BadWorkload(f"{path.name} has no rows")
    return sorted(found, key=lambda evaluation: (evaluation.at_s, evaluation.id))


def write_trace(path: Path, evaluations: Iterable[Evaluation]) -> None:
    """Write a gzipped trace; the same evaluations give the same bytes."""
    rows = (json.dumps(row_of(evaluation), separators=(",", ":")) for evaluation in evaluations)
    raw = io.BytesIO()
    with gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as packed:
        packed.write("".join(f"{row}\n" for row in rows).encode())
    path.write_bytes(raw.getvalue())


def expand(
    params: Params,
    evaluations: Sequence[Evaluation],
    *,
    scale: int,
    progress: Progress = lambda share: None,
) -> Workload:
    """Return the workload at 1:scale; its key look-ups take most of the time of a small run."""
    if scale < 1:
        raise BadWorkload(f"a scale of 1:{scale} does not exist; give a whole number from 1")
    sample = params.sample or 1
    if scale % sample:
        raise BadWorkload(
            f"the trace has one in {sample} requests: give that scale or a multiple of it"
        )
    numbers = {rater.id: number for number, rater in enumerate(params.raters)}
    keys = []
    for done, evaluation in enumerate(evaluations):
        if evaluation.mode == "listed":
            keys.append(listed_keys(evaluation, one_in=scale // sample))
        else:
            number = numbers[evaluation.rater]
            keys.append(request_keys(evaluation, rater_no=number, churn=params.churn, scale=scale))
        progress(done / len(evaluations))
    distinct, ids = np.unique(np.concatenate(keys), return_inverse=True)
    return Workload(
        params=params,
        scale=scale,
        evaluations=tuple(evaluations),
        ids=ids.astype(np.int32),
        starts=np.concatenate([[0], np.cumsum([len(k) for k in keys])]).astype(np.int64),
        distinct=len(distinct),
    )
