"""The SDK and the command line find the token in this user's home, and don't reveal it to anyone
else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from api.security import local_callers
from dray import AsyncClient, Client, errors, home_token
from dray.cli import main
from service.config import tokens_file as written
from tests.unit.api.serving import LiveServer, serving
from tests.unit.workers.other_user import needs_root, run_as_another

JOB = {"recipe": "image_classification"}
REFUSE = """
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
print(listener.getsockname()[1], flush=True)
listener.settimeout(1)
received = []
try:
    while True:
        connection = listener.accept()[0]
        received.append(connection.recv(65536).decode())
        body = b'{"code": "unauthorized", "status": 401, "detail": "sign in"}'
        connection.sendall(b"HTTP/1.1 401 X\\r\\nContent-Type: application/problem+json\\r\\n"
                           b"Content-Length: %d\\r\\n\\r\\n" % len(body) + body)
        connection.settimeout(1)
        try:
            received.append(connection.recv(65536).decode())
        except TimeoutError:
            pass
except TimeoutError:
    pass
print(repr("".join(received)), flush=True)
"""
"""Another user's server, which refuses all calls and records what it receives."""


@pytest.fixture
def server(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LiveServer]:
    """A server that treats all callers as processes of another user."""
    monkeypatch.setattr(local_callers, "is_of_own_user", lambda request: False)
    with serving(tmp_path_factory.mktemp("guarded") / "home") as server:
        written.ensure(server.settings.home)
        yield server


@pytest.fixture
def home(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("DRAY_TOKEN", raising=False)
    monkeypatch.setenv("DRAY_HOME", str(server.settings.home))
    return server.settings.home


@pytest.mark.usefixtures("home")
async def test_both_clients_sign_in_by_themselves(server: LiveServer) -> None:
    with Client(server.url) as client:
        job = client.submit(JOB)
        assert [event.code for event in client.events(job.id)] == ["submitted"]
    async with AsyncClient(server.url.replace("127.0.0.1", "localhost")) as other:
        assert (await other.get(job.id)).owner == "default"


@pytest.mark.usefixtures("home")
def test_so_does_the_command_line(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAY_URL", server.url)
    with pytest.raises(SystemExit) as ended:
        main(["queue", "ls"])
    assert ended.value.code == 0


def test_the_home_is_looked_for_in_the_current_folder(
    server: LiveServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRAY_HOME")
    home.rename(home.with_name(home_token.DEFAULT_HOME))
    monkeypatch.chdir(home.parent)
    server.settings.home.symlink_to(home.with_name(home_token.DEFAULT_HOME))
    with Client(server.url) as client:
        assert client.queues()


@pytest.mark.usefixtures("home")
def test_a_token_that_is_given_comes_first(server: LiveServer) -> None:
    with Client(server.url, "another") as client, pytest.raises(errors.Unauthorized):
        client.queues()


def test_without_the_file_the_error_says_where_the_token_is(
    server: LiveServer, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path))
    with Client(server.url) as client, pytest.raises(errors.Unauthorized, match="DRAY_HOME"):
        client.queues()


@needs_root
@pytest.mark.usefixtures("home")
def test_the_token_goes_to_no_server_of_another_user(server: LiveServer, home: Path) -> None:
    other = run_as_another(REFUSE)
    assert other.stdout is not None
    port = int(other.stdout.readline())
    with Client(f"http://127.0.0.1:{port}") as client, pytest.raises(errors.Unauthorized):
        client.queues()
    received, _ = other.communicate(timeout=60)
    assert "GET /v1/queues" in received
    assert home_token.PREFIX not in received
