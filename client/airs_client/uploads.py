"""Rows on their way to the server, in constant memory whatever their number.

An `Upload` is opened once, hashed, and can be read several times, for a retry sends it again from
the start. What cannot be read twice (standard input, a pipe, an iterable of rows) is first written
to a temporary file; that also gives the length, which many servers want to know beforehand.
"""

import csv
import hashlib
import io
import json
import os
import stat
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal, Self, cast

from airs_client.errors import SourceChanged, SourceUnreadable

Rows = Iterable[Mapping[str, Any]]
Format = Literal["jsonl", "csv", "parquet"]

CONTENT_TYPES: Mapping[Format, str] = {
    "jsonl": "application/x-ndjson",
    "csv": "text/csv",
    "parquet": "application/vnd.apache.parquet",
}

_CHUNK_BYTES = 256 * 1024
_SPOOL_MEMORY_BYTES = 1024 * 1024
_BOM = b"\xef\xbb\xbf"
_GZIP_WINDOW = 31
_SUFFIXES: Mapping[str, Format] = {
    ".csv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}


class Upload:
    """One file to send, with what the server must know about it. Close it, or use `with`."""

    def __init__(self, file: IO[bytes], *, name: str, format: Format | None = None) -> None:
        self._file = file
        self.name = name
        head = file.read(4096)
        self.gzipped = head.startswith(b"\x1f\x8b")
        self.format: Format = format or _format_of(name, _unzipped(head) if self.gzipped else head)
        if name.lower().endswith(".json") and head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
            raise _json_list(name)
        self._stamp = self._look()
        self.size, self.digest = self._measure()

    @property
    def headers(self) -> dict[str, str]:
        encoding = {"Content-Encoding": "gzip"} if self.gzipped else {}
        return {
            "Content-Type": CONTENT_TYPES[self.format],
            "Content-Length": str(self.size),
            **encoding,
        }

    def chunks(self) -> Iterator[bytes]:
        """The bytes from the start. The last piece is held back if the file is not as it was."""
        self._file.seek(0)
        left = self.size
        while left:
            chunk = self._file.read(min(_CHUNK_BYTES, left))
            left -= len(chunk)
            if not chunk or (not left and self._look() != self._stamp):
                raise SourceChanged(self.name)
            yield chunk

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _measure(self) -> tuple[int, str]:
        self._file.seek(0)
        size, digest = 0, hashlib.sha256()
        while chunk := self._file.read(_CHUNK_BYTES):
            size += len(chunk)
            digest.update(chunk)
        return size, digest.hexdigest()

    def _look(self) -> tuple[int, int] | None:
        try:
            state = os.fstat(self._file.fileno())
        except (OSError, io.UnsupportedOperation):
            return None
        return state.st_size, state.st_mtime_ns


def open_upload(
    source: str | os.PathLike[str] | IO[bytes] | Rows,
    *,
    name: str | None = None,
    format: Format | None = None,
) -> Upload:
    """An upload of a path, of an open binary stream, or of rows given as mappings."""
    if isinstance(source, str | os.PathLike):
        return _open_path(Path(source), name=name, format=format)
    if hasattr(source, "read"):
        return _opened(
            _spooled(_pieces(cast(IO[bytes], source))), name=name or "stream", format=format
        )
    return _opened(_spooled(_lines(source)), name=name or "rows", format="jsonl")


def _open_path(path: Path, *, name: str | None, format: Format | None) -> Upload:
    try:
        file = path.open("rb")
    except OSError as error:
        raise SourceUnreadable(f"cannot read {path}: {error.strerror}") from error
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return _opened(file, name=name or path.name, format=format)
    with file:
        spool = _spooled(_pieces(file))
    return _opened(spool, name=name or path.name, format=format)


def _opened(file: IO[bytes], *, name: str, format: Format | None) -> Upload:
    try:
        return Upload(file, name=name, format=format)
    except BaseException:
        file.close()
        raise


def _spooled(pieces: Iterable[bytes]) -> IO[bytes]:
    spool = tempfile.SpooledTemporaryFile(max_size=_SPOOL_MEMORY_BYTES)  # noqa: SIM115 (returned)
    try:
        for piece in pieces:
            spool.write(piece)
        # Below its limit the spool has no file descriptor, and needs none: nobody else writes it.
        spool.seek(0)
    except BaseException:
        spool.close()
        raise
    return spool


def _pieces(stream: IO[bytes]) -> Iterator[bytes]:
    while piece := stream.read(_CHUNK_BYTES):
        yield piece


def _lines(rows: Rows) -> Iterator[bytes]:
    for number, row in enumerate(rows, start=1):
        try:
            text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise SourceUnreadable(f"row {number} cannot be written as JSON: {error}") from error
        try:
            yield text.encode() + b"\n"
        except UnicodeEncodeError:
            # A lone surrogate has no UTF-8 form; escaped, the server can replace it and say so.
            yield json.dumps(row, allow_nan=False).encode() + b"\n"


def _format_of(name: str, head: bytes) -> Format:
    if head.startswith(b"PAR1"):
        return "parquet"
    suffix = Path(name.lower().removesuffix(".gz")).suffix
    return _SUFFIXES.get(suffix) or ("csv" if _is_csv(head) else "jsonl")


def _unzipped(head: bytes) -> bytes:
    try:
        return zlib.decompressobj(_GZIP_WINDOW).decompress(head, len(head))
    except zlib.error:
        return b""


def _is_csv(head: bytes) -> bool:
    """Whether a file begins with a header that names the query, which no JSON row does."""
    first = head.removeprefix(_BOM).lstrip().partition(b"\n")[0].decode(errors="replace")
    names = next(csv.reader([first]), [])
    return not first.startswith("{") and not {"query_text", "query"}.isdisjoint(names)


def _json_list(name: str) -> SourceUnreadable:
    error = SourceUnreadable(f"{name} is one JSON list; AIRS reads one JSON object a line")
    error.remedy = f"Convert it: jq -c '.[]' {name} | airs submit - …"
    return error
