"""Where a model is called, and what of that may be said in an error.

Addresses, headers and keys come from the operator. A key may stand in a header, in the address'
user part or in its query; none of them leaves this module in a message or a `repr`.
"""

import base64
import hashlib
import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, quote_plus

from multidict import CIMultiDict
from yarl import URL

PATHS: Mapping[str, str] = {
    "score": "/v1/score",
    "rerank": "/rerank",
    "tei_rerank": "/rerank",
    "embeddings": "/v1/embeddings",
}
"""Where OpenAI-compatible servers score pairs. Of rerank servers all makers agree on the last part
only: what is before it belongs to the server's address."""

DETAIL_LIMIT = 1_000
SHORTEST_SECRET = 6
"""Shorter header values are words like `1` or `true`: blotting them out would garble every text."""

OWN_HEADERS = {
    "Content-Type": "application/json",
    "Accept": "application/json",
    "Accept-Encoding": "identity",  # scores are small; unpacking costs CPU and invites bombs
    "User-Agent": "airs",
}
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
FORBIDDEN_IN_HEADER = re.compile(r"[\x00\r\n]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """One model behind one address; `url` is the server's base, without `/v2/...`.

    Of an OpenAI-compatible server the base may end in `/v1`, as their makers like to write it.
    """

    url: str
    model_name: str
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 30.0
    sends_priority: bool = False
    """Whether the server is told how urgent a call is."""
    priority_style: str = ""
    """In whose direction: `triton`, `vllm`, `sglang`; "" for what is usual for the protocol."""
    scoring: str = ""
    """By which endpoint of an OpenAI-compatible server pairs are scored (one of PATHS); "" for
    servers of the Open Inference Protocol and of chat models."""

    def style(self, usual: str) -> str:
        """Return in whose direction the server is told urgency, "" where it is not told."""
        return (self.priority_style or usual) if self.sends_priority else ""

    def __repr__(self) -> str:
        return f"Endpoint(host={host_of(self.url)!r}, model_name={self.model_name!r})"


class InvalidEndpoint(ValueError):
    """The operator registered an address or a header that cannot be used."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Target:
    """An endpoint made ready to be called."""

    host: str
    infer: URL
    chat: URL
    pairs: Mapping[str, URL]
    """Where pairs are scored, by the endpoint's name."""
    model: URL
    ready: URL
    headers: CIMultiDict[str]
    secrets: re.Pattern[str] | None
    """All that must not be repeated, in each form in which a server may."""

    def describe(self, prefix: str, text: str = "") -> str:
        """Return a line for people: what happened, at which host, in whose words, no secrets."""
        line = f"{prefix} from {self.host}"
        words = " ".join(_printable(self.redact(text)).split())
        return (f"{line}: {words}" if words else line)[:DETAIL_LIMIT]

    def redact(self, text: str) -> str:
        return text if self.secrets is None else self.secrets.sub("***", text)


def target_of(endpoint: Endpoint) -> Target:
    """Return what is needed to call the endpoint; raise InvalidEndpoint."""
    base = _base(endpoint.url)
    headers = CIMultiDict(OWN_HEADERS)
    login = ""
    if base.user is not None:
        login = base64.b64encode(f"{base.user}:{base.password or ''}".encode()).decode()
        headers["Authorization"] = f"Basic {login}"
    for name, value in endpoint.headers.items():
        if not HEADER_NAME.fullmatch(name):
            raise InvalidEndpoint("a header has a name that HTTP does not allow")
        if FORBIDDEN_IN_HEADER.search(value):
            raise InvalidEndpoint(f"header {name} holds a line break or NUL")
        headers[name] = value
    plain = base.with_user(None)
    root = plain.raw_path.rstrip("/")
    model = f"{root}/v2/models/{quote(endpoint.model_name, safe='')}"
    openai = root.removesuffix("/v1")
    return Target(
        host=host_of(endpoint.url),
        infer=_at(plain, f"{model}/infer"),
        chat=_at(plain, f"{openai}/v1/chat/completions"),
        pairs={
            name: _at(plain, (openai if path.startswith("/v1") else root) + path)
            for name, path in PATHS.items()
        },
        model=_at(plain, model),
        ready=_at(plain, f"{root}/v2/health/ready"),
        headers=headers,
        secrets=_pattern(_secrets(base, login, endpoint.headers)),
    )


def host_of(url: str) -> str:
    """Return `host:port` of an address, however broken the rest of it is."""
    try:
        parsed = URL(url)
        return f"{parsed.host}:{parsed.port}" if parsed.host else "?"
    except ValueError:
        return "?"


def _base(url: str) -> URL:
    try:
        base = URL(url)
    except ValueError as failure:
        raise InvalidEndpoint("the address cannot be parsed") from failure
    if base.scheme not in {"http", "https"} or not base.host:
        raise InvalidEndpoint("the address needs http:// or https:// and a host")
    return base


def _at(base: URL, path: str) -> URL:
    return base.with_path(path, encoded=True, keep_query=True)


def _secrets(base: URL, login: str, headers: Mapping[str, str]) -> set[str]:
    """Return all that must not be repeated, also without its `Bearer`."""
    candidates = {login, base.user or "", base.password or "", base.raw_query_string}
    candidates.update(base.query.values())
    for value in headers.values():
        candidates.update((value, value.partition(" ")[2]))
    return {secret for secret in candidates if len(secret) >= SHORTEST_SECRET}


def _pattern(secrets: set[str]) -> re.Pattern[str] | None:
    """Return what finds the secrets in a text, the longest first; None where there are none."""
    forms = {form for secret in secrets for form in _forms(secret)}
    longest_first = sorted(forms, key=lambda form: (-len(form), form))
    # Digests and percent-encoding are written in either case.
    return re.compile("|".join(map(re.escape, longest_first)), re.IGNORECASE) if forms else None


def _forms(secret: str) -> Iterator[str]:
    """Return a secret as servers repeat it: as it came, encoded, or as the digest they store."""
    data = secret.encode()
    yield secret
    yield html.escape(secret)
    yield quote(secret, safe="")
    yield quote_plus(secret)
    for encoded in (base64.b64encode(data), base64.urlsafe_b64encode(data)):
        yield encoded.decode().rstrip("=")
    for digest in (
        hashlib.md5(data, usedforsecurity=False),
        hashlib.sha1(data),
        hashlib.sha256(data),
    ):
        yield digest.hexdigest()


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
