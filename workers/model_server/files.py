"""A checkpoint's files, read so that nothing but regular files inside one boundary is opened.

Imports neither JAX nor numpy: model management looks at files with it, too. What the weights are is
known from their `headers`.
"""

import hashlib
import io
import itertools
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
PACKED: Final = "model.msgpack"
ORBAX: Final = "model.orbax"
"""A folder."""
CONFIG: Final = "config.json"
TOKENIZER: Final = "tokenizer.json"

_UNPICKLED: Final = frozenset({".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"})
LONGEST_JSON_BYTES: Final = 16 << 20
_CHUNK_BYTES: Final = 1 << 20
_MOST_FILES: Final = 100_000
_DEEPEST: Final = 16
"""Of folders in a folder; links could lead round in circles."""


class CheckpointRefused(Exception):
    """The checkpoint cannot be served; `code` is stable, `detail` explains it."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class Files(Protocol):
    """The files of one checkpoint, by name; a name may have folders in it."""

    def has(self, name: str) -> bool:
        """Say whether there is something of this name."""

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading; raises CheckpointRefused."""

    def read(self, name: str, *, longest: int | None = None) -> bytes:
        """Return a whole file of `longest` bytes at most; raises CheckpointRefused."""

    def digest(self, name: str) -> str:
        """Return a file's SHA-256, of the bytes that `read` returned where it was read."""

    def below(self, name: str) -> list[str]:
        """Return the names of all that is no folder in a folder; raises CheckpointRefused.

        They are those that were there when it was first asked: what is read is what is digested.
        """

    def names_unpickled(self) -> list[str]:
        """Return the files that could only be unpickled."""


class Folder:
    """Files on disk. Links are followed as long as they stay inside `boundary`."""

    def __init__(self, path: Path, *, boundary: Path) -> None:
        self._path = path
        self._boundary = boundary
        self._digests: dict[str, str] = {}
        self._listed: dict[str, list[str]] = {}

    def has(self, name: str) -> bool:
        return self._inside(name).exists()

    def open(self, name: str) -> BinaryIO:
        path = self._inside(name)
        try:
            _require_regular(name, path.stat().st_mode)
            # Should it have become a FIFO meanwhile, opening it must not hang, or a link, it must
            # not be followed: its path has been resolved.
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
            file = os.fdopen(os.open(path, flags), "rb")
        except FileNotFoundError as error:
            raise CheckpointRefused("checkpoint_not_found", f"the folder has no {name}") from error
        except OSError as error:
            raise unreadable(name, error) from error
        try:
            _require_regular(name, os.fstat(file.fileno()).st_mode)
        except CheckpointRefused:
            file.close()
            raise
        return file

    def read(self, name: str, *, longest: int | None = None) -> bytes:
        with self.open(name) as file:
            try:
                found = file.read() if longest is None else file.read(longest + 1)
            except OSError as error:
                raise unreadable(name, error) from error
        if longest is not None and len(found) > longest:
            raise unreadable(name, ValueError(f"it is longer than {longest} bytes"))
        self._digests[name] = hashlib.sha256(found).hexdigest()
        return found

    def digest(self, name: str) -> str:
        if name not in self._digests:
            hasher = hashlib.sha256()
            with self.open(name) as file:
                try:
                    while chunk := file.read(_CHUNK_BYTES):
                        hasher.update(chunk)
                except OSError as error:
                    raise unreadable(name, error) from error
            self._digests[name] = hasher.hexdigest()
        return self._digests[name]

    def below(self, name: str) -> list[str]:
        if name not in self._listed:
            self._listed[name] = self._list(name)
        return self._listed[name]

    def _list(self, name: str) -> list[str]:
        try:
            found = sorted(itertools.islice(self._below(name, _DEEPEST), _MOST_FILES + 1))
        except OSError as error:
            raise unreadable(name, error) from error
        if len(found) > _MOST_FILES:
            raise unreadable(name, ValueError(f"more than {_MOST_FILES} files"))
        return found

    def _below(self, name: str, deepest: int) -> Iterator[str]:
        if not deepest:
            raise unreadable(name, ValueError("folders in it are too deep"))
        for entry in self._inside(name).iterdir():
            # A line break in one would make two files of it in the digest.
            if not entry.name.isprintable():
                raise unreadable(name, ValueError(f"{entry.name!r} in it is no name of a file"))
            inner = f"{name}/{entry.name}"
            if self._inside(inner).is_dir():
                yield from self._below(inner, deepest - 1)
            else:
                yield inner

    def names_unpickled(self) -> list[str]:
        return sorted(p.name for p in self._path.iterdir() if p.suffix in _UNPICKLED)

    def _inside(self, name: str) -> Path:
        resolved = Path(os.path.realpath(self._path / name))
        if not resolved.is_relative_to(self._boundary):
            raise CheckpointRefused("path_not_allowed", f"{name} leads out of the root")
        return resolved


class Memory:
    """Files that were made in memory, for random weights."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self._contents = contents

    def has(self, name: str) -> bool:
        return name in self._contents

    def open(self, name: str) -> BinaryIO:
        return io.BytesIO(self.read(name))

    def read(self, name: str, *, longest: int | None = None) -> bytes:
        if name not in self._contents:
            raise CheckpointRefused("checkpoint_not_found", f"there is no {name}")
        return self._contents[name]

    def digest(self, name: str) -> str:
        return hashlib.sha256(self.read(name)).hexdigest()

    def below(self, name: str) -> list[str]:
        return sorted(each for each in self._contents if each.startswith(f"{name}/"))

    def names_unpickled(self) -> list[str]:
        return []


def unreadable(name: str, error: Exception) -> CheckpointRefused:
    """Say that a file of the checkpoint cannot be read, and why."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return CheckpointRefused("checkpoint_unreadable", f"{name}: {reason}")


def read_json(files: Files, name: str) -> dict[str, Any]:
    """Return a JSON object; raises CheckpointRefused."""
    # Not by `open`: the digest has to be of the bytes that were read.
    content = files.read(name, longest=LONGEST_JSON_BYTES)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise unreadable(name, error) from error
    if not isinstance(found, dict):
        raise CheckpointRefused("checkpoint_unreadable", f"{name}: not an object")
    return found


def whole(config: Mapping[str, Any], name: str, *, least: int = 1) -> int:
    """Return a whole number of a `config.json`; raises CheckpointRefused."""
    value = config.get(name)
    if type(value) is not int or not least <= value < 2**31:
        raise CheckpointRefused(
            "unknown_size", f"{CONFIG}: {name} is a whole number of at least {least}"
        )
    return value


def real(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return a positive number of a `config.json`; raises CheckpointRefused."""
    value = config.get(name, default)
    if type(value) not in (int, float) or not 0 < value < 1e12:
        raise CheckpointRefused("unknown_size", f"{CONFIG}: {name} is a positive number")
    return float(value)


def _require_regular(name: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise CheckpointRefused("not_a_regular_file", f"{name} is not a regular file")
