"""Records as JSON Lines and as CSV, and either of them compressed on the way."""

import csv
import io
import math
import re
import zlib
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

import orjson

from fulfillment import results
from fulfillment.results import FIELDS, Page, batched, records

try:
    # The same format at a fraction of zlib's time, where there is a wheel for the platform.
    from isal.isal_zlib import compressobj
except ImportError:
    from zlib import compressobj  # type: ignore[assignment]

_GZIP_WBITS = 31


def jsonl(pages: Iterable[Page]) -> Iterator[bytes]:
    """Yield records as lines of JSON."""
    for of in pages:
        for lines in batched(records(of), results.STEP_ROWS):
            yield b"".join(
                orjson.dumps(line, option=orjson.OPT_UTC_Z | orjson.OPT_APPEND_NEWLINE)
                for line in lines
            )


def delimited(pages: Iterable[Page], *, header: bool) -> Iterator[bytes]:
    """Yield records as CSV whose text cells no spreadsheet takes for a formula."""
    text = io.StringIO()
    writer = csv.writer(text)
    if header:
        writer.writerow(FIELDS)
    for of in pages:
        for step in batched(records(of), results.STEP_ROWS):
            writer.writerows([_cell(record[field]) for field in FIELDS] for record in step)
            yield text.getvalue().encode()
            text.seek(0)
            text.truncate()
    if rest := text.getvalue():  # the header of an export without records
        yield rest.encode()


def gzipped(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield one gzip stream of the parts, compressed lightly and as they come."""
    packer = compressobj(1, zlib.DEFLATED, _GZIP_WBITS)
    for part in parts:
        if packed := packer.compress(part):
            yield packed
    yield packer.flush()


# Where a spreadsheet may start a formula: also behind blanks, and with full-width signs. A leading
# apostrophe is doubled, so that taking one away gives the text back.
_FORMULA = re.compile(r"'|[\t\r\n]|\s*[=+\-@＝＋－＠]")  # noqa: RUF001


def safe_text(text: str) -> str:
    """Return a text cell that no spreadsheet evaluates; drop one leading apostrophe to undo it."""
    return f"'{text}" if _FORMULA.match(text) else text


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case str():
            return safe_text(value)
        case float():
            return _number(value)
        case int():
            return str(value)
        case datetime():
            return orjson.dumps(value, option=orjson.OPT_UTC_Z).decode().strip('"')
        case []:
            return ""
        case _:
            return orjson.dumps(value).decode()


def _number(value: float) -> str:
    if not math.isfinite(value):
        return ""
    return str(int(value)) if value.is_integer() else repr(value)
