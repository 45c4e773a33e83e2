"""Durations as people write them: `2h`, `1h30m`, `90min`, `45s`, `7200`."""

import re
from datetime import timedelta

_PIECE = re.compile(r"(\d+(?:\.\d+)?)\s*(d|h|min|m|s|)\s*")
_UNIT_S = {"d": 86400, "h": 3600, "min": 60, "m": 60, "s": 1, "": 1}


def duration_from(text: str) -> timedelta:
    """Raises ValueError when the text is not a positive duration."""
    text = text.strip().lower()
    pieces = _PIECE.findall(text)
    bare = [unit for _, unit in pieces].count("")
    if not _PIECE.sub("", text) == "" or (bare and len(pieces) > 1):
        raise ValueError(f"{text!r} is not a duration like 2h, 1h30m, 45s or 7200")
    try:
        total = timedelta(seconds=sum(float(number) * _UNIT_S[unit] for number, unit in pieces))
    except OverflowError as error:
        raise ValueError(f"{text!r} is too long") from error
    if total < timedelta(seconds=1):
        raise ValueError(f"{text!r} is shorter than a second")
    return total
