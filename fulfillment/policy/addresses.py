"""Which addresses that users name may be sent to: http and https, public hosts, usual ports.

The text of a URL is judged here, and so is each numeric address that its name leads to: once when
it is registered, and again when a connection is made, on the very address that is used (outgoing).
What the operator names in AIRS_ALLOWED_PRIVATE_HOSTS is allowed, at any port.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Final

MAX_URL_CHARACTERS: Final = 2_000
DEFAULT_PORTS: Final = {"http": 80, "https": 443}
WEB_PORTS: Final = frozenset({80, 443, 8080, 8443})

# Splits what a URL may consist of; everything else (blanks, a backslash, full-width digits) is what
# two parsers read in two ways.
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<user>[^/?#@]*@)?(?P<host>\[[0-9a-f:.]+\]|[a-z0-9._-]+)"
    r"(?::(?P<port>[0-9]{1,5}))?(?P<path>/[^?#]*)?(?:\?(?P<query>[^#]*))?",
    re.IGNORECASE | re.ASCII,
)
_CHARACTERS = re.compile(r"[!-~]+")
_UNSAFE = re.compile(r'[\\"<>^`{|}]')
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMERIC = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PRIVATE_NAMES = ("localhost", "internal", "local", "home.arpa")
"""Names that are no host's of the Internet, and all below them."""

# Examples stand for public addresses with these; they lead nowhere.
_DOCUMENTATION = tuple(
    map(ip_network, ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32"))
)
# Public by their number, but with a meaning of their own: protocol assignments, relays to IPv4.
_SPECIAL = tuple(map(ip_network, ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16")))
_GLOBAL_UNICAST = IPv6Network("2000::/3")
"""Outside of it lie mapped and embedded IPv4, NAT64, unique local, link-local and multicast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowed:
    """What an operator allows besides public hosts: names, and networks."""

    names: frozenset[str] = frozenset()
    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    def has(self, address: IPv4Address | IPv6Address) -> bool:
        """Say whether an address lies in one of the networks."""
        return any(address in network for network in self.networks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A URL that may be sent to, in parts, so that nobody parses it a second time."""

    scheme: str
    host: str
    """In lower case, without brackets or a final dot."""
    port: int
    path: str
    query: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why an address may not be sent to, for the person who wrote it."""

    reason: str


NOT_PUBLIC: Final = Refusal(
    reason="its host is not public; an operator may allow it in AIRS_ALLOWED_PRIVATE_HOSTS"
)


def allowed_from(entries: Iterable[str]) -> Allowed:
    """Read names, addresses and networks (`10.1.0.0/16`) as an operator writes them."""
    names, networks = set(), []
    for entry in filter(None, (entry.strip().lower() for entry in entries)):
        try:
            networks.append(ip_network(entry.strip("[]"), strict=False))
        except ValueError:
            names.add(entry.rstrip("."))
    return Allowed(names=frozenset(names), networks=tuple(networks))


def read_target(
    url: str, *, allowed: Allowed, ports: Collection[int] = WEB_PORTS
) -> Target | Refusal:
    """Return the parts of a URL, or why it may not be sent to whatever its name leads to."""
    if len(url) > MAX_URL_CHARACTERS:
        return Refusal(reason=f"at most {MAX_URL_CHARACTERS} characters")
    if not _CHARACTERS.fullmatch(url) or _UNSAFE.search(url):
        return Refusal(
            reason="only ASCII characters of a URL: write other ones percent-encoded, and a host "
            "name as punycode"
        )
    parts = _URL.fullmatch(url)
    if parts is None:
        return Refusal(reason="must read http(s)://host[:port]/path?query")
    if parts["user"]:
        return Refusal(reason="must not hold a user or password")
    scheme, host = parts["scheme"].lower(), parts["host"].lower()
    address = _literal(host)
    if isinstance(address, Refusal):
        return address
    port = int(parts["port"] or DEFAULT_PORTS[scheme])
    name = str(address) if address else host.removesuffix(".")
    is_allowed = name in allowed.names or (address is not None and allowed.has(address))
    if not is_allowed:
        if port not in ports:
            return Refusal(reason=f"port {port} is none of {', '.join(map(str, sorted(ports)))}")
        if address is None and _is_private_name(name):
            return NOT_PUBLIC
        if address is not None and not is_public(address):
            return NOT_PUBLIC
    if not 0 < port <= 65_535:
        return Refusal(reason=f"there is no port {port}")
    return Target(
        scheme=scheme, host=name, port=port, path=parts["path"] or "/", query=parts["query"] or ""
    )


def receiver_of(url: str) -> str:
    """Return host and port of a URL: what is sent to one receiver is limited together."""
    parts = _URL.fullmatch(url)
    if parts is None:
        return ""
    return f"{parts['host']}:{parts['port'] or DEFAULT_PORTS[parts['scheme'].lower()]}".lower()


def may_connect(target: Target, address: str, *, allowed: Allowed) -> bool:
    """Say whether the numeric address that a target's host leads to may be connected to."""
    if target.host in allowed.names:
        return True
    try:
        numeric = ip_address(address)
    except ValueError:  # with a zone: link-local
        return False
    return allowed.has(numeric) or is_public(numeric)


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Say whether an address is a host's of the Internet."""
    if any(address in network for network in _DOCUMENTATION):
        return True
    if any(address in network for network in _SPECIAL) or address.is_multicast:
        return False
    if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST:
        return False
    return address.is_global


def _literal(host: str) -> IPv4Address | IPv6Address | Refusal | None:
    """Return the address that a host part spells out, None for a name."""
    if host.startswith("["):
        try:
            return IPv6Address(host[1:-1])
        except ValueError:
            return Refusal(reason=f"{host} is no IPv6 address")
    labels = host.removesuffix(".").split(".")
    if _NUMERIC.fullmatch(labels[-1]):
        # 127.1, 2130706433, 0x7f.0.0.1, 0177.0.0.1: read differently by different programs.
        try:
            return IPv4Address(".".join(labels))
        except ValueError:
            return Refusal(reason=f"{host} is no IPv4 address of four decimal numbers")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        return Refusal(reason=f"{host[:64]} is no host name")
    return None


def _is_private_name(name: str) -> bool:
    return any(name == private or name.endswith(f".{private}") for private in _PRIVATE_NAMES)
