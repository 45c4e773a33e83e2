"""Serving configuration: one row per kind of device, each figure with where it comes from."""

from dataclasses import dataclass, replace

from workers.model_server.scheduler import Shaping

LENGTHS = tuple(range(32, 257, 32))
"""Sorting by length is what pays on every device; steps of 32 waste about a tenth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """How a model is run on one kind of device."""

    dtype: str
    shaping: Shaping
    lanes: int
    """Batches on the device at a time."""

    row_counts: tuple[int, ...]
    """Compiled batch sizes, beside the full one of each step; partial batches are put together."""

    call_tokens: int
    """Fixed cost of a device call, in tokens (see scheduler.cover)."""

    cached_queries: int = 4096
    """Query embeddings kept, 1.5 KB each: a query comes back with each of its results."""

    def counts(self, step: int) -> tuple[int, ...]:
        """Row counts that are compiled for one step."""
        full = self.shaping.rows(step)
        return tuple(sorted({n for n in self.row_counts if n < full} | {full}))

    def shapes(self) -> list[tuple[int, int]]:
        """All (rows, length) that are compiled, the cheapest first."""
        steps = self.shaping.steps
        return sorted(((n, s) for s in steps for n in self.counts(s)), key=lambda x: x[0] * x[1])

    def limited_to(self, max_tokens: int, lengths: tuple[int, ...] | None = None) -> "Serving":
        """The same for sequences of at most `max_tokens`, in steps of `lengths` where given."""
        wished = sorted(lengths or self.shaping.steps)
        steps = (*(step for step in wished if step < max_tokens), min(max_tokens, wished[-1]))
        return replace(self, shaping=replace(self.shaping, steps=steps))


SERVING = {
    # Measured on 2 cores: the rate saturates at 300-500 tokens a call and falls again past 1,500,
    # where the temporaries leave the cache; bfloat16 gains nothing in XLA's CPU build. Two lanes
    # hide the gaps between batches and the parts of the encoder that use one core only: 101 rows/s
    # against 87 to 93 with one lane, and less lost when others take a core; three gain nothing.
    "cpu": Serving(
        dtype="float32",
        shaping=Shaping(steps=LENGTHS, batch_tokens=1024, fill_tokens=256),
        lanes=2,
        row_counts=(1, 4, 16),
        call_tokens=40,
    ),
    # Not measured: sizes that should fill a chip with a model this small.
    "gpu": Serving(
        dtype="bfloat16",
        shaping=Shaping(steps=LENGTHS, batch_tokens=65536, fill_tokens=65536),
        lanes=2,
        row_counts=(16, 64, 256),
        call_tokens=8192,
    ),
    "tpu": Serving(
        dtype="bfloat16",
        shaping=Shaping(steps=LENGTHS, batch_tokens=65536, fill_tokens=65536),
        lanes=2,
        row_counts=(16, 64, 256),
        call_tokens=8192,
    ),
}
