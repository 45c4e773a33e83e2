"""From a call's texts to its outputs: read, embed, compare."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from workers.model_server.batcher import Batcher, Embedder
from workers.model_server.meter import Meter
from workers.model_server.protocol import InferRequest
from workers.model_server.reader import TextReader, Tokens
from workers.model_server.serving import Serving


class Model(Protocol):
    """What serving needs of a loaded model (device.LoadedModel)."""

    @property
    def version(self) -> str: ...
    @property
    def size(self) -> str: ...
    @property
    def width(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def serving(self) -> Serving: ...
    @property
    def reader(self) -> TextReader: ...
    @property
    def device(self) -> Embedder: ...


class Scorer:
    """One ready model: its reader in a thread, its batcher on the loop."""

    def __init__(
        self,
        model: Model,
        meter: Meter,
        *,
        clock: Callable[[], float],
        observe: Callable[[int, float], None],
    ) -> None:
        self.model = model
        self._batcher = Batcher(model.device, model.serving, meter, clock=clock, observe=observe)
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="reading")

    @property
    def broken(self) -> asyncio.Event:
        """Set when the device will not recover."""
        return self._batcher.broken

    async def score(
        self, call: InferRequest, *, deadline_at: float | None
    ) -> dict[str, np.ndarray]:
        """Every output that can be asked for, each (rows, columns); raises what Batcher does."""
        rows = len(call.texts)
        tokens = await asyncio.get_running_loop().run_in_executor(
            self._reading, self.model.reader.read, [*call.queries, *call.texts]
        )
        queries, texts = tokens[:rows], tokens[rows:]
        query_vectors, text_vectors = await self._batcher.embed(
            queries, texts, priority=call.priority, deadline_at=deadline_at
        )
        cosines = np.einsum("nd,nd->n", query_vectors, text_vectors)
        return {
            # Rounding can leave 1.0000001, which a rater with a scale to 1 would have to refuse.
            "score": np.clip(cosines, -1, 1)[:, None],
            "tokens": counts(texts),
            "query_tokens": counts(queries),
            "embedding": text_vectors,
        }

    def close(self) -> None:
        """Fail what still waits, and let the threads end."""
        self._reading.shutdown(wait=False, cancel_futures=True)
        self._batcher.close()


def counts(tokens: list[Tokens]) -> np.ndarray:
    """A column of the texts' lengths in tokens."""
    return np.array([[one.count] for one in tokens], np.int32)
