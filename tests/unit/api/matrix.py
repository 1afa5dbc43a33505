"""Shared by the tests of bad input: a request, the check of its problem, and what the server
holds."""

from __future__ import annotations

import json
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import httpx
from sqlalchemy import func, select

from service.db.models import Base
from tests.unit.api.serving import DEADLINE_S, LiveServer

TOKEN = "anns secret"
GOOD = {"recipe": "image_classification"}
MEASURED = "service_metrics"
INSIDES = ("Traceback", 'File "', "site-packages", "sqlalchemy", "pydantic", ".py", "SELECT ")
"""Text about the implementation that no answer may contain."""


def held(site: LiveServer) -> dict[str, Any]:
    """Count all rows and list all files, except for the service's own metrics, which it may write
    at any time."""
    tables = {name: table for name, table in Base.metadata.tables.items() if name != MEASURED}
    counts = site.hands.database.read_sync(
        lambda s: {
            name: s.scalar(select(func.count()).select_from(tables[name])) for name in tables
        }
    )
    storage = site.settings.home / "storage"
    return {**counts, "files": sorted(str(path) for path in storage.rglob("*"))}


def check(site: LiveServer, response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Return the problem after checking that it is as expected and doesn't reveal internals."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert problem["code"] == code, problem
    assert problem["status"] == status
    assert problem["request_id"] == response.headers["x-request-id"]
    for inside in (*INSIDES, str(site.settings.home), TOKEN):
        assert inside not in response.text
    return problem


def post(client: httpx.Client, body: bytes | dict[str, Any], **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", "Idempotency-Key": "matrix", **headers}
    return client.post("/v1/jobs", content=content, headers=sent)


def get_raw(client: httpx.Client, path: str) -> httpx.Response:
    """Request a path exactly as written; httpx would normalize it."""
    url = client.base_url
    with closing(HTTPConnection(url.host, url.port or 80, timeout=DEADLINE_S)) as connection:
        connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
        answer = connection.getresponse()
        return httpx.Response(answer.status, headers=answer.getheaders(), content=answer.read())
