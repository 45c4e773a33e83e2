"""Batches: which rows form an item, which items a batch, and a batch's masks.

A batch is a container of at most 60 items, so that a mask of them fits a signed 64-bit column.
What becomes of the items is decided elsewhere (lifecycle, traffic).
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Final, TypeVar

T = TypeVar("T")

MAX_BATCH_SIZE: Final = 60


def merge_equal(fingerprints: Sequence[Hashable]) -> list[list[int]]:
    """Return the items of a chunk: for each distinct fingerprint the positions that have it.

    Items come in the order of their first position, positions in rising order.
    """
    items: dict[Hashable, list[int]] = {}
    for position, fingerprint in enumerate(fingerprints):
        items.setdefault(fingerprint, []).append(position)
    return list(items.values())


def cut(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Cut items into batches of `size` in their order; the last may be short."""
    if not 1 <= size <= MAX_BATCH_SIZE:
        raise ValueError(f"batch size {size} is outside 1-{MAX_BATCH_SIZE}")
    return [items[start : start + size] for start in range(0, len(items), size)]


def halves(indices: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Bisect at least two items to find the bad one; the first half is the longer, if any is."""
    if len(indices) < 2:
        raise ValueError("an item that stands alone cannot be bisected")
    middle = (len(indices) + 1) // 2
    return indices[:middle], indices[middle:]


def mask_of(indices: Iterable[int]) -> int:
    """Return the mask with the bits of these items set."""
    mask = 0
    for index in indices:
        if not 0 <= index < MAX_BATCH_SIZE:
            raise ValueError(f"item {index} is outside 0-{MAX_BATCH_SIZE - 1}")
        mask |= 1 << index
    return mask


def indices_of(mask: int) -> list[int]:
    """Return the items whose bits are set, in rising order."""
    if not 0 <= mask < 1 << MAX_BATCH_SIZE:
        raise ValueError(f"{mask} is no mask of at most {MAX_BATCH_SIZE} items")
    return [index for index in range(mask.bit_length()) if mask >> index & 1]
