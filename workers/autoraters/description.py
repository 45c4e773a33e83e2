"""What Rating Fulfillment may know of a plug-in without importing `workers`.

`AIRS_RATER_PLUGINS` names `describe` in the settings; fulfillment takes key fields from it at
intake and checks `POST /raters` with it. It costs an import the first time, a look-up after that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.autoraters.protocol import FieldProblem, Item, KeyLevel, RaterSpec, RendersPrompt
from workers.autoraters.registry import load


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginDescription:
    """The unchanging part of a plug-in, and its check of a rater's settings.

    `check` takes any object with the attributes of `RaterSpec`.
    """

    name: str
    version: str
    key_fields: tuple[str, ...]
    key_level: KeyLevel
    protocol: str
    check: Callable[[RaterSpec], Sequence[FieldProblem]]
    prompt: Callable[[Item, RaterSpec], str] | None


def describe(name: str) -> PluginDescription:
    """Return the plug-in's description; raise UnknownAutorater or BrokenAutorater."""
    plugin = load(name)
    return PluginDescription(
        name=plugin.name,
        version=plugin.version,
        key_fields=plugin.key_fields,
        key_level=plugin.key_level,
        protocol=plugin.protocol,
        check=plugin.check,
        prompt=plugin.prompt if isinstance(plugin, RendersPrompt) else None,
    )
