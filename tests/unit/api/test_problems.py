from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from api import problems
from api.app import create_app
from service.config.settings import Settings
from service.domain import errors as domain_errors
from tests.unit.api.serving import LiveServer

ROOT = Path(__file__).resolve().parents[3]


def domain_codes() -> list[str]:
    """Return the code of every class that is raised. The base class itself is never raised."""
    found, todo = [], [*domain_errors.DomainError.__subclasses__()]
    while todo:
        kind = todo.pop()
        found.append(kind.code)
        todo += kind.__subclasses__()
    return sorted(found)


@pytest.mark.parametrize("code", domain_codes())
def test_every_domain_error_has_a_status(code: str) -> None:
    assert problems.STATUS[code] in range(400, 600)


def test_the_server_sends_each_code_that_the_sdk_has() -> None:
    edge = [path for path in (ROOT / "api").rglob("*.py") if path.parent.name != "examples"]
    texts = [path.read_text() for path in edge]
    of_edge = {code for code in problems.STATUS if any(f'"{code}"' in text for text in texts)}
    assert set(problems.STATUS) == of_edge | set(domain_codes())


def test_an_unknown_path_is_a_problem(http: httpx.Client) -> None:
    response = http.get("/v1/nothing")
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json() == {
        "type": "urn:dray:problem:not_found",
        "title": "Not Found",
        "status": 404,
        "detail": "there is nothing at /v1/nothing",
        "code": "not_found",
        "instance": "/v1/nothing",
        "request_id": response.headers["x-request-id"],
    }


def test_a_wrong_method_is_a_problem_that_lists_the_right_ones(http: httpx.Client) -> None:
    response = http.put("/v1/jobs")
    assert (response.status_code, response.json()["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "GET, POST"


def test_a_problem_says_nothing_of_what_is_not_there(http: httpx.Client) -> None:
    assert "pointer" not in http.get("/v1/jobs/job-none").json()


@pytest.mark.parametrize("path", ["/v1/jobs/a%00b", "/v1/jobs?queue=%00", "/v1/jobs?label=a%3D%00"])
def test_nul_in_an_address_never_reaches_the_database(http: httpx.Client, path: str) -> None:
    response = http.get(path)
    assert (response.status_code, response.json()["code"]) == (400, "malformed_request")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/jobs?limt=3", "limt"),
        ("/v1/jobs?limit=0", "limit"),
        ("/v1/jobs?limit=x", "limit"),
        ("/v1/jobs?state=DONE", "state"),
        ("/v1/jobs?label=nokey", "nokey"),
        ("/v1/jobs/job-x?wait_s=61", "wait_s"),
        ("/v1/jobs/job-x?wait_s=nan", "wait_s"),
        ("/v1/jobs/job-x/metrics?after_step=99999999999999999999", "after_step"),
        ("/v1/jobs/job-x/metrics?max_points=1", "max_points"),
        ("/v1/jobs/job-x/metrics/system?after_time=-1", "after_time"),
        ("/v1/jobs/job-x/logs?rank=-1", "rank"),
        ("/v1/jobs/job-x/events?after_seq=-1", "after_seq"),
        ("/v1/jobs/job-x/attempts?x=1", "x"),
        ("/v1/cluster?x=1", "x"),
    ],
)
def test_a_parameter_that_is_unknown_or_wrong_is_named(
    http: httpx.Client, path: str, name: str
) -> None:
    response = http.get(path)
    assert (response.status_code, response.json()["code"]) == (422, "invalid_parameter")
    assert f"'{name}'" in response.json()["detail"]


def test_an_unknown_parameter_is_told_which_there_are(http: httpx.Client) -> None:
    assert "wait_s" in http.get("/v1/jobs/job-x?wait=3").json()["hint"]


async def test_a_fault_of_the_server_is_a_problem_without_its_insides(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = server.context.runtime

    async def broken(job_id: str) -> None:
        raise RuntimeError(f"secret of {job_id}")

    monkeypatch.setattr(runtime.queries, "explain", broken)
    app = create_app(Settings(home=tmp_path, open_to_local_users=True), runtime)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        response = await client.get("/v1/jobs/job-x/explain")
    assert (response.status_code, response.json()["code"]) == (500, "internal_error")
    assert "secret" not in json.dumps(response.json())


async def test_a_database_that_does_not_answer_is_a_503_that_says_when_to_come_back(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = server.context.runtime

    async def away(job_id: str) -> None:
        raise domain_errors.DatabaseUnavailable(f"no connection for {job_id}")

    monkeypatch.setattr(runtime.status, "read", away)
    app = create_app(Settings(home=tmp_path, open_to_local_users=True), runtime)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client,
    ):
        response = await client.get("/v1/jobs/job-x")
    assert (response.status_code, response.json()["code"]) == (503, "database_unavailable")
    assert response.headers["retry-after"] == "1"
