"""Autorater plug-ins: their protocol, the registry by entry point, and those that ship."""

from workers.autoraters.protocol import (
    Autorater,
    ChatAnswer,
    ChatCall,
    FieldProblem,
    Item,
    KeyLevel,
    OipAnswer,
    OipCall,
    Rated,
    RaterSpec,
    Unusable,
)
from workers.autoraters.registry import (
    ENTRY_POINT_GROUP,
    AutoraterError,
    BrokenAutorater,
    UnknownAutorater,
    available,
    load,
)

__all__ = [
    "ENTRY_POINT_GROUP",
    "Autorater",
    "AutoraterError",
    "BrokenAutorater",
    "ChatAnswer",
    "ChatCall",
    "FieldProblem",
    "Item",
    "KeyLevel",
    "OipAnswer",
    "OipCall",
    "Rated",
    "RaterSpec",
    "UnknownAutorater",
    "Unusable",
    "available",
    "load",
]
