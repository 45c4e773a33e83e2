"""Parquet: typed columns, read row group by row group in small pieces.

A Parquet file is read from its end, so the body lies in a nameless file while it is read. The unit
of reading is the writer's page, so memory is about twice the largest page. What its columns may be
says `parquet_columns`.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from fulfillment.errors import BadUpload, UploadTooLarge
from fulfillment.formats import rows
from fulfillment.formats.columns import check_names
from fulfillment.formats.parquet_columns import Column, columns_of
from fulfillment.formats.rows import Refusal, Refused, Row, check, row_too_large
from fulfillment.formats.values import context_in, storable

PIECE_ROWS = 64
PIECE_BYTES = 4 << 20
"""Rows and, by their average, bytes that are unfolded at a time."""
_PAGE_BUFFER = 64 << 10


def read_parquet(
    chunks: Iterable[bytes], *, directory: Path, limit: int
) -> Iterator[Row | Refused]:
    """Yield a checked row or its refusal for each row, counted from 1.

    Raises UploadTooLarge where the file unfolds to more than `limit` bytes.
    """
    with tempfile.TemporaryFile(dir=directory, buffering=1 << 20) as file:
        size = 0
        for chunk in chunks:
            size += file.write(chunk)
        if not size:
            return  # an empty file, as in the other formats
        with _readable():
            table = pq.ParquetFile(_rewound(file), buffer_size=_PAGE_BUFFER, pre_buffer=False)
            schema = table.schema_arrow
        _refuse_unfolded(_unfolded(table.metadata), limit)
        check_names(schema.names)
        columns = columns_of(schema)
        taken, number = 0, 1
        for batch in _batches(table):
            size = batch.nbytes
            taken += size
            _refuse_unfolded(taken, limit)
            with _readable():
                piece = list(_rows(columns, batch))
            for values in piece:
                yield _row(number, columns, values, measured=size > rows.MAX_ROW_BYTES)
                number += 1


def _rewound(file: IO[bytes]) -> IO[bytes]:
    file.seek(0)
    return file


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise BadUpload(
            f"the file is not Parquet, is cut off or cannot be read: {reason}",
            code="invalid_parquet",
        ) from error


def _unfolded(metadata: Any) -> int:
    return sum(metadata.row_group(n).total_byte_size for n in range(metadata.num_row_groups))


def _refuse_unfolded(size: int, limit: int) -> None:
    if size > limit:
        raise UploadTooLarge(
            f"The file unfolds to more than {limit} bytes; send it in parts.",
            code="decompressed_too_large",
            limit_bytes=limit,
        )


def _batches(table: Any) -> Iterator[Any]:
    """Yield record batches of a size that their average row allows."""
    metadata = table.metadata
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        average = max(1, group.total_byte_size // max(1, group.num_rows))
        batches = table.iter_batches(
            batch_size=max(1, min(PIECE_ROWS, PIECE_BYTES // average)),
            row_groups=[number],
            use_threads=False,
        )
        while True:
            with _readable():
                batch = next(batches, None)
            if batch is None:
                break
            yield batch


class _NotUtf8:
    """Stands for a value whose bytes are not UTF-8."""


_NOT_UTF8 = _NotUtf8()


def _rows(columns: Sequence[Column], batch: Any) -> Iterator[tuple[Any, ...]]:
    arrays = (
        array if column.prepare is None else column.prepare(array)
        for column, array in zip(columns, batch.columns, strict=True)
    )
    return zip(*map(_values, arrays), strict=True)


def _values(array: Any) -> list[Any]:
    try:
        return list(array.to_pylist())
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in array]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return _NOT_UTF8


def _row(
    number: int, columns: Sequence[Column], values: Sequence[Any], *, measured: bool
) -> Row | Refused:
    try:
        row: dict[str, Any] = {}
        warnings: tuple[str, ...] = ()
        awkward = False
        for column, value in zip(columns, values, strict=True):
            if value is None:
                continue
            if value is _NOT_UTF8:
                raise Refusal("invalid_utf8", f"{column.name} has bytes that are not UTF-8")
            if column.is_json:
                value, warnings = context_in(column.name, value)
            elif column.convert is not None:
                value = column.convert(value)
            awkward = awkward or ("\0" in value if type(value) is str else type(value) in _NESTED)
            row[column.name] = value
        if measured and _size(row) > rows.MAX_ROW_BYTES:
            return row_too_large(number)
        if awkward:
            row, more = storable(row)
            warnings = tuple(dict.fromkeys((*warnings, *more)))
        return check(number, row, warnings)
    except Refusal as refusal:
        return Refused(line=number, code=refusal.code, detail=refusal.detail)


_NESTED = (dict, list)


def _size(row: dict[str, Any]) -> int:
    return sum(
        len(value.encode()) if isinstance(value, str) else len(json.dumps(value, default=str))
        for value in row.values()
    )
