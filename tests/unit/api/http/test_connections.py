"""Callers that send too much, too slowly or over too many connections, and their effect on
others."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from api.http.limits import SPARE, Admission, Limits, raise_descriptor_limit
from service.config.settings import Settings
from tests.unit.api.serving import DEADLINE_S, LiveServer, serving, wait_until

HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SLOW = {"head_within_s": 0.2, "body_within_s": 0.2, "keep_alive_s": 1}


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with very short time limits; only for raw connections."""
    with serving(tmp_path_factory.mktemp("home"), limits=SLOW) as server:
        yield server


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that allows few connections."""
    home = tmp_path_factory.mktemp("home")
    with serving(home, max_connections=16, max_connections_per_client=8) as server:
        yield server


def connect(server: LiveServer, sent: bytes = b"") -> socket.socket:
    port = int(server.url.rpartition(":")[2])
    connection = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    connection.sendall(sent)
    return connection


def connect_in_time(server: LiveServer, sent: bytes) -> socket.socket:
    """Connect, and repeat this until the bytes are sent within the server's time limit; a slow
    machine may need several tries."""
    while True:
        began = time.monotonic()
        connection = connect(server, sent)
        if time.monotonic() - began < SLOW["head_within_s"] / 2:
            return connection
        connection.close()


def said(connection: socket.socket) -> tuple[int, str]:
    """Return the status and code of everything that is received until the server closes the
    connection; 0 if there is nothing."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    if not head:
        return 0, ""
    problem = json.loads(body)
    return int(head.split()[1]), str(problem.get("code", problem["status"]))


@pytest.mark.parametrize(
    "head",
    [
        "GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\nHost: localhost",
        "GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\nhOsT: evil.example.org",
        "GET /v1/jobs HTTP/1.1\r\nHost: evil.example.org\r\nHost: localhost",
        "GET /v1/jobs HTTP/1.1\r\nHost:\r\nHost: localhost",
        "GET /v1/jobs HTTP/1.0\r\nHost: localhost\r\nHost: localhost",
        "GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\n evil.example.org",
        "GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b",
        "GET http://evil.example.org/v1/jobs HTTP/1.1\r\nHost: localhost",
        "GET http://localhost:1/v1/jobs HTTP/1.1\r\nHost: localhost",
    ],
)
def test_a_request_with_more_than_one_host_is_refused(server: LiveServer, head: str) -> None:
    with connect(server, f"{head}\r\n\r\n".encode()) as connection:
        assert said(connection) == (400, "malformed_request")


@pytest.mark.parametrize(
    "head",
    [
        "GET http://localhost/v1/jobs HTTP/1.1\r\nHost: LOCALHOST",
        "GET /v1/jobs?name=http://other HTTP/1.1\r\nHost: localhost",
        "GET /v1/jobs HTTP/1.0",
    ],
)
def test_a_request_with_one_host_or_none_is_answered(server: LiveServer, head: str) -> None:
    with connect(server, f"{head}\r\nConnection: close\r\n\r\n".encode()) as connection:
        assert connection.recv(12) == b"HTTP/1.1 200"


def healthy(connection: socket.socket) -> None:
    """Read one answer of /healthz."""
    found = b""
    while not found.endswith(b"}"):
        part = connection.recv(1 << 16)
        assert part, found
        found += part
    assert found.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (HEAD, 408, "request_too_slow"),
        (b"G", 408, "request_too_slow"),
        (POST + b"Content-Length: 9\r\n\r\n{", 408, "request_too_slow"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{", 408, "request_too_slow"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n9;ext", 408, "request_too_slow"),
        (b"", 0, ""),
        (b"\r\n", 0, ""),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400, "malformed_request"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "malformed_request"),
    ],
)
def test_a_caller_that_does_not_finish_its_request_is_told_and_cut_off(
    hasty: LiveServer, sent: bytes, status: int, code: str
) -> None:
    with closing(connect_in_time(hasty, sent)) as connection:
        assert said(connection) == (status, code)


def test_a_second_request_on_a_connection_has_its_time_too(hasty: LiveServer) -> None:
    with closing(connect_in_time(hasty, HEAD + b"\r\n")) as connection:
        healthy(connection)
        connection.sendall(HEAD)
        assert said(connection)[0] == 408


def test_a_body_that_waits_for_other_bodies_has_its_time_afterwards(tmp_path: Path) -> None:
    limits = {"body_within_s": 2.0, "linger_s": 0.01}
    with serving(tmp_path / "home", limits=limits) as server, ExitStack() as stack:
        held = [server.context.files.acquire(name) for name in ("ann", "bob")]
        for one in held:
            server.await_(one.__aenter__())
        form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
        form += b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        form += b'{"a": 1}\n' * 30_000 + b"\r\n--b--\r\n"
        head = b"POST /openai/v1/files HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += b"Content-Type: multipart/form-data; boundary=b\r\n"
        head += f"Content-Length: {len(form)}\r\n\r\n".encode()
        connection = stack.enter_context(connect(server, head + form[:200_000]))
        time.sleep(2.6)
        for one in held:
            server.await_(one.__aexit__(None, None, None))
        time.sleep(0.3)
        connection.sendall(form[200_000:])
        assert connection.recv(12) == b"HTTP/1.1 200"


