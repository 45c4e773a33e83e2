"""Finds autorater plug-ins by entry point, so that a package of yours can add one.

Plug-ins are installed code that the operator trusts. They are read once a process: a new one
needs a restart.
"""

import logging
from collections.abc import Mapping
from functools import cache
from importlib import metadata

from workers.autoraters.protocol import Autorater

ENTRY_POINT_GROUP = "airs.autoraters"

log = logging.getLogger(__name__)


class AutoraterError(Exception):
    """Base of the plug-in errors."""


class UnknownAutorater(AutoraterError):
    """No installed package offers a plug-in of this name."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        self.name, self.known = name, known
        hint = f"known are {', '.join(known)}" if known else "none is installed at all"
        super().__init__(
            f"no autorater {name!r}: {hint}. Plug-ins are found by the entry-point group "
            f"{ENTRY_POINT_GROUP!r} of installed packages; for those of AIRS itself run "
            "`pip install -e .` in the checkout (again after pyproject.toml changed)"
        )


class BrokenAutorater(AutoraterError):
    """A plug-in is installed, but cannot be used."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason
        super().__init__(f"autorater {name!r} cannot be used: {reason}")


@cache
def load(name: str) -> Autorater:
    """Return the plug-in; raise UnknownAutorater or BrokenAutorater."""
    found = metadata.entry_points(group=ENTRY_POINT_GROUP)
    targets = {entry.value: entry for entry in found.select(name=name)}
    if not targets:
        raise UnknownAutorater(name, tuple(sorted(found.names)))
    if len(targets) > 1:
        raise BrokenAutorater(name, f"several packages offer it: {', '.join(sorted(targets))}")
    return _instance(name, next(iter(targets.values())))


def available() -> Mapping[str, Autorater]:
    """Return every plug-in that works, by name; a broken one costs the others nothing."""
    working = {}
    for name in sorted(metadata.entry_points(group=ENTRY_POINT_GROUP).names):
        try:
            working[name] = load(name)
        except BrokenAutorater as broken:
            log.warning("autorater is broken", extra={"autorater": name, "reason": broken.reason})
    return working


def _instance(name: str, entry: metadata.EntryPoint) -> Autorater:
    try:
        plugin: Autorater = entry.load()()
        named = plugin.name
    except Exception as failure:  # somebody else's module: anything can happen while it loads
        raise BrokenAutorater(name, f"{type(failure).__name__}: {failure}") from failure
    if named != name:
        raise BrokenAutorater(name, f"{entry.value} calls itself {named!r}")
    return plugin
