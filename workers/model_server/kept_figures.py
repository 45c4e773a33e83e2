"""Keeps chosen figures in a file, so that a restart need not measure again.

A file's name is a digest of all that its figures depend on; remove it to have them measured anew. A
file that cannot be read or makes no sense counts as none, and one that cannot be written is made at
the next start: the log says so.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from workers.model_server.serving import Serving

logger = logging.getLogger(__name__)

FOLDER: Final = "figures"
_LOCK: Final = "measuring.lock"


class KeptFigures:
    """The file for one model on one kind of device, described by `key`, in `directory`."""

    def __init__(self, directory: Path, key: Mapping[str, Any]) -> None:
        self._key = dict(key)
        digest = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()
        self._directory = directory
        self.path = directory / f"{digest[:32]}.json"

    def read(self, table: Serving) -> tuple[Serving, str] | None:
        """Return `table` with the figures that were kept, and why these; None without a file."""
        try:
            document = json.loads(self.path.read_bytes())
            return _applied(table, document["figures"]), str(document["reason"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning(
                "kept figures ignored", extra={"file": str(self.path), "error": repr(error)}
            )
            return None

    def write(self, serving: Serving, reason: str) -> None:
        """Keep figures, whole or not at all."""
        document = {"figures": serving.figures, "reason": reason, "depends_on": self._key}
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self._directory, prefix=".figures-", delete=False
            ) as file:
                try:
                    json.dump(document, file, indent=1)
                    file.flush()
                    os.fsync(file.fileno())
                    os.replace(file.name, self.path)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            logger.warning("figures not kept", extra={"file": str(self.path), "error": repr(error)})

    @contextlib.contextmanager
    def measuring(self) -> Iterator[bool]:
        """Whether this server may measure now: two at a time would measure each other."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            yield True  # what cannot be locked cannot be kept either
            return
        try:
            yield _locked(lock)
        finally:
            os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _applied(table: Serving, figures: Mapping[str, Any]) -> Serving:
    """Raise ValueError for figures that no server could be run with."""
    lanes, batch, fill = (
        _whole(figures[name], least=1) for name in ("lanes", "batch_tokens", "fill_tokens")
    )
    row_counts = tuple(_whole(count, least=1) for count in figures["row_counts"])
    if not row_counts or fill > batch:
        raise ValueError("no row counts, or more tokens to fill than a batch has")
    return replace(
        table,
        lanes=lanes,
        shaping=replace(table.shaping, batch_tokens=batch, fill_tokens=fill),
        row_counts=row_counts,
        call_tokens=_whole(figures["call_tokens"], least=0),
    )


def _whole(value: Any, *, least: int) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r} is no whole number from {least}")
    return value
