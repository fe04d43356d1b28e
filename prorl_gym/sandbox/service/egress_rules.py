"""Destinations that a sandbox may reach: an allow-list of hosts, and of the addresses that their names lead to.

A name is resolved by the service, and the connection goes to the very address that was checked: a name that changes
its mind between check and use (DNS rebinding) gains nothing. Addresses inside the site (private, loopback, link-local
such as a cloud's metadata service) are refused unless the list holds the address itself, so that a listed name cannot
be pointed at them from outside. An index inside the site is thus listed twice: its name, and its address.
"""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from prorl_gym.errors import FailureKind, SandboxError

Address = IPv4Address | IPv6Address
_DEFAULT_PORTS = (80, 443)
_MAPPED = ip_network("::ffff:0:0/96")
_NAT64 = ip_network("64:ff9b::/96")
_GLOBAL_UNICAST = ip_network("2000::/3")
NON_PUBLIC_NETWORKS = tuple(
    map(
        ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
            *("203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
            *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
        ),
    )
)
"""Blocks of the IANA IPv4 and IPv6 Special-Purpose Address Registries (of 2025-10) that are not globally reachable or
without that mark in the registry, and multicast. Exceptions inside them (anycast of protocols such as PCP and AMT)
are left out: they lead to the nearest network, and no web server is there. Of IPv6, everything outside global unicast
is not public either: site-local ``fec0::/10``, unique local, link-local, discard, segment routing, NAT64 of the site.

https://www.iana.org/assignments/iana-ipv4-special-registry, https://www.iana.org/assignments/iana-ipv6-special-registry
"""


class EgressRefusedError(Exception):
    """This destination may not be reached. The text is the reason, for the log and for the requesting program."""


@dataclass(frozen=True, slots=True)
class EgressRule:
    host: str
    """A name in lower case, or an address in its canonical form."""
    port: int | None
    """``None``: 80 and 443."""

    def allows(self, host: str, port: int) -> bool:
        return host == self.host and (port in _DEFAULT_PORTS if self.port is None else port == self.port)


@dataclass(frozen=True, slots=True)
class AllowList:
    """The destinations that one sandbox may reach."""

    rules: tuple[EgressRule, ...]

    @classmethod
    def parse(cls, entries: Sequence[str]) -> "AllowList":
        """Read ``host``, ``host:port`` and ``[v6 address]:port``; ``SANDBOX_UNAVAILABLE`` names a wrong entry."""
        rules: list[EgressRule] = []
        for entry in entries:
            try:
                host, port = split_authority(entry)
            except ValueError as error:
                raise SandboxError(
                    FailureKind.SANDBOX_UNAVAILABLE,
                    f"egress: {entry!r} is not a destination ({error}).",
                    "Write 'host' (ports 80 and 443), 'host:port' or '[IPv6 address]:port', without scheme or path.",
                ) from None
            rules.append(EgressRule(_normalize_host(host), port))
        return cls(tuple(rules))

    def allows(self, host: str, port: int) -> bool:
        """Whether a destination is on the list, by the requested name or address."""
        return any(rule.allows(_normalize_host(host), port) for rule in self.rules)

    async def resolve(self, host: str, port: int) -> list[str]:
        """Return the addresses that may be connected to for a destination, or raise ``EgressRefusedError``."""
        if not self.allows(host, port):
            raise EgressRefusedError("it is not on the sandbox's allow-list")
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(_normalize_host(host), port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise EgressRefusedError(f"its name cannot be resolved ({error})") from None
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        allowed: list[str] = []
        for text in addresses:
            address = ip_address(text.partition("%")[0])
            if is_public(address) or any(rule.allows(str(address), port) for rule in self.rules):
                allowed.append(text)
        if not allowed:
            raise EgressRefusedError(
                f"its address {', '.join(addresses[:4])} is inside the site; it must be listed itself"
            )
        return allowed


def is_public(address: Address) -> bool:
    """Return whether an address, or the IPv4 address that it represents, belongs to the public internet."""
    if isinstance(address, IPv6Address):
        if address in _MAPPED or address in _NAT64:
            return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
        if address not in _GLOBAL_UNICAST:
            return False
    return not any(address in block for block in NON_PUBLIC_NETWORKS)


def _normalize_host(host: str) -> str:
    """Return a host name or address in the one form that is compared."""
    host = host.removeprefix("[").removesuffix("]").lower().removesuffix(".")
    try:
        return str(ip_address(host))
    except ValueError:
        return host


def split_authority(text: str) -> tuple[str, int | None]:
    """Split ``host``, ``host:port`` and ``[address]:port``; ``ValueError`` for anything else."""
    host, bracket, rest = text.partition("]") if text.startswith("[") else ("", "", "")
    if bracket:
        host, colon, port = host + bracket, rest[:1], rest[1:]
        if rest and colon != ":":
            raise ValueError("something follows the bracket")
    else:
        host, colon, port = text.partition(":")
    if not host.isascii() or not host or any(character in "/@?#\\ \t\r\n%" for character in host):
        raise ValueError("no host name")
    if not colon:
        return host, None
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError("no port number")
    return host, int(port)
