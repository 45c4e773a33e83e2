"""Flax's msgpack files (`flax.serialization.to_bytes`): what they hold, without JAX.

Such a file is a map of names, nested or flat, whose leaves are arrays: an extension value of a
shape, a type's name and the bytes. Nothing in the format can run code.
"""

from collections.abc import Iterator
from math import prod
from typing import Any, Final

import msgpack

_ARRAY: Final = 1
_CHUNKED: Final = "__msgpack_chunked_array__"
TYPES: Final = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
}
"""numpy's names of floats: safetensors' and the bytes of each number."""
MOST_DIMENSIONS: Final = 64
"""As numpy has it."""
_DESCRIPTION_BYTES: Final = 1024
"""More than the longest shape and name take."""
_LENGTH_BYTES: Final = (2, 3, 5)
"""What msgpack writes before bytes, depending on how many there are."""


def leaves(content: bytes) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield the name (parts joined by dots), type and shape of each array.

    Types are safetensors' names of floats, else numpy's. Raises ValueError or TypeError for
    anything else than a whole file.
    """
    try:
        # Lists are no part of a tree; a file of small ones would take seventy times its size.
        document = msgpack.unpackb(
            content, ext_hook=_describe, strict_map_key=False, max_array_len=0
        )
    except msgpack.UnpackException as error:
        raise ValueError(f"no whole msgpack: {error}") from error
    yield from flat(document)


def flat(document: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield what `leaves` does of a tree whose arrays are described."""
    if not isinstance(document, dict):
        raise ValueError(f"{prefix or 'the file'} is neither an array nor a map of arrays")
    if _CHUNKED in document:
        raise ValueError(f"{prefix} is larger than 1 GiB: store it as safetensors")
    for part, value in document.items():
        name = f"{prefix}.{part}" if prefix else str(part)
        if isinstance(value, _Array):
            yield name, value.dtype, value.shape
        else:
            yield from flat(value, name)


class _Array:
    """An array's description."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.shape = shape


def _describe(code: int, data: bytes) -> _Array:
    if code != _ARRAY:
        raise ValueError("only arrays are read")
    unpacker = msgpack.Unpacker()
    unpacker.feed(data[:_DESCRIPTION_BYTES])
    if unpacker.read_array_header() != 3:
        raise ValueError("an array is a shape, a type and its bytes")
    shape, name = tuple(unpacker.unpack()), str(unpacker.unpack())
    if len(shape) > MOST_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("an array has no shape")
    dtype, item_bytes = TYPES.get(name, (name, 0))
    before = len(data) - unpacker.tell() - prod(shape) * item_bytes
    if item_bytes and before not in _LENGTH_BYTES:
        raise ValueError("an array has more or fewer bytes than its shape needs")
    return _Array(dtype, shape)
