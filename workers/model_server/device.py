"""A loaded model on its devices: compiled shapes, and a call that runs one batch on them.

With several devices the rows of a batch are shared out among them and the parameters lie on each:
every compiled row count is a multiple of the number of devices.
"""

import logging
import os
import platform as this_machine
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
from workers.model_server.kept_figures import FOLDER, KeptFigures
from workers.model_server.loader import Loaded, Loader, Rows, Signature
from workers.model_server.reader import Ids
from workers.model_server.serving import SERVING, Options, Serving
from workers.model_server.tuning import Machine
from workers.model_server.warm_up import LIMIT_S, Chosen, WarmupStopped, warm_up

logger = logging.getLogger(__name__)

COMPILING_THREADS = 2
MADE_UP_IDS = 64
"""Rows of zeros may be computed faster than others. Every vocabulary has so many."""


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
    chosen: Chosen


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
    tuning_limit_s: float = LIMIT_S,
) -> LoadedModel:
    """Read a checkpoint and compile every shape that will be served (or only the smallest).

    Where JAX keeps what it compiles, figures that were chosen by measurement are kept, too; see
    `warm_up`.

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
    model_version = version or architecture.version(
        name, contents, platform, options.dtype, options.lengths
    )
    device = Device(loaded, serving)
    if only_smallest:
        device.compile(stopping, [serving.smallest])
        chosen = Chosen(serving=serving, reason="the table's: nothing is served")
    else:
        chosen = warm_up(
            device,
            serving,
            options,
            kept=_kept(name, architecture, platform, serving, options),
            machine=Machine(platform=platform, cores=os.cpu_count() or 1),
            stopping=stopping,
            limit_s=tuning_limit_s,
        )
    return LoadedModel(
        version=model_version,
        loader=loader_name,
        size=contents.size,
        max_tokens=max_tokens,
        platform=platform,
        serving=chosen.serving,
        signature=loaded.signature,
        read=loaded.read,
        combine=loaded.combine,
        device=device,
        chosen=chosen,
    )


def _kept(
    name: str, architecture: Loader, platform: str, table: Serving, options: Options
) -> KeptFigures | None:
    """Return the file of figures for what they depend on; None where JAX keeps nothing."""
    directory = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if not directory:
        return None
    return KeptFigures(
        Path(directory) / FOLDER,
        {
            "checkpoint": name,
            "loader": architecture.revision,
            "platform": platform,
            "device": jax.local_devices()[0].device_kind,
            "processor": _processor(),
            "cores": os.cpu_count() or 1,
            "jax": jax.__version__,
            "dtype": table.dtype,
            "steps": table.shaping.steps,
            "devices": table.shaping.devices,
            "table": table.figures,
            "options": [options.batch_tokens, options.lanes],
        },
    )


def _processor() -> str:
    """Return what the processor calls itself; homes may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return this_machine.processor()
    return next((line for line in lines if line.startswith("model name")), this_machine.machine())


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
        new = [shape for shape in wanted if shape not in self._compiled]
        with ThreadPoolExecutor(COMPILING_THREADS) as pool:
            self._compiled.update(pool.map(partial(self._compile_one, stopping), new))

    def run(self, rows: int, step: int) -> None:
        """Compute one full batch of made-up ids in a compiled shape, to see how long it takes."""
        ids = np.arange(rows * step, dtype=np.int32).reshape(rows, step) % MADE_UP_IDS
        lengths = np.full(rows, step, np.int32)
        self._compiled[rows, step](self._parameters, ids, lengths).block_until_ready()

    def adopt(self, serving: Serving) -> None:
        """Serve with these figures; shapes that they do not need are forgotten."""
        self._serving = serving
        needed = set(serving.shapes())
        self._compiled = {shape: c for shape, c in self._compiled.items() if shape in needed}

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
            started.append(self.start(sequences[begin : begin + rows], rows, step))
            begin += rows
        return np.concatenate([np.asarray(part) for part in started])[: len(sequences)]

    def start(self, sequences: Sequence[Ids], rows: int, step: int) -> jax.Array:
        """Hand over one call in a compiled shape; vectors (rows, width), those of padding last."""
        ids, lengths = padded(sequences, rows, step)
        vectors: jax.Array = self._compiled[rows, step](self._parameters, ids, lengths)
        return vectors


def padded(sequences: Sequence[Ids], rows: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids (rows, step) and lengths (rows,); a row of padding counts as one token long."""
    ids = np.zeros((rows, step), np.int32)
    lengths = np.ones(rows, np.int32)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
        lengths[row] = len(sequence)
    return ids, lengths
