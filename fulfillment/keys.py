"""What a request of a rater version is known by: its key fields, and how they become a fingerprint.

The rater's key level decides what enters. At level `result` those are all key fields of its
plug-in; at level `query` only those that belong to the query, and the others do not even reach the
plug-in; at level `prompt` it is the text that the plug-in's pure member `prompt` makes of the row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fulfillment.models import KeyLevel, RaterVersion
from fulfillment.policy.fingerprint import Fingerprinter
from fulfillment.raters import Spec, plugin_of

QUERY_FIELDS = ("query_text", "context")
_PROMPT = ("prompt",)

Item = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Keying:
    """How the rows of one rater version are keyed."""

    level: KeyLevel
    fields: tuple[str, ...]
    """The fields that go to the plug-in."""
    fingerprint: Callable[[Item], bytes]
    prompt: Callable[[Item], str] | None = None
    """What decides at level `prompt`."""


def keying(version: RaterVersion) -> Keying:
    """Return how rows are keyed for a rater version, by the plug-in that is installed now.

    Raises RaterUnavailable.
    """
    plugin = plugin_of(version.spec["autorater"])
    level = KeyLevel(version.spec["key_level"])
    fields = fields_at(level, plugin.key_fields)
    by_fields = Fingerprinter(version_digest=version.digest.bytes, key_fields=fields)
    if level != KeyLevel.PROMPT or plugin.prompt is None:
        return Keying(level=level, fields=fields, fingerprint=by_fields)
    render, spec = plugin.prompt, Spec(**version.spec)
    by_prompt = Fingerprinter(version_digest=version.digest.bytes, key_fields=_PROMPT)

    def prompt(item: Item) -> str:
        return render(item, spec)

    def fingerprint(item: Item) -> bytes:
        try:
            text = prompt(item)
        except Exception:
            # Somebody else's code: a row that it cannot render must not sink the file. The executor
            # meets the same, and fails that row alone.
            return by_fields(item)
        return by_prompt({"prompt": text})

    return Keying(level=level, fields=fields, fingerprint=fingerprint, prompt=prompt)


def fields_at(level: KeyLevel, key_fields: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of a plug-in's key fields that it receives at a key level."""
    if level != KeyLevel.QUERY:
        return key_fields
    return tuple(name for name in key_fields if name in QUERY_FIELDS)
