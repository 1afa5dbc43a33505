"""Ports are known before the servers that listen there start."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_workers.shared.peers import peer_ports
from ray_workers.shared.peers.peer_ports import ReservedPort


@pytest.fixture
def port() -> Iterator[ReservedPort]:
    reserved = ReservedPort("127.0.0.1")
    yield reserved
    reserved.close()


def reserve_only(monkeypatch: pytest.MonkeyPatch, port: int) -> ReservedPort:
    """Reserve another port, as a job would that could not get this one."""
    monkeypatch.setattr(peer_ports, "FIRST_PORT", port)
    monkeypatch.setattr(peer_ports, "_end", lambda: port + 1)
    monkeypatch.setattr(peer_ports, "TRIES", 3)
    return ReservedPort("127.0.0.1")


def test_only_a_server_that_shares_a_reserved_port_gets_it(
    port: ReservedPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert str(port) == f"127.0.0.1:{port.port}"
    for address in ("127.0.0.1", ""):  # TensorFlow's servers listen at all addresses
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((address, port.port))
    another = reserve_only(monkeypatch, port.port)
    another.close()
    assert another.port != port.port, "two jobs have one port"
    with socket.socket() as server, socket.socket() as client:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", port.port))
        server.listen()
        client.connect(("127.0.0.1", port.port))
        server.accept()[0].close()


def test_no_other_job_gets_a_port_that_is_open_for_its_server(
    port: ReservedPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A framework imports for seconds before its server listens, and again after a restart."""
    for _ in range(2):
        port.unbind()
        another = reserve_only(monkeypatch, port.port)
        another.close()
        assert another.port != port.port
        with socket.socket() as server:
            server.bind(("", port.port))
    port.close()
    again = reserve_only(monkeypatch, port.port)
    again.close()
    assert again.port == port.port, "a released port can be reserved again"


def test_a_reserved_port_is_none_that_connections_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = tmp_path / "range"
    monkeypatch.setattr(peer_ports, "_RANGE", ports)
    assert peer_ports._end() == 32_768, "it is no Linux"
    for text, end in (("30000\t60999\n", 30_000), ("1024 65535", 20_001)):
        ports.write_text(text)
        assert peer_ports._end() == end
    reserved = ReservedPort("127.0.0.1")
    reserved.close()
    assert reserved.port >= peer_ports.FIRST_PORT


def test_an_address_of_ipv6_is_written_in_brackets() -> None:
    reserved = ReservedPort("::1")
    reserved.close()
    assert str(reserved) == f"[::1]:{reserved.port}"
