"""Who may call a server without a tokens file: processes of its user, and holders of its token."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from api.app import ROUTERS
from api.security import local_callers
from dray import home_token
from ray_workers.shared.peers import peer_credentials
from service.config import tokens_file as written
from tests.unit.api.serving import LiveServer, serving
from tests.unit.workers.other_user import needs_root, run_as_another

OPEN = {
    *("GET /healthz", "GET /readyz", "GET /v1/schema"),
    *("GET /", "HEAD /", "GET /page/x/x", "HEAD /page/x/x"),
    *("GET /manual", "HEAD /manual", "GET /manual/x", "HEAD /manual/x"),
    *("GET /docs", "GET /openapi.json"),
    "GET /v1/downloads/x",  # which requires the secret in its URL
}
"""Calls that don't require a token."""
CALL = """
for method, path, headers in eval(sys.stdin.readline()):
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
        lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{sys.argv[1]}", "Content-Length: 0"]
        lines += ["Connection: close", *headers, "", ""]
        connection.sendall("\\r\\n".join(lines).encode())
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
        print(answer.split(b" ", 2)[1].decode(), flush=True)
"""
"""Makes calls as another user, and prints the status of each."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("local") / "home") as server:
        yield server


@pytest.fixture
def token(server: LiveServer) -> Iterator[str]:
    yield written.ensure(server.settings.home)
    home_token.path_in(server.settings.home).unlink(missing_ok=True)


def call_as_another(server: LiveServer, *calls: tuple[str, str, list[str]]) -> list[int]:
    port = server.url.rpartition(":")[2]
    other = run_as_another(CALL, port)
    said, _ = other.communicate(repr(calls) + "\n", timeout=120)
    return [int(line) for line in said.split()]


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def a_foreigner(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, treat all callers as processes of another user."""
    monkeypatch.setattr(local_callers, "is_of_own_user", lambda request: False)


def test_the_servers_own_user_needs_no_token(server: LiveServer) -> None:
    assert server.ask("GET", "/v1/jobs").status_code == 200
    job_id = server.submit()
    assert server.ask("GET", f"/v1/jobs/{job_id}").json()["owner"] == "default"


@needs_root
def test_another_user_of_the_machine_is_refused_everywhere(server: LiveServer) -> None:
    calls: list[tuple[str, str, list[str]]] = [
        (method, re.sub(r"\{\w+(:path)?\}", "x", route.path), [])
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods or ())
    ]
    found = call_as_another(server, *calls)
    assert len(found) == len(calls) > 80
    by_call = {f"{call[0]} {call[1]}": status for call, status in zip(calls, found, strict=True)}
    assert {name for name, status in by_call.items() if status != 401} == OPEN


@needs_root
def test_another_user_signs_in_with_the_token_of_the_home(server: LiveServer, token: str) -> None:
    found = call_as_another(
        server,
        ("GET", "/v1/jobs", [f"Authorization: Bearer {token}"]),
        ("GET", "/v1/jobs", [f"Authorization: Bearer {token[:-1]}"]),
        ("GET", "/v1/jobs", ["Authorization: Bearer dray-home-"]),
        ("GET", "/v1/jobs", []),
        ("GET", "/readyz", []),
    )
    assert found[:4] == [200, 401, 401, 401]
    assert found[4] in (200, 503)


@needs_root
def test_every_user_may_call_where_the_operator_wants_it(tmp_path: Path) -> None:
    with serving(tmp_path / "home", open_to_local_users=True) as server:
        assert call_as_another(server, ("GET", "/v1/jobs", [])) == [200]
    assert not home_token.path_in(tmp_path / "home").exists()


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Forwarded-For": "127.0.0.1"},
        {"Forwarded": "for=127.0.0.1"},
        {"Via": "1.1 proxy"},
        {"X-Real-IP": "127.0.0.1"},
        {"Host": "10.1.2.3:9000"},
        {"Host": "[2001:db8::1]"},
    ],
)
def test_a_forwarded_request_is_not_its_proxys(
    server: LiveServer, token: str, headers: dict[str, str]
) -> None:
    refused = server.ask("GET", "/v1/jobs", headers=headers)
    assert refused.status_code == 401
    assert "DRAY_TOKEN" in refused.json()["hint"]
    assert refused.headers["WWW-Authenticate"].startswith("Bearer")
    assert server.ask("GET", "/v1/jobs", headers=headers | bearer(token)).status_code == 200


def test_the_token_has_the_account_of_the_servers_user(
    server: LiveServer, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_foreigner(monkeypatch)
    assert server.ask("GET", "/v1/jobs").status_code == 401
    body = {"recipe": "image_classification"}
    made = server.ask("POST", "/v1/jobs", json=body, headers=bearer(token))
    assert made.json()["owner"] == "default"
    queue = server.ask("PUT", "/v1/queues/night", json={}, headers=bearer(token))
    assert queue.status_code == 200


def test_a_token_that_is_deleted_or_replaced_is_refused_at_once(
    server: LiveServer, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_foreigner(monkeypatch)
    path = home_token.path_in(server.settings.home)
    assert server.ask("GET", "/v1/jobs", headers=bearer(token)).status_code == 200
    path.unlink()
    assert server.ask("GET", "/v1/jobs", headers=bearer(token)).status_code == 401
    newer = written.ensure(server.settings.home)
    assert newer != token
    assert server.ask("GET", "/v1/jobs", headers=bearer(token)).status_code == 401
    assert server.ask("GET", "/v1/jobs", headers=bearer(newer)).status_code == 200


def test_a_token_that_others_could_read_is_refused(
    server: LiveServer,
    token: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    a_foreigner(monkeypatch)
    home_token.path_in(server.settings.home).chmod(0o640)
    assert server.ask("GET", "/v1/jobs", headers=bearer(token)).status_code == 401
    assert "is accessible to other users" in caplog.text
    assert token not in caplog.text


def test_a_request_of_no_known_connection_is_refused(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_credentials, "_asked", lambda theirs, ours: None)
    monkeypatch.setattr(peer_credentials, "_looked_up", lambda theirs, ours: None)
    assert server.ask("GET", "/v1/jobs").status_code == 401


def test_the_kernel_is_asked_once_for_each_connection(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    ask = peer_credentials._asked

    def noted(*ends: tuple[object, ...]) -> tuple[int, int] | None:
        asked.append(ends)
        return ask(*ends)

    monkeypatch.setattr(peer_credentials, "_asked", noted)
    with server.client() as client:
        for _ in range(5):
            assert client.get("/v1/jobs").status_code == 200
    assert len(asked) == 1
