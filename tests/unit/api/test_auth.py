from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.auth import BadTokensFile, is_loopback, load_tokens
from service.runtime import Readiness
from tests.unit.api.serving import LiveServer, serving

JOB = {"recipe": "image_classification"}


def hashed(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("guarded")
    tokens = folder / "tokens"
    tokens.write_text(f"# who\nann:{hashed('annas secret')}\nbob:{hashed('b')}  # a comment\n\n")
    with serving(folder / "home", tokens_file=tokens) as server:
        yield server


def test_a_call_without_a_token_is_challenged(guarded: LiveServer) -> None:
    response = guarded.ask("GET", "/v1/jobs")
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == 'Bearer realm="dray"'
    assert response.json()["code"] == "unauthorized"


@pytest.mark.parametrize("value", ["Bearer wrong", "Basic YW5uYTp4", "Bearer", "bearer", "x"])
def test_a_wrong_token_is_refused(guarded: LiveServer, value: str) -> None:
    response = guarded.ask("GET", "/v1/jobs", headers={"Authorization": value})
    assert response.status_code == 401


def test_the_hash_of_a_token_is_no_token(guarded: LiveServer) -> None:
    headers = {"Authorization": f"Bearer {hashed('b')}"}
    assert guarded.ask("GET", "/v1/jobs", headers=headers).status_code == 401


def test_a_stranger_is_not_told_what_is_wrong_with_the_request(guarded: LiveServer) -> None:
    assert guarded.ask("GET", "/v1/jobs?limit=x").status_code == 401
    assert guarded.ask("POST", "/v1/jobs", content=b"{").status_code == 401


def test_a_job_belongs_to_whose_token_it_was(guarded: LiveServer) -> None:
    headers = {"Authorization": "Bearer annas secret"}
    response = guarded.ask("POST", "/v1/jobs", json=JOB, headers=headers)
    assert (response.status_code, response.json()["owner"]) == (201, "ann")


def test_health_is_open_and_prometheus_is_not(guarded: LiveServer) -> None:
    assert guarded.ask("GET", "/healthz").status_code == 200
    assert guarded.ask("GET", "/readyz").status_code == 200
    assert guarded.ask("GET", "/metrics").status_code == 401


def test_what_is_wrong_with_a_part_is_told_to_those_with_a_token(
    guarded: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ready() -> Readiness:
        return Readiness(False, {"database": "ok", "cluster": "no route to 10.0.0.7"})

    monkeypatch.setattr(guarded.context.runtime, "ready", ready)
    strangers = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic Yg=="})
    for headers in strangers:
        answer = guarded.ask("GET", "/readyz", headers=headers)
        assert answer.status_code == 503
        assert answer.json()["checks"] == {"database": "ok", "cluster": "not ok"}
    known = guarded.ask("GET", "/readyz", headers={"Authorization": "Bearer b"}).json()
    assert known["checks"]["cluster"] == "no route to 10.0.0.7"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ann", "line 1"),
        (f"ann:{hashed('x')}\nann:{hashed('y')}", "line 2"),
        ("ann:plain-text-token", "line 1"),
        ("# nobody\n", "names nobody"),
    ],
)
def test_a_tokens_file_that_is_wrong_is_refused_at_the_start(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(BadTokensFile, match=said):
        load_tokens(path)


def test_a_missing_tokens_file_does_not_open_the_server(tmp_path: Path) -> None:
    with pytest.raises(BadTokensFile, match="can't be read"):
        load_tokens(tmp_path / "none")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
        ("", False),
    ],
)
def test_only_addresses_of_this_machine_are_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
