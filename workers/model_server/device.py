"""A loaded model on its device: compiled shapes, and a call that runs one batch on them."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from workers.model_server import checkpoint, encoder
from workers.model_server.reader import Ids, TextReader
from workers.model_server.scheduler import cover
from workers.model_server.serving import SERVING, Serving

logger = logging.getLogger(__name__)

COMPILING_THREADS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """All that the server needs of a model."""

    version: str
    size: str
    width: int
    max_tokens: int
    platform: str
    serving: Serving
    reader: TextReader
    device: "Device"


class WarmupStopped(Exception):
    """The process was told to end before the model was ready."""


def load(
    argument: str,
    *,
    root: Path | None,
    sha256: str | None,
    version: str | None,
    lengths: tuple[int, ...] | None = None,
    stopping: Callable[[], bool],
) -> LoadedModel:
    """Read a checkpoint and compile every shape that will be served.

    `lengths` replaces the serving table's length steps: fewer start faster and pad more.
    """
    found = checkpoint.load(argument, root=root, sha256=sha256)
    platform = jax.default_backend()
    max_tokens = min(found.max_tokens, found.size.positions)
    serving = SERVING[platform].limited_to(max_tokens, lengths)
    device = Device(found, serving)
    device.compile(stopping)
    return LoadedModel(
        version=version or f"{found.digest}-{encoder.REVISION}-{serving.dtype}",
        size=found.size_name,
        width=found.size.width,
        max_tokens=serving.shaping.steps[-1],
        platform=platform,
        serving=serving,
        reader=TextReader(found.tokenizer, max_tokens=serving.shaping.steps[-1]),
        device=device,
    )


class Device:
    """The encoder with its parameters, compiled for fixed shapes. Any thread may call `embed`."""

    def __init__(self, source: checkpoint.Checkpoint, serving: Serving) -> None:
        graph, self._parameters = checkpoint.parameters(source, jnp.dtype(serving.dtype))
        self._embed = jax.jit(partial(encoder.embed, graph))
        self._serving = serving
        self._compiled: dict[tuple[int, int], Any] = {}

    def compile(self, stopping: Callable[[], bool]) -> None:
        """Compile all shapes and run each once: a first run costs up to three times the second."""
        shapes = self._serving.shapes()
        with ThreadPoolExecutor(COMPILING_THREADS) as pool:
            self._compiled = dict(pool.map(partial(self._compile_one, stopping), shapes))

    def _compile_one(
        self, stopping: Callable[[], bool], shape: tuple[int, int]
    ) -> tuple[tuple[int, int], Any]:
        if stopping():
            raise WarmupStopped
        ids, lengths = padded([], *shape)
        compiled = self._embed.lower(self._parameters, ids, lengths).compile()
        compiled(self._parameters, ids, lengths).block_until_ready()
        logger.debug("shape ready", extra={"rows": shape[0], "length": shape[1]})
        return shape, compiled

    def embed(self, sequences: Sequence[Ids], step: int) -> np.ndarray:
        """Unit vectors (sequences, width) float32; none of the sequences is longer than `step`."""
        calls = cover(
            len(sequences),
            counts=self._serving.counts(step),
            step=step,
            call_tokens=self._serving.call_tokens,
        )
        # All calls are handed over before the first is waited for.
        started, begin = [], 0
        for rows in calls:
            ids, lengths = padded(sequences[begin : begin + rows], rows, step)
            started.append(self._compiled[rows, step](self._parameters, ids, lengths))
            begin += rows
        return np.concatenate([np.asarray(part) for part in started])[: len(sequences)]


def padded(sequences: Sequence[Ids], rows: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids (rows, step) and lengths (rows,); a row of padding counts as one token long."""
    ids = np.zeros((rows, step), np.int32)
    lengths = np.ones(rows, np.int32)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
        lengths[row] = len(sequence)
    return ids, lengths
