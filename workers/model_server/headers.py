"""What a checkpoint's weights are: which files hold them, and of each tensor its type and shape.

What lies in a safetensors file is known from its header, so that a wrong or truncated file is found
without reading its weights; Flax's msgpack and Orbax's folders have no header, and are read.
Imports neither JAX nor numpy (but where there is such a folder).
"""

import hashlib
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from workers.model_server import orbax, packed
from workers.model_server.files import (
    INDEX,
    ORBAX,
    PACKED,
    WEIGHTS,
    CheckpointRefused,
    Files,
    read_json,
    unreadable,
)

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
_LONGEST_HEADER_BYTES: Final = 16 << 20
"""A hundred thousand tensors' worth; parsed, it takes up to thirty times as much memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a safetensors file says of one tensor."""

    dtype: str
    shape: tuple[int, ...]


def weight_files(files: Files) -> list[str]:
    """Return what holds the weights: a file, the shards of an index, or Orbax's folder."""
    if files.has(WEIGHTS):
        return [WEIGHTS]
    if files.has(INDEX):
        return sorted(set(_weight_map(files).values()))
    if files.has(PACKED):
        return [PACKED]
    if files.has(ORBAX):
        return [ORBAX]
    if unsafe := files.names_unpickled():
        raise CheckpointRefused(
            "unsafe_checkpoint", f"{unsafe[0]} would have to be unpickled; only {WEIGHTS} is read"
        )
    raise CheckpointRefused("checkpoint_not_found", f"the folder has no {WEIGHTS}")


def weights_digest(files: Files) -> str:
    """Return the SHA-256 of the weights: of the one file, or of all files' names and digests."""
    names = weight_files(files)
    if names in ([WEIGHTS], [PACKED]):
        return files.digest(names[0])
    if names == [ORBAX]:
        names = files.below(ORBAX)
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
    if names == [ORBAX]:
        return _orbax_headers(files)
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


def _orbax_headers(files: Files) -> dict[str, Header]:
    return {
        name: Header(
            dtype=packed.TYPES.get(str(array.dtype), (str(array.dtype), 0))[0], shape=array.shape
        )
        for name, array in orbax.arrays(files)
    }


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
