"""What is added to every request, including failing ones: its id, its log line, and security
headers."""

from __future__ import annotations

import io
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.app import create_app
from service.config.logging_setup import JsonFormatter, LogFormat, TextFormatter, configure
from service.config.settings import Settings
from tests.unit.api.serving import LiveServer, serving, wait_until

SECRET = "annas-secret-token"
HASH = "00afbaa9c1d5cf0c8f71c3c3d2cbbd6f1ad5f4d7f1c1d5a0cf0bd1bd1e4f4f2a"


class Log:
    """Collects what the service logs as JSON during a test."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.handler = logging.StreamHandler(self.stream)
        self.handler.setFormatter(JsonFormatter())
        self.handler.addFilter(lambda record: not record.name.startswith("httpx"))

    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]

    def lines(self, logger: str = "api.access") -> list[dict[str, Any]]:
        return [line for line in self.all() if line["logger"] == logger]


@pytest.fixture
def log() -> Iterator[Log]:
    log, root = Log(), logging.getLogger()
    level = root.level
    root.addHandler(log.handler)
    root.setLevel(logging.INFO)
    yield log
    root.setLevel(level)
    root.removeHandler(log.handler)


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs/job-none", "/nothing", "/healthz"])
def test_every_answer_has_an_id_of_its_own(http: httpx.Client, path: str) -> None:
    ids = {http.get(path).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


def test_a_sane_id_of_the_caller_is_kept_and_is_in_the_problem(http: httpx.Client) -> None:
    response = http.get("/v1/jobs/job-none", headers={"X-Request-Id": "run-7:a.b_C"})
    assert response.headers["x-request-id"] == "run-7:a.b_C"
    assert response.json()["request_id"] == "run-7:a.b_C"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, 'a"b', "<script>", b"\xe9", "-a"])
def test_an_id_that_is_not_fit_for_a_log_is_replaced(
    http: httpx.Client, given: str | bytes
) -> None:
    response = http.get("/healthz", headers={b"X-Request-Id": given})
    assert response.headers["x-request-id"].isalnum()
    assert len(response.headers["x-request-id"]) == 24


def test_each_request_has_one_line_in_the_log_by_template_without_its_address(
    http: httpx.Client, log: Log
) -> None:
    headers = {"X-Request-Id": "one", "Authorization": f"Bearer {SECRET}"}
    response = http.get(f"/v1/jobs/job-none?wait_s=0&cursor={SECRET}", headers=headers)
    assert response.status_code == 422
    wait_until(log.lines, "the line")
    (line,) = log.lines()
    assert line.pop("duration_ms") >= 0
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "INFO",
        "logger": "api.access",
        "message": "GET /v1/jobs/{job_id} 422",
        "method": "GET",
        "route": "/v1/jobs/{job_id}",
        "status": 422,
        "caller": "default",
        "request_id": "one",
    }
    assert SECRET not in log.stream.getvalue()


def test_a_request_that_is_not_http_or_asks_for_another_protocol_has_one_line(
    http: httpx.Client, log: Log
) -> None:
    address = (http.base_url.host, http.base_url.port)
    with socket.create_connection(address) as connection:
        connection.sendall(b"no such thing\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 400"
    assert http.get(
        "/v1/jobs", headers={"Connection": "upgrade", "Upgrade": "websocket"}
    ).is_success
    wait_until(log.lines, "the line")
    assert [line["logger"] for line in log.all()] == ["api.http.connections", "api.access"]


def test_probes_and_made_up_paths_do_not_fill_the_log(http: httpx.Client, log: Log) -> None:
    http.get("/healthz")
    http.get("/readyz")
    http.request("PROPFIND", "/made/up\r\nby/anyone".replace("\r\n", "%0d%0a"))
    wait_until(log.lines, "the line")
    assert [(line["method"], line["route"]) for line in log.lines()] == [("other", "unknown")]


def test_a_token_is_never_logged_whether_it_is_known_or_not(
    log: Log, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "tokens").write_text(f"ann:{HASH}\n")
    with serving(folder / "home", tokens_file=folder / "tokens") as guarded:
        for token in (SECRET, "x"):
            headers = {"Authorization": f"Bearer {token}"}
            assert guarded.ask("GET", "/v1/jobs", headers=headers).status_code == 401
        wait_until(lambda: len(log.lines()) == 2, "both lines")
    assert [line["caller"] for line in log.lines()] == ["-", "-"]
    assert SECRET not in log.stream.getvalue()
    assert HASH not in log.stream.getvalue()


def test_the_secret_of_a_download_is_not_logged_and_the_name_of_its_caller_is(
    site: LiveServer, ann: httpx.Client, log: Log
) -> None:
    job_id = ann.post("/v1/jobs", json={"recipe": "image_classification"}).json()["id"]
    url = ann.post(f"/v1/jobs/{job_id}/downloads", json={"log": {}}).json()["url"]
    assert [site.ask("GET", url).status_code for _ in range(2)] == [200, 404]
    route = "/v1/downloads/{secret}"
    wait_until(lambda: len(log.lines()) == 4, "a line for each")
    told = [(line["caller"], line["status"]) for line in log.lines() if line["route"] == route]
    assert told == [("ann", 200), ("-", 404)]
    for text in (log.stream.getvalue(), ann.get("/metrics").text):
        assert route in text
        assert url not in text


@pytest.mark.parametrize("path", ["/v1/jobs", "/nothing", "/v1/jobs?limit=x"])
def test_no_browser_may_run_frame_or_embed_an_answer(http: httpx.Client, path: str) -> None:
    headers = http.get(path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert headers["cross-origin-resource-policy"] == "same-origin"


async def test_a_fault_is_found_in_the_log_by_the_id_that_its_problem_has(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    runtime = server.context.runtime

    async def broken(job_id: str) -> None:
        raise RuntimeError(f"secret of {job_id}")

    monkeypatch.setattr(runtime.queries, "explain", broken)
    app = create_app(Settings(home=tmp_path, open_to_local_users=True), runtime)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        response = await client.get("/v1/jobs/job-x/explain")
    assert response.status_code == 500
    assert response.headers["x-request-id"] == response.json()["request_id"]
    (line,) = log.lines("api.observability.middleware")
    assert line["request_id"] == response.json()["request_id"]
    assert "RuntimeError: secret of job-x" in line["exception"]
    ended = {line["request_id"]: line["status"] for line in log.lines()}
    assert ended[line["request_id"]] == 500


def test_who_hangs_up_in_the_middle_of_a_body_is_no_fault_of_the_server(
    tmp_path: Path, log: Log
) -> None:
    # If a caller hangs up immediately, the server can't find out which user it belongs to.
    with serving(tmp_path, open_to_local_users=True) as server:
        address = httpx.URL(server.url)
        head = "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection((address.host, address.port or 80)) as connection:
            connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        wait_until(log.lines, "the line")
    assert [(line["route"], line["status"]) for line in log.lines()] == [("/v1/jobs", 499)]
    assert not log.lines("api.observability.middleware")


async def test_an_answer_that_breaks_off_is_not_followed_by_another(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    job_id = server.submit()
    server.train(job_id, server.artifact(job_id, "out", b"x" * 10))
    runtime = server.context.runtime

    def away(*_: object) -> bytes:
        raise OSError("the disk is gone")

    monkeypatch.setattr(runtime.storage, "read_bytes", away)
    app = create_app(Settings(home=tmp_path, open_to_local_users=True), runtime)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client,
    ):
        items = (await client.get(f"/v1/jobs/{job_id}/artifacts")).json()["items"]
        with pytest.raises(OSError, match="the disk is gone"):
            await client.get(f"/v1/jobs/{job_id}/artifacts/{items[0]['id']}")
    assert "the disk is gone" in log.lines("api.observability.middleware")[0]["exception"]


def test_a_line_of_text_stays_one_line() -> None:
    record = logging.makeLogRecord(
        {
            "name": "a",
            "levelname": "INFO",
            "msg": "x\r\ny\x1b[36m\x9b",
            "caller": "ann",
            "created": 1e9,
            "color_message": "\x1b[36mx",
        }
    )
    line = r"2001-09-09T01:46:40.000Z INFO a: x\r\ny\x1b[36m\x9b caller=ann"
    assert TextFormatter().format(record) == line


def test_a_traceback_follows_its_line() -> None:
    try:
        raise ValueError("ins\x1b[31mi\u202ede")
    except ValueError as error:
        fields = {"name": "a", "levelname": "ERROR", "msg": "x"}
        record = logging.makeLogRecord(
            {**fields, "exc_info": (type(error), error, None), "created": 0}
        )
    line = "1970-01-01T00:00:00.000Z ERROR a: x"
    assert TextFormatter().format(record) == rf"{line}{chr(10)}ValueError: ins\x1b[31mi\u202ede"


@pytest.mark.parametrize(("log_format", "kind"), [("text", TextFormatter), ("json", JsonFormatter)])
def test_the_setting_chooses_the_format(log_format: LogFormat, kind: type) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        configure(log_format)
        assert isinstance(root.handlers[0].formatter, kind)
        assert root.level == logging.INFO
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
