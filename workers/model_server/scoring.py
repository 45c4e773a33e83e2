"""From a call's texts to its outputs: read, embed, combine."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from workers.model_server.batcher import Batcher, Embedder
from workers.model_server.loader import Rows, Signature
from workers.model_server.meter import Meter
from workers.model_server.protocol import InferRequest
from workers.model_server.serving import Serving
from workers.model_server.warm_up import Chosen


class Model(Protocol):
    """What serving needs of a loaded model (device.LoadedModel)."""

    @property
    def version(self) -> str: ...
    @property
    def loader(self) -> str: ...
    @property
    def size(self) -> str: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def serving(self) -> Serving: ...
    @property
    def signature(self) -> Signature: ...
    @property
    def read(self) -> Callable[[Mapping[str, Sequence[str]]], Rows]: ...
    @property
    def combine(self) -> Callable[[Rows, np.ndarray, np.ndarray], dict[str, np.ndarray]]: ...
    @property
    def device(self) -> Embedder: ...
    @property
    def chosen(self) -> Chosen: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Every output that can be asked for, each (rows, columns), and what it took."""

    outputs: Mapping[str, np.ndarray]
    compute_s: float
    """Seconds of one device."""


class Scorer:
    """One ready model: its reader in a thread, its batcher on the loop."""

    def __init__(
        self,
        model: Model,
        meter: Meter,
        *,
        clock: Callable[[], float],
        observe: Callable[[int], None],
    ) -> None:
        self.model = model
        self._batcher = Batcher(model.device, model.serving, meter, clock=clock, observe=observe)
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="reading")

    @property
    def broken(self) -> asyncio.Event:
        """Set when the device will not recover."""
        return self._batcher.broken

    async def score(self, call: InferRequest, *, deadline_at: float | None) -> Scored:
        """Compute a call; raises what Batcher does."""
        rows = await asyncio.get_running_loop().run_in_executor(
            self._reading, self.model.read, call.inputs
        )
        vectors = await self._batcher.embed(
            rows.kept, rows.once, priority=call.priority, deadline_at=deadline_at
        )
        outputs = self.model.combine(rows, vectors.kept, vectors.once)
        counts = {name: np.array(count, np.int32)[:, None] for name, count in rows.counts.items()}
        return Scored(outputs={**outputs, **counts}, compute_s=vectors.compute_s)

    def close(self) -> None:
        """Fail what still waits, and let the threads end."""
        self._reading.shutdown(wait=False, cancel_futures=True)
        self._batcher.close()
