"""CSV (RFC 4180): comma, double quotes, a header; records end at LF or CRLF outside quotes.

Cells are text and stay text, but for two kinds of columns that hold something else by their name:
weights are numbers, `context` is a JSON object. An empty cell is an absent field, as CSV has no
other way to say so. Python's `csv` reads the records; this module tells it where a line ends, knows
where each record began, and finds the next one after a bad one.
"""

import csv
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from fulfillment.errors import BadUpload
from fulfillment.formats import rows
from fulfillment.formats.columns import check_names
from fulfillment.formats.lines import lines
from fulfillment.formats.rows import (
    QUERY_FIELDS,
    WEIGHT_FIELDS,
    Refusal,
    Refused,
    Row,
    check,
    row_too_large,
)
from fulfillment.formats.values import context_in

# A limit of the whole process, made for files that nobody bounds: ours are bounded by the row.
csv.field_size_limit(2 * rows.MAX_ROW_BYTES)

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)
_OTHER_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "bars"}


class _TooLarge(Exception):
    """The record at hand is over the row limit."""


class _Lines:
    """Gives `csv` one physical line after the other and remembers those of the record at hand."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._lines = lines(chunks, dropped=self._count_dropped)
        self.number = 0
        self.ended = False
        self.begin()

    def begin(self) -> None:
        """Forget the last record; the next line begins another."""
        self.first = self.number + 1
        self.texts: list[str] = []
        self.broken: int | None = None
        self.has_nul = False
        self._size = 0
        self._quotes = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            self.number, line = next(self._lines)
        except StopIteration:
            self.ended = True
            raise
        self._size += rows.MAX_ROW_BYTES + 1 if line is None else len(line) + 1
        if line is None or self._size > rows.MAX_ROW_BYTES + 1:
            self._quotes += sum(text.count('"') for text in self.texts)
            self._quotes += 0 if line is None else line.count(b'"')
            raise _TooLarge
        try:
            text = line.decode() + "\n"
        except UnicodeDecodeError:
            # The bytes between quotes and commas do not matter: the record is refused.
            text = line.decode(errors="surrogateescape") + "\n"
            self.broken = self.broken or self.number
        self.has_nul = self.has_nul or "\0" in text
        self.texts.append(text)
        return text

    def skip_bad(self) -> None:
        """Go to the end of a record that is not CSV, as a reader takes it that minds nothing."""
        # A CR outside quotes is what even such a reader minds.
        texts = (text.replace("\r", " ") for text in chain(list(self.texts), self))
        try:
            next(csv.reader(texts))
        except _TooLarge:
            self.skip_large()

    def skip_large(self) -> None:
        """Go to the end of a record that is too large: to the next line end outside quotes."""
        while self._quotes % 2:
            number, line = next(self._lines, (0, b""))
            if not number:
                self.ended = True
                return
            self.number = number
            self._quotes += 0 if line is None else line.count(b'"')

    def _count_dropped(self, piece: bytes | bytearray) -> None:
        self._quotes += piece.count(b'"')


def read_csv(chunks: Iterable[bytes]) -> Iterator[Row | Refused]:
    """Yield a checked row or its refusal for each record below the header.

    A refusal's line is the one where its record starts.
    """
    source = _Lines(chunks)
    reader = csv.reader(source, strict=True)
    names: list[str] | None = None
    while True:
        source.begin()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except (_TooLarge, csv.Error) as error:
            refused = _skip(source, error)
            if names is None:
                raise BadUpload(f"the header: {refused.detail}", code=refused.code) from error
            yield refused
            continue
        if not cells:
            continue
        if names is None:
            names = _header(cells, source)
        else:
            yield _row(names, cells, source)


def _skip(source: _Lines, error: Exception) -> Refused:
    """Go to the end of a record that could not be read; return its refusal."""
    if isinstance(error, _TooLarge):
        source.skip_large()
    elif not source.ended:
        source.skip_bad()
    if source.ended:
        raise BadUpload(
            f"a quote of the record in line {source.first} is never closed, so where the records "
            "after it begin cannot be known; close it, or write a quote inside a cell twice",
            code="unclosed_quote",
            errors=[
                {
                    "line": source.first,
                    "code": "unclosed_quote",
                    "detail": "the file ends inside quotes",
                }
            ],
        ) from error
    if isinstance(error, _TooLarge):
        return row_too_large(source.first)
    detail = (
        "a carriage return stands outside quotes; quote the cell"
        if "new-line" in str(error)
        else "text follows a closing quote; write a quote inside a quoted cell twice"
    )
    return Refused(line=source.first, code="bad_quoting", detail=detail)


def _header(names: list[str], source: _Lines) -> list[str]:
    if source.broken or source.has_nul:
        raise BadUpload(
            "the header is not UTF-8; save the file as UTF-8 and send it again",
            code="unsupported_encoding",
        )
    check_names(names, hint=_delimiter_hint(source.texts))
    return names


def _delimiter_hint(texts: Sequence[str]) -> str:
    for delimiter, called in _OTHER_DELIMITERS.items():
        try:
            names = next(csv.reader(texts, delimiter=delimiter), [])
        except csv.Error:  # quotes that stand otherwise between these
            continue
        if set(QUERY_FIELDS).intersection(names):
            return f"; the cells stand between {called}, save the file with commas"
    if "\r" in texts[0].rstrip("\r\n"):
        return "; its lines end in CR alone, save the file with LF or CRLF"
    return ""


def _row(names: Sequence[str], cells: Sequence[str], source: _Lines) -> Row | Refused:
    try:
        if source.broken:
            raise Refusal("invalid_utf8", f"line {source.broken} has bytes that are not UTF-8")
        if len(cells) != len(names):
            raise Refusal(
                "wrong_field_count",
                f"{len(cells)} cells where the header has {len(names)}; a cell with a comma or a "
                "line break needs quotes",
            )
        warnings: tuple[str, ...] = ()
        if source.has_nul:
            cells, warnings = [cell.replace("\0", "\ufffd") for cell in cells], ("nul_replaced",)
        value: dict[str, Any] = {n: c for n, c in zip(names, cells, strict=True) if c}
        if value.keys().isdisjoint(QUERY_FIELDS):
            value["query_text"] = ""
        for name in WEIGHT_FIELDS:
            if name in value:
                value[name] = _number(name, value[name])
        if "context" in value:
            value["context"], more = context_in("context", value["context"])
            warnings = tuple(dict.fromkeys((*warnings, *more)))
        return check(source.first, value, warnings)
    except Refusal as refusal:
        return Refused(line=source.first, code=refusal.code, detail=refusal.detail)


def _number(name: str, cell: str) -> float:
    if _NUMBER.fullmatch(cell):
        if math.isfinite(number := float(cell)):
            return number
        raise Refusal("bad_number", f"{name} is beyond a double")
    if _NOT_FINITE.fullmatch(cell):
        raise Refusal("bad_number", f"{name} is {cell}; leave the cell empty")
    raise Refusal("bad_type", f"{name} must be a number like 0.5, not {cell[:40]!r}")
