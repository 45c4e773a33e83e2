"""A loaded model on its devices: compiled shapes, and a call that runs one batch on them.

With several devices the rows of a batch are shared out among them and the parameters lie on each:
every compiled row count is a multiple of the number of devices.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from workers.model_server import checkpoint, loader
from workers.model_server.files import WEIGHTS, CheckpointRefused
from workers.model_server.headers import weights_digest
from workers.model_server.loader import Loaded, Rows, Signature
from workers.model_server.reader import Ids
from workers.model_server.serving import SERVING, Options, Serving

logger = logging.getLogger(__name__)

COMPILING_THREADS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """All that the server needs of a model."""

    version: str
    loader: str
    size: str
    max_tokens: int
    platform: str
    serving: Serving
    signature: Signature
    read: Callable[[Mapping[str, Sequence[str]]], Rows]
    combine: Callable[[Rows, np.ndarray, np.ndarray], dict[str, np.ndarray]]
    device: "Device"


class WarmupStopped(Exception):
    """The process was told to end before the model was ready."""


def load(
    argument: str,
    *,
    root: Path | None,
    sha256: str | None,
    version: str | None,
    loader_name: str = loader.DEFAULT,
    options: Options = Options(),  # noqa: B008 - frozen
    stopping: Callable[[], bool],
    only_smallest: bool = False,
) -> LoadedModel:
    """Read a checkpoint and compile every shape that will be served (or only the smallest).

    Raises CheckpointRefused or WarmupStopped, and whatever the device raises.
    """
    architecture = loader.find(loader_name)
    files = checkpoint.find(argument, architecture, root=root)
    contents = architecture.check(files)
    platform = jax.default_backend()
    serving = SERVING[platform].chosen(
        options,
        max_tokens=min(contents.max_tokens, contents.positions),
        devices=jax.local_device_count(),
    )
    max_tokens = serving.shaping.steps[-1]
    loaded = architecture.load(files, dtype=serving.dtype, max_tokens=max_tokens)
    # After loading: the files remember the digest of the very bytes that were read.
    if sha256 is not None and not weights_digest(files).startswith(sha256.lower()):
        raise CheckpointRefused("digest_mismatch", f"{WEIGHTS} has sha256 {weights_digest(files)}")
    name = checkpoint.digest(argument, architecture, files)
    device = Device(loaded, serving)
    device.compile(stopping, [serving.smallest] if only_smallest else None)
    return LoadedModel(
        version=version
        or architecture.version(name, contents, platform, options.dtype, options.lengths),
        loader=loader_name,
        size=contents.size,
        max_tokens=max_tokens,
        platform=platform,
        serving=serving,
        signature=loaded.signature,
        read=loaded.read,
        combine=loaded.combine,
        device=device,
    )


class Device:
    """All local devices with the model's parameters, compiled for fixed shapes.

    Any thread may call `embed`.
    """

    def __init__(self, loaded: Loaded, serving: Serving) -> None:
        devices = np.array(jax.local_devices()[: serving.shaping.devices])
        mesh = Mesh(devices, ("rows",))
        rows = NamedSharding(mesh, PartitionSpec("rows"))  # type: ignore[no-untyped-call]
        everywhere = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
        self._parameters = jax.device_put(loaded.parameters, everywhere)
        self._apply = jax.jit(
            loaded.apply, in_shardings=(everywhere, rows, rows), out_shardings=rows
        )
        self._serving = serving
        self._compiled: dict[tuple[int, int], Any] = {}

    def compile(
        self, stopping: Callable[[], bool], shapes: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """Compile shapes and run each once: a first run costs up to three times the second."""
        wanted = self._serving.shapes() if shapes is None else shapes
        with ThreadPoolExecutor(COMPILING_THREADS) as pool:
            self._compiled = dict(pool.map(partial(self._compile_one, stopping), wanted))

    def _compile_one(
        self, stopping: Callable[[], bool], shape: tuple[int, int]
    ) -> tuple[tuple[int, int], Any]:
        if stopping():
            raise WarmupStopped
        ids, lengths = padded([], *shape)
        compiled = self._apply.lower(self._parameters, ids, lengths).compile()
        compiled(self._parameters, ids, lengths).block_until_ready()
        logger.debug("shape ready", extra={"rows": shape[0], "length": shape[1]})
        return shape, compiled

    def embed(self, sequences: Sequence[Ids], step: int) -> np.ndarray:
        """Vectors (sequences, width) float32; none of the sequences is longer than `step`."""
        # All calls are handed over before the first is waited for.
        started, begin = [], 0
        for rows in self._serving.calls(len(sequences), step):
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
