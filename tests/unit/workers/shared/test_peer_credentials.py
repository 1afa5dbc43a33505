"""Other users of a node can reach neither connections between its processes nor its forkserver."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ray_workers.node.forkserver.client import ForkedProcess, ForkFailed, list_tasks
from ray_workers.shared.paths import UntrustedFolder, machine_root, own_folder
from ray_workers.shared.peers import peer_credentials
from ray_workers.shared.peers.peer_credentials import is_own_peer, is_own_tcp, is_own_unix
from tests.unit.workers.forked import Server, light, until
from tests.unit.workers.other_user import NOBODY, needs_root, run_as_another

__all__ = ["light"]

LISTEN = """
listener = socket.socket(socket.AF_UNIX)
os.umask(0)
listener.bind(sys.argv[1])
listener.listen()
print("listens", flush=True)
asked = listener.accept()[0]
print(asked.recv(4096), flush=True)
"""
CONNECT = """
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
connection.sendall(b'{"op": "list"}\\n')
print(connection.recv(4096), flush=True)
"""
CONNECT_BY_TCP = """
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
sys.stdin.read()
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may write to, like a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="open") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def test_the_machines_folder_is_made_for_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert machine_root().resolve() == tmp_path / f"dray-{os.getuid()}"
    assert machine_root().stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o755)
    own_folder(tmp_path / "mine")
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700


def _writable(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)


def _link(path: Path) -> None:
    path.with_name("elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.with_name("elsewhere"))


def _dangling(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_writable, "can be written to by other users"),
        (_link, "is not a folder"),
        (_dangling, "is not a folder"),
        (Path.touch, "is not a folder"),
    ],
)
def test_a_folder_that_others_may_have_filled_is_refused(
    tmp_path: Path, make: Callable[[Path], None], reason: str
) -> None:
    make(tmp_path / "it")
    with pytest.raises(UntrustedFolder, match=f"{reason}.*set TMPDIR"):
        own_folder(tmp_path / "it")


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(UntrustedFolder, match="belongs to the user with id"):
        own_folder(tmp_path / "theirs")


async def test_a_process_of_this_user_is_distinguished_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = socket.socketpair()
    with one, other:
        assert is_own_unix(one)
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
        assert not is_own_unix(one)


@pytest.fixture(params=["asks", "reads the tables"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way in which a connection's owner is found; the other way is disabled."""
    if request.param == "asks":
        monkeypatch.setattr(peer_credentials, "_looked_up", lambda theirs, ours: None)
    else:
        monkeypatch.delattr(socket, "AF_NETLINK")
    return str(request.param)


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    ("family", "address", "to"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET, "127.0.0.1", "::ffff:127.0.0.1"),
        (socket.AF_INET6, "::1", "::1"),
    ],
)
def test_so_is_one_that_connects_by_tcp(
    family: socket.AddressFamily, address: str, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ":" in to and not Path("/proc/net/if_inet6").read_text():
        pytest.skip("this machine has no IPv6")
    with socket.create_server((address, 0), family=family) as listener:
        connecting = socket.create_connection((to, listener.getsockname()[1]))
        accepted, theirs = listener.accept()
        with accepted:
            assert is_own_tcp(theirs, accepted.getsockname())
            assert not is_own_tcp((theirs[0], theirs[1] ^ 1, *theirs[2:]), accepted.getsockname())
            with monkeypatch.context() as patch:
                patch.setattr(os, "getuid", lambda: os.geteuid() + 1)
                assert not is_own_tcp(theirs, accepted.getsockname())
            connecting.close()
            assert not is_own_tcp(theirs, accepted.getsockname())  # no process holds it any more


@needs_root
@pytest.mark.usefixtures("source")
def test_a_tcp_connection_of_another_user_is_seen_to_be_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = run_as_another(CONNECT_BY_TCP, str(listener.getsockname()[1]))
        listener.settimeout(60)
        accepted, theirs = listener.accept()
        with accepted:
            assert not is_own_tcp(theirs, accepted.getsockname())
        other.communicate()


@needs_root
@pytest.mark.usefixtures("source")
def test_roots_connections_count_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connecting = socket.create_connection(listener.getsockname())
        accepted, theirs = listener.accept()
        ends = (theirs, accepted.getsockname())
        with accepted:
            monkeypatch.setattr(os, "getuid", lambda: NOBODY)
            assert not is_own_tcp(*ends)
            assert is_own_tcp(*ends, or_roots=True)
            connecting.close()  # a socket that no process holds is listed with user 0
            assert not is_own_tcp(*ends, or_roots=True)


def bind_once_free(to_bind: socket.socket, address: tuple[str, int]) -> None:
    """Bind as soon as the kernel has finished with the connection that was reset."""
    deadline = time.monotonic() + 10.0
    while True:
        try:
            to_bind.bind(address)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


@pytest.mark.usefixtures("source")
def test_a_caller_that_is_gone_is_not_taken_for_the_next_one_at_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # Other processes connect from 127.0.0.1, so none of them takes the port in between.
        gone = socket.create_connection(listener.getsockname(), source_address=("127.0.0.2", 0))
        port = gone.getsockname()
        gone.sendall(b"POST")
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()  # resets the connection
        with socket.socket() as after:
            after.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bind_once_free(after, port)
            after.connect(listener.getsockname())
            first, theirs = listener.accept()
            second, _ = listener.accept()
            with first, second:
                assert theirs == port
                assert is_own_tcp(theirs, first.getsockname())  # by the ports alone
                assert not is_own_peer(first)
                assert is_own_peer(second)
                assert first.recv(4) == b"POST"  # so its owner matters


@needs_root
async def test_no_task_is_handed_to_another_users_forkserver(open_folder: Path) -> None:
    path = str(open_folder / "fork.sock")
    for ask in (ForkedProcess.start(path, {"op": "store"}), list_tasks(path)):
        Path(path).unlink(missing_ok=True)
        other = run_as_another(LISTEN, path)
        assert other.stdout is not None
        assert other.stdout.readline() == "listens\n"
        assert Path(path).stat().st_uid == NOBODY
        with pytest.raises(ForkFailed, match="another user is listening there"):
            await ask
        printed, _ = await asyncio.to_thread(other.communicate, timeout=60)
        assert printed == "b''\n"


@needs_root
async def test_a_forkserver_answers_no_other_user(light: Server) -> None:
    await light.serves()
    Path(light.path).parent.chmod(0o777)
    Path(light.path).chmod(0o777)
    other = run_as_another(CONNECT, light.path)
    await until(lambda: other.poll() is not None, "it was not continued")
    assert other.communicate()[0] in ("b''\n", "")
    assert await list_tasks(light.path) == []
    assert "refused a connection from another user" in light.log.read_text()
