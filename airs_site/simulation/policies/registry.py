"""Policies by the names under which a simulation reports them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from airs_site.simulation.engine import Policy
from airs_site.simulation.errors import UnknownPolicy
from airs_site.simulation.policies.airs import SERVICE, Airs, Setup
from airs_site.simulation.policies.fifo import Fifo
from airs_site.simulation.policies.isolated import Isolated
from airs_site.simulation.policies.paper import TUNED_1, TUNED_2, Paper

OWN: Final[Mapping[str, Setup]] = {"airs": SERVICE}
"""The service's own policies: parts of them can be switched off."""

POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {
    "paper": Paper,
    "paper-tuned-1": lambda: Paper(TUNED_1),
    "paper-tuned-2": lambda: Paper(TUNED_2),
    "fifo": Fifo,
    "isolated": Isolated,
    "airs": Airs,
}


def make(name: str, changes: Mapping[str, Any] = MappingProxyType({})) -> Policy:
    """Return a new policy; raises UnknownPolicy naming those there are.

    `changes` are those to the setup of one of our own; the others have none.
    """
    if name not in POLICIES:
        raise UnknownPolicy(f"there is no policy {name!r}; there are {', '.join(POLICIES)}")
    if changes and name in OWN:
        return Airs(replace(OWN[name], **changes))
    return POLICIES[name]()
