from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dray.home_token import is_loopback
from service.config.tokens_file import BadTokensFile, load_tokens
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


def test_what_needs_no_token_is_what_the_docs_say(guarded: LiveServer) -> None:
    paths = guarded.app.openapi()["paths"]
    asked = {path: guarded.ask(next(iter(calls)).upper(), path) for path, calls in paths.items()}
    opened = {path for path, answer in asked.items() if answer.status_code != 401}
    assert opened == {"/healthz", "/readyz", "/v1/schema", "/v1/downloads/{secret}"}
    (said,) = re.findall(r"each call needs [^.]*\.", Path("docs/guides/http.md").read_text())
    assert opened == set(re.findall("`(/[^`]*)`", said))


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
        ("# nobody\n", "lists no callers"),
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


@pytest.fixture
def changing(tmp_path: Path) -> Iterator[tuple[LiveServer, Path]]:
    """A server and its tokens file, which has tokens for ann and bob."""
    tokens = tmp_path / "tokens"
    tokens.write_text(f"ann:{hashed('a')}\nbob:{hashed('b')}\n")
    with serving(tmp_path / "home", tokens_file=tokens) as server:
        yield server, tokens


def status(server: LiveServer, token: str) -> int:
    headers = {"Authorization": f"Bearer {token}"}
    return server.ask("GET", "/v1/jobs", headers=headers).status_code


def test_a_change_of_the_tokens_holds_from_the_next_request_on(
    changing: tuple[LiveServer, Path],
) -> None:
    server, tokens = changing
    assert [status(server, token) for token in "abc"] == [200, 200, 401]
    tokens.write_text(f"ann:{hashed('a')}\ncat:{hashed('c')}\n")
    assert [status(server, token) for token in "abc"] == [200, 401, 200]
    tokens.write_text(f"bob:{hashed('b')}\ncat:{hashed('c')}\n")  # the file's size doesn't change
    assert [status(server, token) for token in "abc"] == [401, 200, 200]


def test_a_mistake_in_the_tokens_spoils_its_own_line_alone(
    changing: tuple[LiveServer, Path], caplog: pytest.LogCaptureFixture
) -> None:
    server, tokens = changing
    tokens.write_text(f"bob {hashed('b')}\nann:{hashed('a')}\nann:{hashed('c')}\n")
    assert [status(server, token) for token in "abc"] == [200, 401, 401]
    assert "line 1: write name:sha256-of-the-token" in caplog.text


def test_without_the_tokens_file_nobody_is_let_in(changing: tuple[LiveServer, Path]) -> None:
    server, tokens = changing
    text = tokens.read_text()
    tokens.unlink()
    assert status(server, "a") == 503
    assert server.ask("GET", "/readyz").status_code == 200
    tokens.write_text("")
    assert status(server, "a") == 401
    tokens.write_text(text)
    assert status(server, "a") == 200


def test_a_stream_ends_with_its_token(changing: tuple[LiveServer, Path]) -> None:
    server, tokens = changing
    headers = {"Authorization": "Bearer b", "Accept": "text/event-stream"}
    with server.client(headers=headers) as client:
        job_id = client.post("/v1/jobs", json=JOB).json()["id"]
        with client.stream("GET", f"/v1/jobs/{job_id}/events") as stream:
            lines = stream.iter_lines()
            next(lines)
            tokens.write_text(f"ann:{hashed('a')}\n")
            for _ in lines:
                pass
    assert server.context.runtime.signals._subscribers == {}


def test_who_did_something_to_a_job_is_in_its_events_and_in_the_log(
    guarded: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ann, bob = ({"Authorization": f"Bearer {token}"} for token in ("annas secret", "b"))
    job_id = guarded.ask("POST", "/v1/jobs", json=JOB, headers=ann).json()["id"]
    guarded.ask("POST", f"/v1/jobs/{job_id}/cancel", headers=bob)
    guarded.ask("POST", f"/v1/jobs/{job_id}/cancel", headers=ann)  # it is already cancelled
    events = guarded.ask("GET", f"/v1/jobs/{job_id}/events", headers=ann).json()["items"]
    assert [(event["code"], event["actor"]) for event in events] == [
        ("submitted", "ann"),
        ("cancelled_by_user", "bob"),
    ]
    assert "actor" not in events[0]["data"]
    assert guarded.ask("DELETE", f"/v1/jobs/{job_id}", headers=ann).status_code == 204
    told = [
        record.getMessage()
        for record in caplog.records
        if record.name in ("service.jobs.service", "service.jobs.deletions")
    ]
    assert told == [
        f"the job {job_id} was cancelled by bob",
        f"the job {job_id} was deleted by ann",
    ]


def test_who_drills_or_preempts_is_in_the_events_and_anonymous_without_tokens(
    server: LiveServer,
) -> None:
    job_id = server.trains()
    server.ask("POST", f"/v1/jobs/{job_id}/drill", json={"kind": "kill"})
    server.ask("POST", f"/v1/jobs/{job_id}/preempt")
    events = server.ask("GET", f"/v1/jobs/{job_id}/events").json()["items"]
    actors = {event["code"]: event["actor"] for event in events}
    caused = ("submitted", "drill_waiting", "preempt_asked")
    assert {code for code, actor in actors.items() if actor is not None} == set(caused)
    assert {actors[code] for code in caused} == {"anonymous"}
