"""Records as Parquet: typed columns, written row group by row group into a stream.

Parquet keeps its table of contents at the end, so it can be written to what cannot be rewound; a
file that broke off lacks that end and no reader takes it for a whole one.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from fulfillment import results
from fulfillment.results import FIELDS, Page, batched, records

GROUP_ROWS = 20_000
"""Records of a row group: what is held in memory, as columns, before it is written."""

_TYPES: dict[str, pa.DataType] = {
    "score": pa.float64(),
    "attempts": pa.int32(),
    "rated_at": pa.timestamp("us", tz="UTC"),
    "age_s": pa.int64(),
    "warnings": pa.list_(pa.string()),
}
"""Columns that are no text; what is a JSON value in a record is its text here."""

SCHEMA = pa.schema([pa.field(name, _TYPES.get(name, pa.string())) for name in FIELDS])


class _Pipe:
    """A file that hands on what is written to it."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing is kept back."""

    def take(self) -> bytes:
        taken, self._parts = b"".join(self._parts), []
        return taken


def parquet(pages: Iterable[Page]) -> Iterator[bytes]:
    """Yield one Parquet file; without records it has its columns and no rows."""
    pipe = _Pipe()
    with pq.ParquetWriter(pipe, SCHEMA, compression="zstd") as writer:
        for group in _groups(pages):
            writer.write_table(pa.Table.from_batches(group), row_group_size=GROUP_ROWS)
            yield pipe.take()
    yield pipe.take()


def _groups(pages: Iterable[Page]) -> Iterator[list[pa.RecordBatch]]:
    steps = (step for of in pages for step in batched(records(of), results.STEP_ROWS))
    group: list[pa.RecordBatch] = []
    rows = 0
    for step in steps:
        group.append(_columns(step))
        rows += len(step)
        if rows >= GROUP_ROWS:
            yield group
            group, rows = [], 0
    if group:
        yield group


def _columns(step: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.record_batch(
        [_array(field, [record[field.name] for record in step]) for field in SCHEMA],
        schema=SCHEMA,
    )


def _array(field: pa.Field, values: list[Any]) -> pa.Array:
    if field.type == pa.string():
        values = [v if v is None or isinstance(v, str) else _json(v) for v in values]
    # NaN is no score.
    return pa.array(values, type=field.type, from_pandas=True)


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
