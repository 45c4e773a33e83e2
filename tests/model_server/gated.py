"""A device that computes a batch only when the test lets it: time under the test's control."""

import asyncio
import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from workers.model_server import arrays
from workers.model_server.bert import loader as bert
from workers.model_server.loader import Rows, Signature
from workers.model_server.reader import Ids, TextReader
from workers.model_server.scheduler import Shaping
from workers.model_server.serving import Serving
from workers.model_server.warm_up import Chosen

WIDTH = 4

SERVING = Serving(
    dtype="float32",
    shaping=Shaping(steps=(16, 32), batch_tokens=64, fill_tokens=32, floor_every=0),
    lanes=1,
    row_counts=(1,),
    call_tokens=0,
    cached_queries=3,
)


def vector(ids: Ids) -> np.ndarray:
    """What the device makes of a sequence: a unit vector that no other sequence has."""
    values = np.random.default_rng(ids).normal(size=WIDTH)
    return (values / np.linalg.norm(values)).astype(np.float32)


class GatedDevice:
    """Each batch waits for `let`; `started` hands its sequences to the test."""

    def __init__(self) -> None:
        self.batches: list[list[Ids]] = []
        self._started: queue.Queue[list[Ids]] = queue.Queue()
        self._let: queue.Queue[Exception | np.ndarray | None] = queue.Queue()

    def embed(self, sequences: Sequence[Ids], step: int) -> np.ndarray:
        self.batches.append(list(sequences))
        self._started.put(list(sequences))
        word = self._let.get(timeout=20)
        if isinstance(word, Exception):
            raise word
        return np.stack([vector(ids) for ids in sequences]) if word is None else word

    async def started(self) -> list[Ids]:
        """The next batch, once the device has begun with it."""
        return await asyncio.to_thread(self._started.get, timeout=20)

    def let(self, batches: int = 1, *, instead: Exception | np.ndarray | None = None) -> None:
        """Compute so many batches (or, `instead`, fail or answer otherwise)."""
        for _ in range(batches):
            self._let.put(instead)


@dataclass(kw_only=True)
class GatedModel:
    """What the server asks of a loaded model."""

    device: GatedDevice = field(default_factory=GatedDevice)
    version: str = "gated-1"
    loader: str = "bert_encoder"
    size: str = "gated"
    max_tokens: int = 32
    serving: Serving = SERVING
    chosen: Chosen = field(default_factory=lambda: Chosen(serving=SERVING, reason="a test's"))
    signature: Signature = field(default_factory=lambda: bert.BertEncoder().signature(WIDTH))
    reader: TextReader = field(
        default_factory=lambda: TextReader(arrays.character_tokenizer(), max_tokens=32)
    )

    def read(self, inputs: Mapping[str, Sequence[str]]) -> Rows:
        return bert.read(self.reader, inputs)

    def combine(self, rows: Rows, queries: np.ndarray, texts: np.ndarray) -> dict[str, np.ndarray]:
        return bert.combine(rows, queries, texts)
