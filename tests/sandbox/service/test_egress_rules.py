"""What may be reached: the list, the addresses behind the names, and the heads of requests."""

import asyncio
import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.strategies import ip_addresses

from prorl_gym.errors import SandboxError
from prorl_gym.sandbox.service.egress_proxy import BadRequestError, parse_request
from prorl_gym.sandbox.service.egress_rules import (
    NON_PUBLIC_NETWORKS,
    Address,
    AllowList,
    EgressRefusedError,
    is_public,
)


@pytest.mark.parametrize(
    ("entry", "host", "port", "allowed"),
    [
        ("index.example", "index.example", 443, True),
        ("index.example", "index.example", 80, True),
        ("index.example", "index.example", 22, False),
        ("index.example", "INDEX.example.", 443, True),
        ("index.example", "evil.index.example", 443, False),
        ("index.example", "index.example.evil", 443, False),
        ("index.example:8080", "index.example", 8080, True),
        ("index.example:8080", "index.example", 443, False),
        ("[::1]:8080", "[0:0:0::1]", 8080, True),
    ],
)
def test_list(entry: str, host: str, port: int, allowed: bool) -> None:
    assert AllowList.parse([entry]).allows(host, port) is allowed


@pytest.mark.parametrize(
    "entry", ["", "https://index.example", "index.example/simple", "index.example:0", "[::1", "a b"]
)
def test_bad_entries_are_named(entry: str) -> None:
    with pytest.raises(SandboxError) as caught:
        AllowList.parse([entry])
    assert repr(entry) in caught.value.what and "host:port" in caught.value.fix


PUBLIC = """
    151.101.0.223 2a04:4e42::223 64:ff9b::808:808 ::ffff:151.101.0.223 2620:4f:8000::1 192.88.98.255
    192.31.196.1 192.52.193.1 192.175.48.1 198.20.0.1
"""
INSIDE = """
    127.0.0.1 10.1.2.3 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 ::1 fe80::1 fd00::1 ::ffff:169.254.169.254
    64:ff9b::7f00:1 64:ff9b:1::808:808 ::10.0.0.1 ::ffff:0:10.0.0.1 2002:7f00:1:: 2002:808:808::
    2001:0:808:808::f5ff:fffe fec0::1 feff:ffff::1 3fff::1 3fff:fff:ffff::1 4000::1 5f00::1 100::1 100:0:0:1::1
    2001:db8::1 2001:20::1 192.88.99.0 192.88.99.1 192.88.99.255 192.0.0.9 198.19.255.255 240.0.0.1
    255.255.255.255
"""


@pytest.mark.parametrize("address", PUBLIC.split())
def test_addresses_outside_the_site(address: str) -> None:
    assert is_public(ip_address(address))


@pytest.mark.parametrize("address", INSIDE.split())
def test_addresses_inside_the_site(address: str) -> None:
    assert not is_public(ip_address(address))


STRICTER = [
    *("192.0.0.0/24", "192.88.99.0/24", "240.0.0.0/4", "224.0.0.0/4", "2001::/23", "2002::/16", "3fff::/20"),
    *("::/3", "4000::/2", "8000::/1"),
]
"""Where this and the standard library differ, which follows an older registry and counts exceptions."""


@given(ip_addresses())
def test_the_standard_library_agrees_elsewhere(address: Address) -> None:
    assume(address not in ip_network("::ffff:0:0/96"))  # releases of the standard library differ on these
    in_dispute = any(address in ip_network(block) for block in STRICTER)
    assert is_public(address) == address.is_global or (in_dispute and not is_public(address))


@given(st.sampled_from(NON_PUBLIC_NETWORKS), st.data())
def test_nothing_of_a_listed_block_is_public(block: IPv4Network | IPv6Network, data: st.DataObject) -> None:
    address = data.draw(ip_addresses(network=block))
    assert not is_public(address)
    if isinstance(address, IPv4Address):
        assert not is_public(IPv6Address(f"::ffff:{address}"))
        assert not is_public(IPv6Address(f"64:ff9b::{address}"))
        assert not is_public(IPv6Address((0x2002 << 112) | (int(address) << 80)))


def resolving_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    async def answer(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", answer)


async def test_a_listed_name_cannot_lead_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving_to(monkeypatch, "169.254.169.254", "10.0.0.5")
    with pytest.raises(EgressRefusedError, match=r"169\.254\.169\.254, 10\.0\.0\.5 is inside the site"):
        await AllowList.parse(["index.example"]).resolve("index.example", 443)


async def test_only_the_checked_addresses_are_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving_to(monkeypatch, "10.0.0.5", "151.101.0.223")
    assert await AllowList.parse(["index.example"]).resolve("index.example", 443) == ["151.101.0.223"]


async def test_an_address_inside_is_reached_when_it_is_listed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving_to(monkeypatch, "10.0.0.5")
    assert await AllowList.parse(["index.example", "10.0.0.5"]).resolve("index.example", 443) == ["10.0.0.5"]


def test_plain_request_is_rewritten_for_the_server() -> None:
    head = b"GET http://a.example:81/x?y=1 HTTP/1.1\r\nHost: evil\r\nProxy-Authorization: s\r\nAccept: */*\r\n\r\n"
    asked = parse_request(head)
    assert (asked.host, asked.port, asked.method) == ("a.example", 81, "GET")
    assert asked.head == b"GET /x?y=1 HTTP/1.1\r\nHost: a.example:81\r\nAccept: */*\r\nConnection: close\r\n\r\n"


def test_tunnel_names_its_destination() -> None:
    asked = parse_request(b"CONNECT [2a04:4e42::223]:443 HTTP/1.1\r\n\r\n")
    assert (asked.host, asked.port, asked.method, asked.head) == ("[2a04:4e42::223]", 443, "CONNECT", b"")


@pytest.mark.parametrize(
    "head",
    [
        b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET https://a.example/ HTTP/1.1\r\n\r\n",
        b"GET http://user@a.example/ HTTP/1.1\r\n\r\n",
        b"GET http://a.example/ HTTP/2\r\n\r\n",
        b"GET http://a.example/ x HTTP/1.1\r\n\r\n",
        b"CONNECT a.example HTTP/1.1\r\n\r\n",
        b"CONNECT a.example:99999 HTTP/1.1\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nA: b\nHost: evil\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nContent-Length : 4\r\n\r\n",
    ],
)
def test_bad_requests(head: bytes) -> None:
    with pytest.raises(BadRequestError):
        parse_request(head)