def test_a_connection_that_asks_nothing_more_is_closed(hasty: LiveServer) -> None:
    with closing(connect_in_time(hasty, HEAD + b"\r\n")) as connection:
        healthy(connection)
        assert connection.recv(1) == b""


def test_a_body_that_the_answer_did_not_wait_for_does_not_keep_the_connection(
    tmp_path: Path,
) -> None:
    with (
        serving(tmp_path, limits={"linger_s": 0.2}) as server,
        closing(connect(server, POST + b"Content-Length: 99999999\r\n\r\n{")) as connection,
    ):
        assert said(connection) == (413, "body_too_large")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"a" * (80 << 10),
        HEAD + b"X: " + b"a" * (80 << 10),
        HEAD + b"X: 1\r\n" * 129,
        HEAD + b"X: " + b"a" * (64 << 10) + b"\r\n\r\n",
        b"GET /" + b"a" * (64 << 10) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        HEAD + b"X" * (80 << 10),
        b"\r\n" * (40 << 10),
        POST + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"e" * (80 << 10),
        POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX: " + b"a" * (80 << 10),
    ],
)
def test_more_headers_than_a_request_may_have_are_431(server: LiveServer, sent: bytes) -> None:
    with closing(connect(server, sent)) as connection:
        assert said(connection) == (431, "headers_too_large")


def test_headers_within_the_limits_are_taken(server: LiveServer) -> None:
    many = b"".join(b"X-%d: %s\r\n" % (number, b"a" * 350) for number in range(120))
    with closing(connect(server, HEAD + many + b"\r\n")) as connection:
        healthy(connection)


def test_a_trailer_does_not_become_a_header(server: LiveServer) -> None:
    trailer = b"0\r\nX-Request-Id: trailer\r\n\r\n"
    sent = POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + trailer
    with closing(connect(server, sent)) as connection:
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"trailer" not in answer


def test_too_many_requests_at_once_end_the_connection(server: LiveServer) -> None:
    found = b""
    with closing(connect(server)) as connection, contextlib.suppress(ConnectionError):
        connection.sendall((HEAD + b"\r\n") * 2000)
        while part := connection.recv(1 << 16):
            found += part
    assert found.count(b"200 OK") < 100


def test_half_requests_do_not_use_up_the_connections_of_others(small: LiveServer) -> None:
    with ExitStack() as stack:
        half = [stack.enter_context(closing(connect(small, HEAD))) for _ in range(3 * SPARE)]
        for _ in range(5):
            assert small.ask("GET", "/v1/jobs").status_code == 200
        assert said(half[0]) == (503, "unavailable"), "the one that waited longest made room"


def test_a_server_that_is_busy_says_503_and_answers_probes(small: LiveServer) -> None:
    job_id = small.submit()
    url = f"/v1/jobs/{job_id}?wait_s=60&state=QUEUED"
    threads = [threading.Thread(target=small.ask, args=("GET", url)) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: small.num_waiting(job_id) == 8, "all places to be taken")
    refused = small.ask("GET", "/v1/jobs")
    assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
    assert refused.headers["retry-after"] == "1"
    assert "DRAY_MAX_CONNECTIONS" in refused.json()["hint"]
    assert small.ask("GET", "/healthz").status_code == 200
    small.hands.claim(job_id)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert small.ask("GET", "/v1/jobs").status_code == 200


def test_one_client_leaves_connections_to_another() -> None:
    admission = Admission(Limits(connections=3, per_client=2))
    assert [admission.enter("a") is None for _ in range(3)] == [True, True, False]
    admission.leave("a")
    assert admission.enter("b") is None
    assert admission.enter("c") is not None


def test_the_limits_stay_below_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for descriptors, connections in ((1024, 512), (100, SPARE), (1 << 20, 2048)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, n=descriptors: (n, n))
        limits = Limits.of(Settings())
        assert (limits.connections, limits.per_client) == (connections, connections // 2)
    limits = Limits.of(Settings(max_connections=100, max_connections_per_client=500))
    assert (limits.connections, limits.per_client) == (100, 100)


@pytest.mark.parametrize(("hard", "raised"), [(4096, 4096), (resource.RLIM_INFINITY, 1 << 16)])
def test_the_limit_of_descriptors_is_raised(
    monkeypatch: pytest.MonkeyPatch, hard: int, raised: int
) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: found.append(limits))
    raise_descriptor_limit()
    assert found == [(raised, hard)]
