"""A body on its way in: read once as a stream, checked, hashed and kept on disk as good rows.

Nothing is stored in the database before the whole body was good. The spool file has no name (it
dies with the process) and memory does not grow with the body, but for 24 bytes a row (twice that
while they are sorted) that find duplicate request ids. The rows of the first few MiB stay in
memory: most uploads are no larger, and writing and reading them again took a fifth of intake.
"""

import sys
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import numpy as np

from fulfillment import documents
from fulfillment.errors import BadUpload
from fulfillment.formats import Format, Refused, Row, read_rows
from fulfillment.policy.fingerprint import request_digest, url_digest

CHUNK_ROWS = 4_000
CHUNK_BYTES = 8 << 20
KEPT_BYTES = 4 << 20
"""Of a body, from its start, whose rows are kept in memory; at most one chunk of them by size."""
_DIGEST_BYTES = 16
MOST_LISTED = 1_000
"""Refusals and warnings listed in an answer; beyond it they are only counted."""


class Record(NamedTuple):
    """A good row as it lies in the spool."""

    line: int
    request_id: str | None
    request_digest: str | None
    query_id: str | None
    result_id: str | None
    side: int | None
    result_weight: float | None
    query_weight: float | None
    fingerprint: str
    url_digest: str | None
    extra: dict[str, Any] | None
    warnings: Sequence[str]
    item: bytes
    """The key fields, as `documents.dump` made them: nobody looks at them on their way."""

    def name(self, position: int) -> str:
        """Return the client's id of the row, or the one it gets at its position."""
        return f"row-{position + 1}" if self.request_id is None else self.request_id


@dataclass(kw_only=True, slots=True)
class Spool:
    """A checked body. `digest` tells whether another body is the same one."""

    file: IO[bytes]
    kept: list[Record] = field(default_factory=list)
    """The first rows; those behind them are in the file."""
    rows: int = 0
    digest: bytes = b""
    refused: list[Refused] = field(default_factory=list)
    refused_count: int = 0

    def chunks(self, *, skip: int = 0) -> Iterator[list[Record]]:
        """Yield the rows in chunks, but for the first `skip` of them."""
        for start in range(skip, len(self.kept), CHUNK_ROWS):
            yield self.kept[start : start + CHUNK_ROWS]
        self.file.seek(0)
        chunk: list[Record] = []
        size = 0
        lines = islice(self.file, 2 * max(0, skip - len(self.kept)), None)
        for about, item in zip(lines, lines, strict=True):
            chunk.append(Record._make((*documents.load(about), item[:-1])))
            size += len(about) + len(item)
            if len(chunk) >= CHUNK_ROWS or size >= CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk

    def write(self, record: Record) -> None:
        """Append a row to the file: what is said of it, then its item, a line each."""
        self.file.write(b"%b\n%b\n" % (documents.dump(record[:-1]), record.item))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def take_in(
    chunks: Iterable[bytes],
    *,
    directory: Path,
    fingerprint: Callable[[Mapping[str, Any]], bytes],
    key_fields: Sequence[str],
    format: Format = Format.NDJSON,
    limit: int = sys.maxsize,
    seed: bytes = b"",
    first_position: int | None = None,
) -> Spool:
    """Read a whole body; raise BadUpload where it is refused whole.

    `limit` bounds the bytes that a Parquet file unfolds to. `seed` enters the digest, which is
    taken over the bytes as they come in here, decompressed: what else must be equal for the same
    request. `first_position` is the first row's, where that is known: then no row may call itself
    what another one is called by its position.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Where the processor has instructions for it, in half of BLAKE2's time.
    hasher = sha256(seed)
    file = tempfile.TemporaryFile(dir=directory, buffering=1 << 20)  # noqa: SIM115 (Spool closes it)
    spool = Spool(file=file)
    try:
        ids, id_lines = bytearray(), array("Q")
        like_default = False
        keys = frozenset(key_fields)
        body = _Hashed(chunks, hasher.update)
        # A small Parquet file may unfold to any size.
        most_kept = 0 if format is Format.PARQUET else KEPT_BYTES
        for row in read_rows(format, body, directory=directory, limit=limit):
            if isinstance(row, Refused):
                spool.refused_count += 1
                if len(spool.refused) < MOST_LISTED:
                    spool.refused.append(row)
                continue
            digest = None
            if row.request_id is not None:
                digest = request_digest(row.request_id)
                ids += digest
                id_lines.append(row.line)
                like_default = like_default or row.request_id.startswith("row-")
            record = _record(row, digest, fingerprint(row.item), keys)
            if body.size <= most_kept:
                spool.kept.append(record)
            else:
                spool.write(record)
            spool.rows += 1
        spool.digest = hasher.digest()[:_DIGEST_BYTES]
        _refuse_empty(spool)
        repeated = _repeated(ids, id_lines)
        if first_position is not None and like_default and len(id_lines) < spool.rows:
            repeated = repeated or _repeated(*_all_ids(spool, first_position))
        if repeated:
            raise _duplicates(spool, repeated, first_position or 0)
    except BaseException:
        spool.file.close()
        raise
    return spool


class _Hashed:
    """The pieces of a body, hashed as they are read; `size` is what was read so far."""

    def __init__(self, chunks: Iterable[bytes], update: Callable[[bytes], None]) -> None:
        self._chunks = chunks
        self._update = update
        self.size = 0

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            self._update(chunk)
            self.size += len(chunk)
            yield chunk


def _record(row: Row, digest: bytes | None, fingerprint: bytes, keys: frozenset[str]) -> Record:
    item, url = row.item, row.item.get("url")
    if not item.keys() <= keys:
        item = {name: field for name, field in item.items() if name in keys}
    return Record(
        row.line,
        row.request_id,
        None if digest is None else digest.hex(),
        row.query_id,
        row.result_id,
        row.side,
        row.result_weight,
        row.query_weight,
        fingerprint.hex(),
        url_digest(url).hex() if url else None,
        row.extra,
        list(row.warnings),  # as it comes back from the file
        bytes(memoryview(documents.dump(item))),  # orjson's own has kilobytes of room behind it
    )


def _refuse_empty(spool: Spool) -> None:
    if spool.rows:
        return
    if spool.refused:
        raise BadUpload(
            "no row of the file could be taken; see `errors`",
            code="no_valid_rows",
            errors=[refused.as_json() for refused in spool.refused],
        )
    raise BadUpload("the file has no rows", code="empty_file")


def _all_ids(spool: Spool, first_position: int) -> tuple[bytearray, "array[int]"]:
    """Return the digest and line of each row's id, those by position included."""
    ids, id_lines = bytearray(), array("Q")
    records = chain.from_iterable(spool.chunks())
    for position, record in enumerate(records, first_position):
        ids += request_digest(record.name(position))
        id_lines.append(record.line)
    return ids, id_lines


