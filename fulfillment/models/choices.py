"""Choices of a field that stores an enum."""

from enum import Enum
from typing import Any


def choices_of(enum: type[Enum]) -> list[tuple[Any, str]]:
    """Return Django's choices of an enum: the stored value and the name."""
    return [(member.value, member.name) for member in enum]
