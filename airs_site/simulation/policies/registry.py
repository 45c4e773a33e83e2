"""Policies by the names under which a simulation reports them."""

from collections.abc import Callable, Mapping
from typing import Final

from airs_site.simulation.engine import Policy
from airs_site.simulation.errors import UnknownPolicy
from airs_site.simulation.policies.airs import REFERENCE, Airs
from airs_site.simulation.policies.fifo import Fifo
from airs_site.simulation.policies.isolated import Isolated
from airs_site.simulation.policies.paper import TUNED_1, TUNED_2, Paper

POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {
    "paper": Paper,
    "paper-tuned-1": lambda: Paper(TUNED_1),
    "paper-tuned-2": lambda: Paper(TUNED_2),
    "fifo": Fifo,
    "isolated": Isolated,
    "d1": lambda: Airs(REFERENCE),
    "airs": Airs,
}


def make(name: str) -> Policy:
    """Return a new policy; raises UnknownPolicy naming those there are."""
    if name not in POLICIES:
        raise UnknownPolicy(f"there is no policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name]()