def _repeated(ids: bytearray, id_lines: "array[int]") -> list[tuple[int, int]]:
    """Return the first lines that repeat a request id, each with the line that had it first."""
    if not ids:
        return []
    digests = np.frombuffer(ids, dtype=np.uint64).reshape(-1, 2)
    order = np.lexsort((digests[:, 0], digests[:, 1]))  # stable: the first line comes first
    ordered = digests[order]
    repeats = (ordered[1:] == ordered[:-1]).all(axis=1)
    if not repeats.any():
        return []
    places = np.arange(1, len(ordered))
    firsts = np.maximum.accumulate(np.where(repeats, 0, places))[repeats]
    lines = np.frombuffer(id_lines, dtype=np.uint64)[order]
    pairs = np.stack((lines[1:][repeats], lines[firsts]), axis=1)
    return [(line, first) for line, first in pairs[np.argsort(pairs[:, 0])][:MOST_LISTED].tolist()]


def _duplicates(
    spool: Spool, repeated: Sequence[tuple[int, int]], first_position: int
) -> BadUpload:
    """Return the refusal of a body in which a request id stands twice, naming it and its lines."""
    lines = {line for line, _ in repeated}
    records = enumerate(chain.from_iterable(spool.chunks()), first_position)
    names = {r.line: r.name(position) for position, r in records if r.line in lines}
    line, first = repeated[0]
    return BadUpload(
        f"line {line} repeats the request_id {names[line][:64]!r} of line {first}; ids are unique "
        "in a workflow",
        code="duplicate_request_id",
        errors=[
            {
                "line": line,
                "first_line": first,
                "request_id": names[line],
                "code": "duplicate_request_id",
                "detail": f"the same request_id stands in line {first}",
            }
            for line, first in repeated
        ],
    )
