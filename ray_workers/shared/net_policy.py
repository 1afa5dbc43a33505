"""The hosts that a source may name: public hosts, and hosts that the operator allows.

These rules are applied twice: the service checks the URL when a job is submitted, and the worker
checks the address to which it is about to connect. Without the second check, a name could resolve
to any address by the time of the connection (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import socket
import unicodedata
from collections.abc import Iterable
from typing import Final

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

LOCAL_NAMES: Final = frozenset(
    {"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback", "broadcasthost"}
)
METADATA_NAMES: Final = frozenset(
    {
        "instance-data",
        "instance-data.ec2.internal",
        "metadata",
        "metadata.goog",
        "metadata.google.internal",
    }
)
"""Host names at which cloud providers serve a machine's credentials."""
METADATA_ADDRESSES: Final = frozenset({ipaddress.ip_address("168.63.129.16")})
"""Azure's metadata address, which is a public address. Other clouds use link-local or private
addresses."""

_SPECIAL: Final = tuple(
    map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "64:ff9b:1::/48"))
)
"""Networks that are not public, although some versions of Python treat them as public."""
_NAT64: Final = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))
_IPV4_COMPATIBLE: Final = ipaddress.ip_network("::/96")
_DOTS: Final = str.maketrans(dict.fromkeys("\u3002\uff0e\uff61", "."))


class AllowedHosts:
    """Private names, addresses and networks (CIDR) from which sources may be read.

    Raises ValueError for an invalid entry.
    """

    def __init__(self, entries: Iterable[str] = ()) -> None:
        self._names: set[str] = set()
        self._networks: list[Network] = []
        for entry in entries:
            try:
                self._networks.append(ipaddress.ip_network(entry.strip("[]"), strict=False))
            except ValueError:
                self._names.add(_checked_name(entry))

    def has_name(self, host: str) -> bool:
        return canonical_host(host) in self._names

    def has_address(self, address: Address) -> bool:
        return any(address in network for network in self._networks)


def refused_host(host: str, allowed: AllowedHosts) -> str | None:
    """Return why a URL must not contain this host, or None if the host is allowed. Host names are
    not resolved.

    When a worker connects to an allowed name, the address to which it connects is also checked.
    """
    name = canonical_host(host)
    if allowed.has_name(name):
        return None
    address = literal_address(name)
    if address is not None:
        return refused_address(address, allowed)
    if name in METADATA_NAMES:
        return "cloud providers serve a machine's credentials at this name"
    if name in LOCAL_NAMES or name.endswith(".localhost"):
        return "it is the machine itself"
    return None


def refused_address(address: Address, allowed: AllowedHosts) -> str | None:
    """Return why a worker must not connect to this address; None if it is allowed."""
    for one in (address, *embedded_addresses(address)):
        reason = _reason(one)
        if reason is not None:
            if allowed.has_address(address) or allowed.has_address(one):
                return None
            return f"{one} is {reason}"
    return None


def canonical_host(host: str) -> str:
    """Return the host in the form that resolvers use: lower case, normalized characters, no
    trailing dot."""
    text = unicodedata.normalize("NFKC", host.strip("[]").translate(_DOTS)).lower().rstrip(".")
    if "xn--" in text:
        try:
            decoded = text.encode("ascii").decode("idna")
        except UnicodeError:
            return text
        # If the decoded name is plain ASCII, the encoding only served to disguise the name.
        plain = unicodedata.normalize("NFKC", decoded).lower()
        return plain if plain.isascii() else text
    return text


def literal_address(host: str) -> Address | None:
    """Return the address that a host spells out in any form that the C library accepts (`127.1`,
    `0x7f000001`, `2130706433`, `0177.0.0.1`); None for a name."""
    text = host.split("%", 1)[0]
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        pass
    if not text or ":" in text:
        return None
    try:
        return ipaddress.IPv4Address(socket.inet_aton(text))
    except (OSError, UnicodeEncodeError):
        return None


def embedded_addresses(address: Address) -> tuple[ipaddress.IPv4Address, ...]:
    """Return the IPv4 addresses embedded in an IPv6 address: mapped, compatible, 6to4, Teredo,
    NAT64."""
    if isinstance(address, ipaddress.IPv4Address):
        return ()
    found = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    low = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if any(address in network for network in (*_NAT64, _IPV4_COMPATIBLE)):
        found.append(low)
    return tuple(one for one in found if one is not None)


def _reason(address: Address) -> str | None:
    if address in METADATA_ADDRESSES:
        return "an address at which a cloud provider serves a machine's credentials"
    if isinstance(address, ipaddress.IPv6Address):
        if embedded_addresses(address) and not address.is_loopback and not address.is_unspecified:
            return None  # the check of the embedded address decides
        if address.is_site_local:
            return "a private address"
    for holds, reason in (
        (address.is_unspecified, "not the address of a host"),
        (address.is_loopback, "the machine itself"),
        (address.is_link_local, "a link-local address, where cloud providers serve credentials"),
        (address.is_multicast, "a multicast address"),
        (
            address.is_private or any(address in network for network in _SPECIAL),
            "a private address",
        ),
        (not address.is_global, "an address that is not public"),
        (address.is_reserved, "a reserved address"),
    ):
        if holds:
            return reason
    return None


def _checked_name(entry: str) -> str:
    name = canonical_host(entry)
    labels = name.split(".")
    if not all(label and label.replace("-", "").replace("_", "").isalnum() for label in labels):
        raise ValueError(f"{entry!r} is not a host name, address or network (such as 10.0.0.0/8)")
    return name
