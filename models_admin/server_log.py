"""What a model server has written, read from its log: its address, its last words, a refusal."""

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_LIMIT_BYTES: Final = 10 * 1024 * 1024
_LONGEST_LINE_BYTES: Final = 64 * 1024
_LAST_WORDS_CHARACTERS: Final = 500
_TAIL_BYTES: Final = 4_000
_PERMANENT: Final = frozenset(
    {
        "bad_option",
        "checkpoint_not_found",
        "checkpoint_unreadable",
        "digest_mismatch",
        "missing_tensor",
        "not_a_regular_file",
        "package_not_installed",
        "path_not_allowed",
        "unknown_architecture",
        "unknown_loader",
        "unknown_size",
        "unsafe_checkpoint",
        "wrong_shapes",
    }
)
"""Codes of refusals that will be the same the next time; of others nobody knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why a server could not load its model, as it says."""

    text: str
    is_permanent: bool


def find_address(log: Path, scanned: int) -> tuple[str, int]:
    """Look for the address in what the server wrote behind `scanned` bytes; return both anew.

    It says so twice: in a line of its log when it listens, and after `READY` when it serves.
    """
    try:
        with log.open("rb") as file:
            file.seek(scanned)
            data = file.read(_LONGEST_LINE_BYTES)
    except OSError:
        return "", scanned
    complete = data.rfind(b"\n") + 1
    if not complete and len(data) == _LONGEST_LINE_BYTES:
        complete = len(data)
    for line in data[:complete].splitlines():
        if b'"url"' in line:
            url = _object(line.removeprefix(b"READY ")).get("url")
            if isinstance(url, str) and url.startswith("http://"):
                return url, scanned + complete
    return "", scanned + complete


def tail(
    log: Path, since: int, secrets: Collection[str], *, longest_bytes: int = _TAIL_BYTES
) -> str:
    """Return the last whole lines of a run whose log begins at `since`, secrets blotted out.

    "" where there is no log to be read: nobody's servers end because somebody removed it.
    """
    try:
        with log.open("rb") as file:
            # A log that was emptied meanwhile begins anew.
            size = os.fstat(file.fileno()).st_size
            start = max(min(since, size) if since <= size else 0, size - longest_bytes)
            file.seek(start)
            data = file.read(longest_bytes)
    except OSError:
        return ""
    # A line that was cut goes, unless there is nothing else.
    if start > since and (rest := data.partition(b"\n")[2].strip()):
        data = rest
    text = _storable(data.decode(errors="replace")).strip()
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def last_words(log: Path, since: int, secrets: Collection[str]) -> str:
    """Return more of the end of a log than a tail: a refusal comes with a long traceback."""
    return tail(log, since, secrets, longest_bytes=_LONGEST_LINE_BYTES)


def last_line(text: str) -> str:
    """Return the last line of a tail, shortened."""
    lines = text.splitlines()
    return lines[-1].strip()[-_LAST_WORDS_CHARACTERS:] if lines else ""


def refusal(text: str) -> Refusal | None:
    """Return why a model was not loaded, if the tail says so."""
    for line in reversed(text.splitlines()):
        if "model not loaded" not in line:
            continue
        said = _object(line.encode())
        if said.get("event") != "model not loaded":
            continue
        error = said.get("error") or said.get("reason") or "it does not say why"
        code = _storable(str(said.get("code") or ""))
        text = " ".join(_storable(str(error)).split())
        if not code and text.partition(":")[0] in _PERMANENT:
            code = text.partition(":")[0]
        if code and not text.startswith(f"{code}:"):
            text = f"{code}: {text}"
        return Refusal(text=text[:_LAST_WORDS_CHARACTERS], is_permanent=code in _PERMANENT)
    return None


def checked(text: str) -> bool:
    """Say whether a check run says that its model can be loaded."""
    return any(_object(line.encode()).get("event") == "checked" for line in text.splitlines())


def rotate(log: Path) -> bool:
    """Copy and empty a full log: its writer keeps its descriptor, which appends."""
    if log.exists() and log.stat().st_size > _LIMIT_BYTES:
        # Where the disk is full there is no copy, and emptying it makes room.
        with contextlib.suppress(OSError):
            shutil.copyfile(log, log.with_suffix(".log.1"))
        os.truncate(log, 0)
        return True
    return False


def _storable(text: str) -> str:
    """Return a text without what PostgreSQL stores not: NUL, and halves of characters."""
    return text.replace("\0", "").encode(errors="replace").decode()


def _object(line: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
