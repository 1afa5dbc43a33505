"""Data sources that no user is allowed to read: the API returns 403 and stores nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.unit.api.serving import LiveServer, serving


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server with tokens, on which data are in /srv/data."""
    home = tmp_path_factory.mktemp("guarded")
    tokens = home / "tokens"
    tokens.write_text(f"ann:{hashlib.sha256(b'annas secret').hexdigest()}\n")
    with (
        serving(home / "home", tokens_file=tokens, data_roots=("/srv/data",)) as server,
        server.client(headers={"Authorization": "Bearer annas secret"}) as client,
    ):
        yield client


def table(source: str) -> dict[str, Any]:
    data = {"source": source, "format": "csv", "target": "y"}
    return {"recipe": "tabular_classification", "data": data}


@pytest.mark.parametrize(
    "source",
    [
        "http://169.254.169.254/latest/meta-data/iam",
        "http://127.0.0.1:8420/v1/jobs",
        "http://0x7f.1/t.csv",
        "https://localhost/t.csv",
        "http://[fd00:ec2::254]/t.csv",
        "file:///etc/passwd",
        "file:///srv/data/%2e%2e/keys.csv",
    ],
)
def test_a_forbidden_source_is_403_and_stores_nothing(source: str, guarded: httpx.Client) -> None:
    answered = guarded.post("/v1/jobs", json=table(source))
    assert answered.status_code == 403
    problem = answered.json()
    assert (problem["code"], problem["pointer"]) == ("data_source_forbidden", "/data/source")
    assert problem["hint"]
    assert guarded.get("/v1/jobs").json()["items"] == []


@pytest.mark.parametrize(
    "source", ["file:///srv/data/t%00.csv", "https://example.org\\@10.0.0.1/t.csv", "s3://a\\b/t"]
)
def test_a_source_that_can_not_exist_is_422_and_stores_nothing(
    source: str, guarded: httpx.Client
) -> None:
    answered = guarded.post("/v1/jobs", json=table(source))
    assert answered.status_code == 422
    assert answered.json()["pointer"] == "/data/source"
    assert guarded.get("/v1/jobs").json()["items"] == []


def test_a_source_within_the_folders_is_taken(guarded: httpx.Client) -> None:
    answered = guarded.post("/v1/jobs", json=table("file:///srv/data/t.csv"))
    assert answered.status_code == 201


def test_without_tokens_any_file_may_be_named(server: LiveServer, http: httpx.Client) -> None:
    assert http.post("/v1/jobs", json=table("file:///etc/t.csv")).status_code == 201
