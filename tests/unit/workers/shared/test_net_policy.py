"""The hosts that a source may name."""

from __future__ import annotations

import ipaddress

import pytest

from ray_workers.shared.net_policy import AllowedHosts, refused_address, refused_host

NO_HOSTS = AllowedHosts()


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.1", "127.0.0.1.", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1",
        "017700000001", "\uff11\uff12\uff17.0.0.1", "127\u30020\u30020\u30021", "0.0.0.0", "0",
        "10.1.2.3", "172.16.0.1",
        "192.168.1.1", "100.64.0.1", "100.100.100.200", "169.254.169.254", "169.254.43518",
        "0xa9fea9fe", "192.0.0.192", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
        "168.63.129.16", "[::1]", "::1", "::", "fd00:ec2::254", "fe80::1", "fe80::1%eth0",
        "fec0::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:a9fe:a9fe", "::127.0.0.1",
        "64:ff9b::169.254.169.254", "64:ff9b:1::10.0.0.1", "2002:7f00:1::", "2002:a9fe:a9fe::1",
        "2001:0:7f00:1::1", "2001:db8::1", "localhost", "LOCALHOST", "localhost.", "a.localhost",
        "\u24dbocalhost", "ip6-localhost", "metadata.google.internal", "Metadata.Google.Internal.",
        "metadata", "instance-data",
    ],
)  # fmt: skip
def test_no_source_is_read_from_within(host: str) -> None:
    assert refused_host(host, NO_HOSTS)


@pytest.mark.parametrize(
    "host",
    [
        "example.org", "data.example.org.", "8.8.8.8", "2606:4700::1111", "bücher.example",
        "xn--bcher-kva.example", "localhost.example.org", "1.example.org", "deadbeef.org",
        "::ffff:8.8.8.8", "2002:808:808::1", "64:ff9b::8.8.8.8",
    ],
)  # fmt: skip
def test_the_public_may_be_read(host: str) -> None:
    assert refused_host(host, NO_HOSTS) is None


def test_the_operator_allows_names_addresses_and_networks() -> None:
    allowed = AllowedHosts(["data.internal", "10.0.0.0/8", "127.0.0.1", "fd00::/8", "localhost"])
    for host in ("10.9.9.9", "127.0.0.1", "2130706433", "::ffff:10.0.0.1", "fd00::7", "LOCALHOST."):
        assert refused_host(host, allowed) is None
    for host in ("127.0.0.2", "11.0.0.1.localhost", "192.168.0.1", "fe80::1", "metadata"):
        assert refused_host(host, allowed)
    assert allowed.has_name("Data.Internal.")
    assert not allowed.has_name("x.data.internal")


def test_the_reason_is_one_that_a_person_reads() -> None:
    address = ipaddress.ip_address("::ffff:169.254.169.254")
    assert refused_address(address, NO_HOSTS) == (
        "169.254.169.254 is a link-local address, where cloud providers serve credentials"
    )


@pytest.mark.parametrize("entry", ["", "10.0.0.0/99", "a b", "http://x", "*.example.org"])
def test_an_entry_that_allows_nothing_is_an_error(entry: str) -> None:
    with pytest.raises(ValueError, match="is not a host name, address or network"):
        AllowedHosts([entry])
