"""Which addresses users may name."""

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment.policy.addresses import (
    Allowed,
    Refusal,
    Target,
    allowed_from,
    is_public,
    may_connect,
    read_target,
    receiver_of,
)

NOTHING = Allowed()


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://localhost/",
        "http://LOCALHOST./",
        "http://a.localhost/",
        "http://printer.local/",
        "http://metadata.google.internal/",
        "http://[::1]/",
        "http://[::]/",
        "http://[::ffff:127.0.0.1]/",
        "http://[::ffff:8.8.8.8]/",
        "http://[::7f00:1]/",
        "http://[64:ff9b::7f00:1]/",
        "http://[64:ff9b:1::1]/",
        "http://[2002:7f00:1::]/",
        "http://[2001::1]/",
        "http://[fd00::1]/",
        "http://[fe80::1]/",
        "http://[fec0::1]/",
        "http://[ff02::1]/",
        "http://[fe80::1%25eth0]/",
        "http://0.0.0.0/",
        "http://10.0.0.5/",
        "http://100.64.0.1/",
        "http://169.254.169.254/latest",
        "http://172.16.9.9/",
        "http://192.168.1.1/",
        "http://192.0.0.8/",
        "http://192.88.99.1/",
        "http://198.18.0.1/",
        "http://224.0.0.1/",
        "http://240.0.0.1/",
        "http://255.255.255.255/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0x7f.0.0.1/",
        "http://0177.0.0.1/",
        "http://127.1/",
        "http://127.0.0.1./",
        "http://1.2.3.4.5/",
        "http://example.0x7f/",
        "http://user@shop.example/",
        "http://user:pw@shop.example/",
        "http://shop.example\\@127.0.0.1/",
        "http://shop.example#@127.0.0.1/",
        "http://shop.example/#part",
        "http://\uff11\uff12\uff17.0.0.1/",
        "http://shop\u3002example/",
        "http://m\xfcnchen.example/",
        "http://shop.example/a b",
        "http://shop.example/\n",
        "http://shop.example:0/",
        "http://shop.example:6379/",
        "http://shop.example:99999/",
        "http://shop.example:/",
        "http://shop.example:80:80/",
        "http://%31%32%37.0.0.1/",
        "http://-shop.example/",
        "http://shop..example/",
        "http://.example/",
        "http:///path",
        "http:shop.example",
        "//shop.example/x",
        "shop.example",
        "file:///etc/passwd",
        "gopher://a.example/",
        "ftp://a.example/",
        "javascript:alert(1)",
        "",
        "http://shop.example/" + "x" * 2_000,
    ],
)
def test_it_is_refused(url: str) -> None:
    assert isinstance(read_target(url, allowed=NOTHING), Refusal)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://Shop.Example", ("https", "shop.example", 443, "/", "")),
        ("http://shop.example./a?b=1&c", ("http", "shop.example", 80, "/a", "b=1&c")),
        ("HTTPS://shop.example:8443/a%20b", ("https", "shop.example", 8443, "/a%20b", "")),
        ("http://8.8.8.8/", ("http", "8.8.8.8", 80, "/", "")),
        ("http://203.0.113.9/", ("http", "203.0.113.9", 80, "/", "")),
        ("http://[2606:4700::0:1]/", ("http", "2606:4700::1", 80, "/", "")),
        ("https://xn--mnchen-3ya.example/", ("https", "xn--mnchen-3ya.example", 443, "/", "")),
        ("https://a_b.example/@x:y", ("https", "a_b.example", 443, "/@x:y", "")),
    ],
)
def test_it_is_taken_apart_once(url: str, target: tuple[str, str, int, str, str]) -> None:
    read = read_target(url, allowed=NOTHING)

    assert isinstance(read, Target)
    assert (read.scheme, read.host, read.port, read.path, read.query) == target


@pytest.mark.parametrize(
    ("entry", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:9000/"),
        ("::1", "http://[::1]:9000/"),
        ("[::1]", "http://[::1]:9000/"),
        ("10.1.0.0/16", "http://10.1.2.3/"),
        ("10.1.2.3/16", "http://10.1.9.9:81/"),
        ("localhost", "http://localhost:9000/"),
        (" Hooks.LAN. ", "http://hooks.lan:9000/"),
        ("metadata.google.internal", "http://metadata.google.internal/"),
    ],
)
def test_an_operator_may_allow_it_at_any_port(entry: str, url: str) -> None:
    allowed = allowed_from(["", entry, "other.lan"])

    assert isinstance(read_target(url, allowed=allowed), Target)
    assert isinstance(read_target("http://10.9.9.9/", allowed=allowed), Refusal)


def test_what_an_operator_allows_still_has_to_be_a_url() -> None:
    allowed = allowed_from(["10.0.0.0/8", "hooks.lan"])

    for url in ("ftp://hooks.lan/", "http://u:p@hooks.lan/", "http://0xa.0.0.1/"):
        assert isinstance(read_target(url, allowed=allowed), Refusal)


def test_an_address_is_judged_again_when_it_is_connected_to() -> None:
    target = read_target("http://shop.example/", allowed=NOTHING)
    named = read_target("http://hooks.lan/", allowed=allowed_from(["hooks.lan"]))
    assert isinstance(target, Target)
    assert isinstance(named, Target)

    assert may_connect(target, "8.8.8.8", allowed=NOTHING)
    assert not may_connect(target, "127.0.0.1", allowed=NOTHING)
    assert not may_connect(target, "fe80::1%eth0", allowed=NOTHING)
    assert may_connect(target, "10.0.0.1", allowed=allowed_from(["10.0.0.0/8"]))
    assert not may_connect(target, "10.0.0.1", allowed=allowed_from(["hooks.lan"]))
    assert may_connect(named, "10.0.0.1", allowed=allowed_from(["hooks.lan"]))


@given(address=st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)))
def test_an_address_that_the_registries_call_private_is_never_public(
    address: IPv4Address | IPv6Address,
) -> None:
    documentation = ("192.0.2.", "198.51.100.", "203.0.113.", "2001:db8:")
    if is_public(address) and not str(address).startswith(documentation):
        assert address.is_global
        assert not address.is_multicast
        assert not address.is_private


@given(number=st.integers(0, 2**32 - 1))
def test_ipv4_inside_ipv6_is_never_public(number: int) -> None:
    inner = int(ip_address(number))
    for prefix in ("::", "::ffff:0:0", "64:ff9b::", "2002::"):
        shift = 80 if prefix == "2002::" else 0
        assert not is_public(IPv6Address(int(IPv6Address(prefix)) | inner << shift))


@given(url=st.text(max_size=60).map(lambda text: f"http://{text}"))
def test_whatever_is_sent_is_judged(url: str) -> None:
    target = read_target(url, allowed=NOTHING)

    if isinstance(target, Target):
        assert target.host.isascii()
        assert target.port in {80, 443, 8080, 8443}


def test_a_receiver_is_a_host_and_a_port() -> None:
    assert receiver_of("https://Shop.example/a?b") == "shop.example:443"
    assert receiver_of("http://shop.example:8080") == "shop.example:8080"
    assert receiver_of("http://[::1]/") == "[::1]:80"
    assert receiver_of("rubbish") == ""
