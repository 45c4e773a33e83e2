"""Serving configuration: one row per kind of device, each figure with where it comes from."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from workers.model_server.scheduler import Shaping, cover

LENGTHS = tuple(range(32, 257, 32))
"""Sorting by length is what pays on every device; of passages of 80 tokens steps of 32 waste a
sixth."""

CPU_LENGTHS = (*range(32, 128, 16), *range(128, 257, 32))
"""Half the steps where most texts are waste a tenth: 7% more rows a second for ten shapes more to
compile. Halving the others too brings 1% for fourteen more."""

SHORTEST_LENGTH = 8
"""Below, the tokens that frame a text leave no room for it."""

DTYPES = {"f32": "float32", "bf16": "bfloat16"}
"""Number formats of matrix products that may be asked for; `auto` is the device's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What an operator may choose instead of the table's figures; None leaves them."""

    dtype: Literal["auto", "f32", "bf16"] = "auto"
    lengths: tuple[int, ...] = ()
    """Padded lengths to compile, the last one the limit: fewer start faster and pad more."""
    batch_tokens: int | None = None
    lanes: int | None = None
    cached_queries: int | None = None
    tuned: Literal["auto", "off"] = "auto"
    """Whether the other figures are measured at the first start, or the table's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """How a model is run on one kind of device."""

    dtype: str
    shaping: Shaping
    lanes: int
    """Batches on the device at a time."""

    row_counts: tuple[int, ...]
    """Compiled batch sizes a device, beside the full one of each step; partial batches are put
    together."""

    call_tokens: int
    """Fixed cost of a device call, in tokens of each device (see scheduler.cover)."""

    cached_queries: int = 4096
    """Query embeddings kept, 1.5 KB each: a query comes back with each of its results."""

    def counts(self, step: int) -> tuple[int, ...]:
        """Row counts that are compiled for one step: multiples of the number of devices."""
        full = self.shaping.rows(step)
        wished = {n * self.shaping.devices for n in self.row_counts}
        return tuple(sorted({n for n in wished if n < full} | {full}))

    def calls(self, rows: int, step: int) -> tuple[int, ...]:
        """Row counts of the device calls that compute a batch."""
        call_tokens = self.call_tokens * self.shaping.devices
        return cover(rows, counts=self.counts(step), step=step, call_tokens=call_tokens)

    def padded_tokens(self, rows: int, step: int) -> int:
        """Tokens that the devices compute for a batch, padding included."""
        return step * sum(self.calls(rows, step))

    @property
    def figures(self) -> dict[str, Any]:
        """What `tuning` may choose, for people and for the file that keeps it."""
        return {
            "lanes": self.lanes,
            "batch_tokens": self.shaping.batch_tokens,
            "fill_tokens": self.shaping.fill_tokens,
            "row_counts": list(self.row_counts),
            "call_tokens": self.call_tokens,
        }

    def shapes(self) -> list[tuple[int, int]]:
        """All (rows, length) that are compiled, the cheapest first."""
        steps = self.shaping.steps
        return sorted(((n, s) for s in steps for n in self.counts(s)), key=lambda x: x[0] * x[1])

    @property
    def smallest(self) -> tuple[int, int]:
        """The (rows, length) in which one short sequence is computed."""
        step = self.shaping.steps[0]
        return self.calls(1, step)[0], step

    def chosen(self, options: Options, *, max_tokens: int, devices: int) -> "Serving":
        """The same for sequences of at most `max_tokens` and so many devices, as was asked for."""
        wished = options.lengths or self.shaping.steps
        limit = min(max_tokens, max(wished))
        steps = (*sorted({step for step in wished if step < limit}), limit)
        batch_tokens = options.batch_tokens or self.shaping.batch_tokens
        return replace(
            self,
            dtype=DTYPES.get(options.dtype, self.dtype),
            shaping=replace(
                self.shaping,
                steps=steps,
                batch_tokens=batch_tokens,
                fill_tokens=min(batch_tokens, self.shaping.fill_tokens),
                devices=devices,
            ),
            lanes=options.lanes or self.lanes,
            cached_queries=(
                self.cached_queries if options.cached_queries is None else options.cached_queries
            ),
        )


SERVING = {
    # Measured on 2 cores: the rate saturates at 300-500 tokens a call and falls again past 1,500,
    # where the temporaries leave the cache. Of sizes alike the smaller one is better: who is urgent
    # waits for the batch that computes. bfloat16 gains nothing in XLA's CPU build. Two lanes hide
    # the gaps between batches and the parts of the encoder that use one core only: 101 rows/s
    # against 87 to 93 with one lane, and less lost when others take a core; three gain nothing.
    "cpu": Serving(
        dtype="float32",
        shaping=Shaping(steps=CPU_LENGTHS, batch_tokens=512, fill_tokens=256),
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
