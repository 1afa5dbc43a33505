"""Ports that are known before the servers that listen there start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ray_workers.shared.peers import peer_ports
from ray_workers.shared.peers.peer_ports import host_and_port, reserved_port


def test_nobody_else_gets_a_reserved_port_but_a_server_that_shares_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with reserved_port("127.0.0.1") as holder:
        port = holder.getsockname()[1]
        assert host_and_port(holder) == f"127.0.0.1:{port}"
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        monkeypatch.setattr(peer_ports, "FIRST_PORT", port)
        monkeypatch.setattr(peer_ports, "_end", lambda: port + 1)
        monkeypatch.setattr(peer_ports, "TRIES", 3)
        with reserved_port("127.0.0.1") as another:
            assert another.getsockname()[1] != port, "two jobs have one port"
        with socket.socket() as server, socket.socket() as client:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
            client.connect(("127.0.0.1", port))
            server.accept()[0].close()


def test_a_reserved_port_is_none_that_connections_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = tmp_path / "range"
    monkeypatch.setattr(peer_ports, "_RANGE", ports)
    assert peer_ports._end() == 32_768, "it is no Linux"
    for text, end in (("30000\t60999\n", 30_000), ("1024 65535", 20_001)):
        ports.write_text(text)
        assert peer_ports._end() == end
    with reserved_port("127.0.0.1") as holder:
        assert holder.getsockname()[1] >= peer_ports.FIRST_PORT


def test_an_address_of_ipv6_is_written_in_brackets() -> None:
    with reserved_port("::1") as holder:
        assert host_and_port(holder) == f"[::1]:{holder.getsockname()[1]}"
