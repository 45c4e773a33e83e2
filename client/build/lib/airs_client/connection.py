"""Where the server is and what token to show it.

The first of these that says something wins, for address and token each: arguments, the environment
(AIRS_URL, AIRS_API_TOKEN), the profile (AIRS_PROFILE or --profile) in ~/.config/airs/config.toml,
and last the credentials.json that `make up` leaves in $AIRS_HOME or ./.airs, which makes the first
try on a laptop work without settings.

    default_profile = "staging"
    [profiles.staging]
    url = "https://airs.example.org"
    token = "…"

A stored token goes only to the address that it is stored with, and a token from the environment
never to an address from a file in the working directory.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from airs_client.errors import AirsError

DEFAULT_URL = "http://127.0.0.1:8000"


class InvalidSettings(AirsError):
    """A profile is missing, or a settings file or address cannot be understood."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """The address of a server, without a slash at the end, and the token for it, if any."""

    url: str
    token: str | None = None

    def __repr__(self) -> str:
        return f"Connection(url={self.url!r}, token={'…' if self.token else None})"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    url: str | None = None
    token: str | None = None


def resolve(
    *,
    url: str | None = None,
    token: str | None = None,
    profile: str | None = None,
    environ: Mapping[str, str],
    home: Path,
    directory: Path,
) -> Connection:
    """Settle address and token; `directory` is the working directory."""
    named = profile or environ.get("AIRS_PROFILE") or None
    url = url or (None if profile else environ.get("AIRS_URL")) or None
    token = token or (None if profile else environ.get("AIRS_API_TOKEN")) or None
    stored = _profile(named, environ=environ, home=home)
    url = url or stored.url
    token = token or _token_for(url, stored)
    if named is None:
        left_by_up = _credentials(environ=environ, directory=directory)
        if url is None and token in (None, left_by_up.token):
            url = left_by_up.url
        token = token or _token_for(url, left_by_up)
    return Connection(url=_address(url or DEFAULT_URL), token=_sendable(token))


def _token_for(url: str | None, stored: _Stored) -> str | None:
    if url is None or stored.url is None or _origin(url) == _origin(stored.url):
        return stored.token
    return None


def _profile(named: str | None, *, environ: Mapping[str, str], home: Path) -> _Stored:
    folder = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    path = folder / "airs" / "config.toml"
    try:
        config = tomllib.loads(path.read_text())
    except FileNotFoundError:
        config = {}
    except (OSError, ValueError) as error:
        raise InvalidSettings(f"cannot read {path}: {error}") from error
    profiles = config.get("profiles", {})
    name = named or config.get("default_profile", "default")
    found = profiles.get(name) if isinstance(profiles, dict) else None
    if isinstance(found, dict):
        return _stored(found, token_name="token")
    if named:
        raise InvalidSettings(f"there is no profile {named!r} in {path}")
    return _Stored()


def _credentials(*, environ: Mapping[str, str], directory: Path) -> _Stored:
    folders = [Path(environ["AIRS_HOME"])] if environ.get("AIRS_HOME") else []
    for folder in [*folders, directory / ".airs"]:
        try:
            found = json.loads((folder / "credentials.json").read_text())
        except (OSError, ValueError):
            # A last resort: another user's file, or one half written, is as good as none.
            continue
        if isinstance(found, dict):
            return _stored(found, token_name="api_token")
    return _Stored()


def _stored(values: Mapping[str, Any], *, token_name: str) -> _Stored:
    url, token = values.get("url"), values.get(token_name)
    return _Stored(url=str(url) if url else None, token=str(token) if token else None)


def _address(url: str) -> str:
    scheme, host, port = _origin(url)
    if scheme not in ("http", "https") or not host or port is None:
        raise InvalidSettings(f"{url!r} is not an address like {DEFAULT_URL}")
    return url.rstrip("/")


def _sendable(token: str | None) -> str | None:
    token = token.strip() if token else None
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise InvalidSettings("the API token has characters that no token has")
    return token or None


def _origin(url: str) -> tuple[str, str | None, int | None]:
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return "", None, None
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    return parts.scheme, host, port
