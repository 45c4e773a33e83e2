"""NDJSON: one JSON object a line; records end at LF only."""

from collections.abc import Iterable, Iterator

from fulfillment.formats.lines import lines
from fulfillment.formats.rows import Refusal, Refused, Row, check, row_too_large
from fulfillment.formats.values import parse, parse_slowly, rounded


def read_ndjson(chunks: Iterable[bytes]) -> Iterator[Row | Refused]:
    """Yield a checked row or its refusal for each non-blank line."""
    for number, line in lines(chunks):
        if line is None:
            yield row_too_large(number)
        elif line and not line.isspace():
            yield read_row(number, line)


def read_row(number: int, line: bytes) -> Row | Refused:
    """Check one JSON line."""
    try:
        row = check(number, *parse(line))
        if rounded(row.extra) or rounded(row.item.get("context")):
            row = check(number, *parse_slowly(line))
        return row
    except Refusal as refusal:
        return Refused(line=number, code=refusal.code, detail=refusal.detail)
