"""Orbax checkpoints: a folder that holds a tree of arrays, read without Orbax and without JAX.

What Orbax writes are Zarr arrays, in a database of files (OCDBT) or in a folder each, and
`_METADATA`, which names them. TensorStore reads both, but follows whatever a manifest says. So it
never sees the disk: every file is read within the checkpoint's boundary first and given to it in
memory. Nothing in the format can run code.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

from workers.model_server.files import (
    LONGEST_JSON_BYTES,
    ORBAX,
    CheckpointRefused,
    Files,
    unreadable,
)

if TYPE_CHECKING:
    import numpy as np

_METADATA: Final = f"{ORBAX}/_METADATA"
_ARRAYS: Final = frozenset({"jax.Array", "np.ndarray", "scalar"})
"""What stands for numbers; a tree may hold strings and nothing, too, which no model is made of."""
_LEAST_LIMIT_BYTES: Final = 1 << 30
_MOST_EXPANSION: Final = 100
"""Of a real checkpoint; a few bytes can claim to be any number of zeros."""
_CHUNK_BYTES: Final = 4096
"""What TensorStore takes beside its numbers for each chunk that it looks for, there or not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tree:
    """What `_METADATA` says."""

    names: tuple[str, ...]
    """Of the arrays, parts joined by dots."""
    in_database: bool
    driver: str
    is_complete: bool
    """Whether chunks of zeros are stored: then a missing one is a lost one."""


def arrays(files: Files) -> "Iterator[tuple[str, np.ndarray]]":
    """Yield each array with its name (parts joined by dots), one after the other.

    Raises CheckpointRefused: `checkpoint_unreadable` for what is no whole checkpoint.
    """
    import tensorstore

    places = files.below(ORBAX)
    tree = _tree(files)
    memory = tensorstore.Context()
    store = tensorstore.KvStore.open({"driver": "memory"}, context=memory).result()
    size = 0
    for place in places:
        if place != _METADATA:
            data = files.read(place)
            store.write(place, data).result()
            size += len(data)
    left = max(_LEAST_LIMIT_BYTES, _MOST_EXPANSION * size)
    for name in tree.names:
        try:
            found = tensorstore.open(_spec(tree, name), context=memory, open=True, read=True)
            array = found.result()
            chunk = [length or 1 for length in array.chunk_layout.read_chunk.shape or array.shape]
            chunks = prod(
                -(-length // part) for length, part in zip(array.shape, chunk, strict=True)
            )
            # A chunk is unpacked whole, however little of it the array has.
            numbers = max(prod(array.shape), prod(chunk))
            left -= max(numbers * array.dtype.numpy_dtype.itemsize, chunks * _CHUNK_BYTES)
            if left < 0:
                raise ValueError(f"{name} is far larger than the files it lies in")
            values = array.read().result()
        except Exception as error:  # the library has no class of its own
            raise _damaged(error) from error
        yield name, values


def _spec(tree: _Tree, name: str) -> Mapping[str, Any]:
    """Return where an array lies, as TensorStore has it."""
    place: dict[str, Any] = {"driver": "memory", "path": f"{ORBAX}/"}
    if tree.in_database:
        place = {"driver": "ocdbt", "base": place, "path": f"{name}/"}
    else:
        place["path"] += f"{name}/"
    return {
        "driver": tree.driver,
        "kvstore": place,
        "fill_missing_data_reads": not tree.is_complete,
    }


def _tree(files: Files) -> _Tree:
    if _METADATA not in files.below(ORBAX):
        raise CheckpointRefused(
            "checkpoint_unreadable", f"{_METADATA} is missing: it was not written to its end"
        )
    content = files.read(_METADATA, longest=LONGEST_JSON_BYTES)
    try:
        document = json.loads(content)
        names = tuple(
            ".".join(str(part["key"]) for part in leaf["key_metadata"])
            for leaf in document["tree_metadata"].values()
            if leaf["value_metadata"]["value_type"] in _ARRAYS
        )
        return _Tree(
            names=names,
            in_database=bool(document.get("use_ocdbt", True)),
            driver="zarr3" if document.get("use_zarr3") else "zarr",
            is_complete=bool(document.get("store_array_data_equal_to_fill_value")),
        )
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise unreadable(_METADATA, error) from error


def _damaged(error: Exception) -> CheckpointRefused:
    # Behind this it repeats where it looked, which is nowhere that a person could.
    reason = str(error).partition(" [")[0]
    return CheckpointRefused("checkpoint_unreadable", f"{ORBAX}: {reason}")
