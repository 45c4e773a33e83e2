"""A checkpoint's files, read so that nothing but regular files inside one boundary is opened.

Imports neither JAX nor numpy: model management reads headers with it, too. What lies in a
safetensors file is known from its header, so that a wrong or truncated file is found without
reading its weights; Flax's msgpack has no header, and is read.
"""

import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

from workers.model_server import packed

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
PACKED: Final = "model.msgpack"
CONFIG: Final = "config.json"
TOKENIZER: Final = "tokenizer.json"

FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
_ITEM_BYTES: Final = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "BOOL": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
}

_SHARD: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors")
_UNPICKLED: Final = frozenset({".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"})
_LONGEST_HEADER_BYTES: Final = 16 << 20
"""A hundred thousand tensors' worth; parsed, it takes up to thirty times as much memory."""
_LONGEST_JSON_BYTES: Final = 16 << 20
_CHUNK_BYTES: Final = 1 << 20


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

    def names_unpickled(self) -> list[str]:
        """Return the files that could only be unpickled."""


class Folder:
    """Files on disk. Links are followed as long as they stay inside `boundary`."""

    def __init__(self, path: Path, *, boundary: Path) -> None:
        self._path = path
        self._boundary = boundary
        self._digests: dict[str, str] = {}

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

    def names_unpickled(self) -> list[str]:
        return []


def unreadable(name: str, error: Exception) -> CheckpointRefused:
    """Say that a file of the checkpoint cannot be read, and why."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return CheckpointRefused("checkpoint_unreadable", f"{name}: {reason}")


def read_json(files: Files, name: str) -> dict[str, Any]:
    """Return a JSON object; raises CheckpointRefused."""
    # Not by `open`: the digest has to be of the bytes that were read.
    content = files.read(name, longest=_LONGEST_JSON_BYTES)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise unreadable(name, error) from error
    if not isinstance(found, dict):
        raise CheckpointRefused("checkpoint_unreadable", f"{name}: not an object")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a safetensors file says of one tensor."""

    dtype: str
    shape: tuple[int, ...]


def weight_files(files: Files) -> list[str]:
    """Return the names of the files that hold the weights: one, or the shards of an index."""
    if files.has(WEIGHTS):
        return [WEIGHTS]
    if files.has(INDEX):
        return sorted(set(_weight_map(files).values()))
    if files.has(PACKED):
        return [PACKED]
    if unsafe := files.names_unpickled():
        raise CheckpointRefused(
            "unsafe_checkpoint", f"{unsafe[0]} would have to be unpickled; only {WEIGHTS} is read"
        )
    raise CheckpointRefused("checkpoint_not_found", f"the folder has no {WEIGHTS}")


def weights_digest(files: Files) -> str:
    """Return the SHA-256 of the weights: of the one file, or of all shards' names and digests."""
    names = weight_files(files)
    if names in ([WEIGHTS], [PACKED]):
        return files.digest(names[0])
    lines = "".join(f"{name} {files.digest(name)}\n" for name in names)
    return hashlib.sha256(lines.encode()).hexdigest()


def headers(files: Files, name: str | None = None) -> dict[str, Header]:
    """Return all tensors of the weights (or of one file) with their types and shapes.

    Raises CheckpointRefused: `checkpoint_unreadable` for a file that is no safetensors file or is
    not as long as its header says, `missing_tensor` for one that its index promises in vain.
    """
    if name is not None:
        return _file_headers(files, name)
    names = weight_files(files)
    if names == [PACKED]:
        return _packed_headers(files)
    found = {shard: _file_headers(files, shard) for shard in names}
    if names != [WEIGHTS]:
        for tensor, shard in _weight_map(files).items():
            if tensor not in found[shard]:
                raise CheckpointRefused("missing_tensor", f"{shard} has no {tensor}")
    return {tensor: header for part in found.values() for tensor, header in part.items()}


def require(found: Mapping[str, Header], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse weights that lack one of the tensors, or have it in another shape or no float."""
    for name, shape in shapes.items():
        header = found.get(name)
        if header is None:
            raise CheckpointRefused("missing_tensor", f"the weights have no {name}")
        if header.shape != shape:
            raise CheckpointRefused(
                "wrong_shapes", f"{name} is {list(header.shape)}, the config means {list(shape)}"
            )
        if header.dtype not in FLOATS:
            raise CheckpointRefused(
                "wrong_shapes", f"{name} is of type {header.dtype}, not one of {sorted(FLOATS)}"
            )


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


def _weight_map(files: Files) -> dict[str, str]:
    """Return the shard of each tensor; shards lie beside their index."""
    found = read_json(files, INDEX).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointRefused("checkpoint_unreadable", f"{INDEX}: no weight_map")
    for shard in found.values():
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
            raise CheckpointRefused(
                "path_not_allowed", f"{INDEX}: a shard is a .safetensors file beside its index"
            )
    return found


def _file_headers(files: Files, name: str) -> dict[str, Header]:
    with files.open(name) as file:
        try:
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER_BYTES):
                raise ValueError(f"no safetensors file of {size} bytes starts like this")
            document = json.loads(file.read(length))
            return _read_header(document, size - 8 - length)
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise unreadable(name, error) from error


def _packed_headers(files: Files) -> dict[str, Header]:
    content = files.read(PACKED)
    try:
        return {
            name: Header(dtype=dtype, shape=shape) for name, dtype, shape in packed.leaves(content)
        }
    except (ValueError, TypeError, RecursionError) as error:
        raise unreadable(PACKED, error) from error


def _read_header(document: Any, data_bytes: int) -> dict[str, Header]:
    """Raises ValueError and its like for what is no header of so many bytes of data."""
    if not isinstance(document, dict):
        raise ValueError("its header is not an object")
    found, end = {}, 0
    for name, entry in document.items():
        if name == "__metadata__":
            continue
        shape, dtype = tuple(entry["shape"]), entry["dtype"]
        begin, stop = entry["data_offsets"]
        # Unbounded, their product could take hours.
        if len(shape) > packed.MOST_DIMENSIONS or not all(
            type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, stop)
        ):
            raise ValueError(f"{name!r} has no shape")
        if stop - begin != prod(shape) * _ITEM_BYTES[dtype]:
            raise ValueError(f"{name!r} is {stop - begin} bytes, its shape needs others")
        end = max(end, stop)
        found[name] = Header(dtype=dtype, shape=shape)
    if end != data_bytes:
        raise ValueError(f"it has {data_bytes} bytes of data, its header tells of {end}")
    return found
