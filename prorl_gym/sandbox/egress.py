"""What a sandbox may reach: an allow-list of hosts, and of the addresses that their names lead to.

A name is resolved by the service, and the connection goes to the very address that was checked: a name that changes
its mind between check and use (DNS rebinding) gains nothing. Addresses inside the site (private, loopback, link-local
such as a cloud's metadata service) are refused unless the list holds the address itself, so that a listed name cannot
be pointed at them from outside. An index inside the site is thus listed twice: its name, and its address.
"""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from prorl_gym.errors import FailureKind, SandboxError

Address = IPv4Address | IPv6Address

_DEFAULT_PORTS = (80, 443)
_NAT64 = 0x0064FF9B << 96


class EgressRefusedError(Exception):
    """This destination may not be reached. The text says why, for the log and for the program that asked."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of the list."""

    host: str
    """A name in lower case, or an address in its canonical form."""
    port: int | None
    """``None``: 80 and 443."""

    def allows(self, host: str, port: int) -> bool:
        """Whether a destination is what this entry names."""
        return host == self.host and (port in _DEFAULT_PORTS if self.port is None else port == self.port)


@dataclass(frozen=True, slots=True)
class AllowList:
    """The destinations that one sandbox may reach."""

    rules: tuple[Rule, ...]

    @classmethod
    def parse(cls, entries: Sequence[str]) -> "AllowList":
        """Read ``host``, ``host:port`` and ``[v6 address]:port``.

        Raises:
            SandboxError: ``SANDBOX_UNAVAILABLE``, naming the entry.
        """
        return cls(tuple(_parse_rule(entry) for entry in entries))

    def allows(self, host: str, port: int) -> bool:
        """Whether a destination is on the list, by the name or address that was asked for."""
        return any(rule.allows(normal_host(host), port) for rule in self.rules)

    async def resolve(self, host: str, port: int) -> list[str]:
        """Return the addresses at which an allowed destination may be reached, in the resolver's order.

        Raises:
            EgressRefusedError: it is not on the list, has no address, or only addresses inside the site.
        """
        if not self.allows(host, port):
            raise EgressRefusedError("it is not on the sandbox's allow-list")
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(normal_host(host), port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise EgressRefusedError(f"its name cannot be resolved ({error})") from None
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        allowed = [address for address in addresses if self._reachable(address, port)]
        if not allowed:
            raise EgressRefusedError(
                f"its address {', '.join(addresses[:4])} is inside the site; it must be listed itself"
            )
        return allowed

    def _reachable(self, text: str, port: int) -> bool:
        address = ip_address(text.partition("%")[0])
        return is_public(address) or any(rule.allows(str(address), port) for rule in self.rules)


def is_public(address: Address) -> bool:
    """Whether an address, and the IPv4 address that may be embedded in it, belongs to the public internet."""
    return all(
        part.is_global and not (part.is_multicast or part.is_reserved or part.is_unspecified)
        for part in (address, *_embedded(address))
    )


def _embedded(address: Address) -> list[IPv4Address]:
    if isinstance(address, IPv4Address):
        return []
    found = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if int(address) >> 32 == _NAT64 >> 32:
        found.append(IPv4Address(int(address) & 0xFFFFFFFF))
    return [part for part in found if part is not None]


def normal_host(host: str) -> str:
    """Return a host name or address in the one form that is compared."""
    host = host.removeprefix("[").removesuffix("]").lower().removesuffix(".")
    try:
        return str(ip_address(host))
    except ValueError:
        return host


def split_authority(text: str) -> tuple[str, int | None]:
    """Split ``host``, ``host:port`` and ``[address]:port``.

    Raises:
        ValueError: it is none of these.
    """
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


def _parse_rule(entry: str) -> Rule:
    try:
        host, port = split_authority(entry)
    except ValueError as error:
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"egress: {entry!r} is not a destination ({error}).",
            "Write 'host' (ports 80 and 443), 'host:port' or '[IPv6 address]:port', without a scheme or a path.",
        ) from None
    return Rule(normal_host(host), port)
