"""Fingerprints: 16 bytes that name what is rated, by which rater version.

Two rating requests share a rating exactly when their fingerprints are equal, so the encoding below
is unambiguous and frozen: changing a byte of it is the same as emptying every archive. It leaves
to intake what the bytes are (no normalisation here; lone surrogates are already replaced), and to
the rater which fields are key fields.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

DIGEST_SIZE: Final = 16

# One domain a kind of digest (BLAKE2's `person`): equal bytes of different kinds never collide.
_ITEM = b"airs item 1"
_VERSION = b"airs version 1"
_REQUEST_ID = b"airs request 1"
_URL = b"airs url 1"

_request_ids: Final = blake2b(digest_size=DIGEST_SIZE, person=_REQUEST_ID)
_urls: Final = blake2b(digest_size=DIGEST_SIZE, person=_URL)

_ABSENT: Final = object()
_ABSENT_LENGTH = -1

# Keys sorted, no blanks, numbers by repr. NaN and infinity are refused: intake lets none through.
_canonical = json.JSONEncoder(
    ensure_ascii=False,
    check_circular=False,
    allow_nan=False,
    sort_keys=True,
    separators=(",", ":"),
).encode


class Fingerprinter:
    """Fingerprints the items of one rater version; made once, called for each row.

    What is hashed: the version's digest, the names of the key fields, then one signed 64-bit
    number a key field, then the texts of those present, as UTF-8 without separators. The number
    is -1 for an absent field, else twice the text's length in characters, plus one if the text is
    the JSON of a value that was no string. Lengths come first and fix every boundary, so no two
    items share an encoding. Floats count by their shortest decimal form: 1 and 1.0 differ, 1.0 and
    1.00 do not, as no plug-in can tell them apart either.
    """

    __slots__ = ("_key_fields", "_pack_lengths", "_prefix")

    def __init__(self, *, version_digest: bytes, key_fields: Sequence[str]) -> None:
        if len(version_digest) != DIGEST_SIZE:
            raise ValueError(f"a version digest has {DIGEST_SIZE} bytes, not {len(version_digest)}")
        self._key_fields = tuple(key_fields)
        self._pack_lengths = struct.Struct(f"<{len(self._key_fields)}q").pack
        names = _canonical(self._key_fields).encode()
        self._prefix = blake2b(digest_size=DIGEST_SIZE, person=_ITEM)
        self._prefix.update(version_digest + struct.pack("<q", len(names)) + names)

    def __call__(self, item: Mapping[str, Any]) -> bytes:
        """Return the fingerprint of a row; fields that are no key fields do not count."""
        # Two updates, not one a field: this runs for every row of every upload.
        get = item.get
        lengths: list[int] = []
        texts: list[str] = []
        for field in self._key_fields:
            value = get(field, _ABSENT)
            if isinstance(value, str):
                lengths.append(2 * len(value))
                texts.append(value)
            elif value is _ABSENT:
                lengths.append(_ABSENT_LENGTH)
            else:
                text = _canonical(value)
                lengths.append(2 * len(text) + 1)
                texts.append(text)
        hasher = self._prefix.copy()
        hasher.update(self._pack_lengths(*lengths))
        hasher.update("".join(texts).encode())
        return hasher.digest()


def fingerprint(
    *, version_digest: bytes, item: Mapping[str, Any], key_fields: Sequence[str]
) -> bytes:
    """Return the fingerprint of one item; for many of one version, keep a `Fingerprinter`."""
    return Fingerprinter(version_digest=version_digest, key_fields=key_fields)(item)


def version_digest(
    *,
    rater_id: str,
    model_id: str,
    model_version: str,
    autorater: str,
    plugin_version: str,
    key_level: str,
    prompt_template: str,
    config: Mapping[str, Any],
    score_min: float,
    score_max: float,
    integer_scores: bool,
) -> bytes:
    """Return the digest of everything about a rater version that decides a score.

    Compute it once and store it: a database may hand numbers of `config` back in another form
    (jsonb turns 1e2 into 100), which would be another version.
    """
    decides = {
        "rater_id": rater_id,
        "model_id": model_id,
        "model_version": model_version,
        "autorater": autorater,
        "plugin_version": plugin_version,
        "key_level": key_level,
        "prompt_template": prompt_template,
        "config": config,
        "score_min": float(score_min),
        "score_max": float(score_max),
        "integer_scores": bool(integer_scores),
    }
    encoded = _canonical(decides).encode()
    return blake2b(encoded, digest_size=DIGEST_SIZE, person=_VERSION).digest()


def request_digest(request_id: str) -> bytes:
    """Return the digest by which a client's request id is unique in its workflow."""
    hasher = _request_ids.copy()  # quicker than a new one
    hasher.update(request_id.encode())
    return hasher.digest()


def url_digest(url: str) -> bytes:
    """Return the digest by which a purge finds the ratings of a url."""
    hasher = _urls.copy()
    hasher.update(url.encode())
    return hasher.digest()
