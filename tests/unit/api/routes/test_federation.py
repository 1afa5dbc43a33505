"""Clients outside the cluster: their tokens, the rounds that they see, and what they may send."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from ray_workers.shared import round_files
from ray_workers.shared.contracts import Cause, Frame, FrameKind
from ray_workers.shared.round_files import SentUpdate
from service.domain.errors import StorageUnavailable
from tests.unit.api.serving import LiveServer, serving, wait_until
from tests.wire import round_report

MODEL, FORM = b"the weights of the round" * 100, b'{"the": "form"}'
NUM_ELEMENTS = 3
UPDATE = bytes(NUM_ELEMENTS * 4)
DIGEST = hashlib.sha256(UPDATE).hexdigest()
SAID = {"sha256": DIGEST, "num_samples": 10, "num_steps": 2, "loss": 0.5}
FEDERATED = {"clients": 4, "clients_per_round": 3, "rounds": 5, "quorum": 2, "http": {}}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("federated")
    (folder / "tokens").write_text(f"ann:{digest(b'ann')}\n")
    with serving(folder / "home", tokens_file=folder / "tokens") as server:
        yield server


@dataclass
class Federated:
    """A job whose rank reports rounds, and its clients' calls."""

    server: LiveServer
    fields: dict[str, Any] = field(default_factory=dict)
    attempt: int = 1

    def __post_init__(self) -> None:
        document = {
            "recipe": "image_classification",
            "federated": {**FEDERATED, **self.fields},
        }
        response = self.server.ask("POST", "/v1/jobs", json=document, headers=bearer("ann"))
        assert response.status_code == 201, response.text
        self.job_id = response.json()["id"]
        self.server.train(self.job_id)

    def invite(self, count: int = 1) -> list[str]:
        response = self.owner("POST", "/clients", json={"clients": count})
        assert response.status_code == 201, response.text
        return [one["token"] for one in response.json()["items"]]

    def owner(self, method: str, path: str, **options: Any) -> httpx.Response:
        path = f"/v1/jobs/{self.job_id}{path}"
        return self.server.ask(method, path, headers=bearer("ann"), **options)

    def client(self, token: str, method: str, path: str, **options: Any) -> httpx.Response:
        path = f"/v1/federated/{self.job_id}{path}"
        headers = {**bearer(token), **options.pop("headers", {})}
        return self.server.ask(method, path, headers=headers, **options)

    def round(self, token: str, wait_s: float = 0.0) -> dict[str, Any]:
        response = self.client(token, "GET", f"/round?wait_s={wait_s}")
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def report(self, number: int, weights: bytes = MODEL, **changes: Any) -> str:
        """Report a round as the rank does, which writes the files first. Returns the name of the
        round."""
        name = round_files.round_name(number, digest(weights))
        prefix = round_files.rounds_prefix(self.job_id)
        storage = self.server.hands.storage
        storage.write_bytes(f"{prefix}/{name}/{round_files.MODEL}", weights)
        storage.write_bytes(f"{prefix}/{round_files.FORM}", FORM)
        fields: dict[str, Any] = {
            "number": number,
            "num_elements": NUM_ELEMENTS,
            "model_sha256": digest(weights),
            "model_size_bytes": len(weights),
            "form_sha256": digest(FORM),
            "form_size_bytes": len(FORM),
            "update_bytes": len(UPDATE),
        }
        body = json.loads(json.dumps(round_report(name, **{**fields, **changes}).body()))
        now = self.server.hands.now.timestamp()
        frame = Frame(0, 0, FrameKind.ROUND, now, body)
        self.server.hands.report(self.job_id, self.attempt, [frame])
        return name

    def put(self, token: str, name: str, content: bytes = UPDATE, part: int = 0) -> httpx.Response:
        headers = {"Content-Type": "application/octet-stream"}
        path = f"/rounds/{name}/parts/{part}"
        return self.client(token, "PUT", path, content=content, headers=headers)

    def send(self, token: str, name: str, **said: Any) -> httpx.Response:
        return self.client(token, "POST", f"/rounds/{name}/update", json={**SAID, **said})

    def sent(self, name: str) -> dict[int, SentUpdate]:
        """Return what the rank finds in the storage for a round."""
        prefix = f"{round_files.rounds_prefix(self.job_id)}/{name}/{round_files.UPDATES}"
        storage = self.server.hands.storage
        found = [
            SentUpdate.from_json(storage.read_bytes(f"{prefix}/{each}"))
            for each in storage.names(prefix)
        ]
        return {one.client: one for one in found}


@pytest.fixture
def job(guarded: LiveServer) -> Federated:
    return Federated(guarded)


def is_problem(response: httpx.Response, status: int, code: str) -> bool:
    return (response.status_code, response.json()["code"]) == (status, code)


def test_a_round_from_the_invitation_to_the_update(job: Federated) -> None:
    first, second = job.invite(2)
    assert job.round(first)["phase"] == "waiting"
    name = job.report(1)
    seen = job.round(first)
    assert (seen["phase"], seen["client"], seen["number"], seen["name"]) == ("open", 0, 1, name)
    assert job.client(first, "GET", f"/rounds/{name}/model").content == MODEL
    assert job.client(first, "GET", "/form").content == FORM
    assert job.put(first, name).status_code == 204
    assert job.sent(name) == {}, "parts are no update yet"
    assert job.send(first, name, num_val_samples=4, val_loss=0.75).status_code == 201
    assert job.sent(name) == {
        0: SentUpdate(client=0, **SAID, num_val_samples=4, val_loss=0.75)  # type: ignore[arg-type]
    }
    assert job.round(first)["phase"] == "waiting"
    assert job.round(second)["phase"] == "open"
    page = job.owner("GET", "/clients").json()
    assert (page["round"], page["is_open"], page["num_sent"]) == (1, True, 1)
    assert [(one["client"], one["num_sent"]) for one in page["items"]] == [(0, 1), (1, 0)]
    job.report(1, is_open=False)
    assert job.round(second)["phase"] == "waiting"
    job.server.succeed(job.job_id)
    assert job.round(second) == {
        **job.round(second),
        "phase": "over",
        "job_state": "SUCCEEDED",
    }


def test_who_sends_twice_counts_once(job: Federated) -> None:
    (token,) = job.invite()
    name = job.report(1)
    job.put(token, name)
    assert [job.send(token, name).status_code for _ in range(2)] == [201, 200]
    assert is_problem(job.put(token, name), 409, "update_refused")
    other = job.send(token, name, sha256="0" * 64)
    assert is_problem(other, 409, "update_refused")
    assert job.sent(name)[0].sha256 == DIGEST
    assert job.owner("GET", "/clients").json()["items"][0]["num_sent"] == 1


def test_an_update_that_the_storage_did_not_take_is_sent_again(
    job: Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the service dies between recording the update and writing the file."""
    (token,) = job.invite()
    name = job.report(1)
    job.put(token, name)
    storage = job.server.context.runtime.storage
    with monkeypatch.context() as failing:

        def fail(*_: Any) -> None:
            raise StorageUnavailable("the disk is gone")

        failing.setattr(storage, "write_bytes", fail)
        assert job.send(token, name).status_code == 503
    assert job.sent(name) == {}
    assert job.send(token, name).status_code == 200
    assert job.sent(name)[0].sha256 == DIGEST


def test_a_client_that_comes_back_late_is_told_and_goes_on(job: Federated) -> None:
    (token,) = job.invite()
    name = job.report(1)
    job.put(token, name)
    now_open = job.report(2, b"other weights")
    for response in (
        job.put(token, name),
        job.send(token, name),
        job.client(token, "GET", f"/rounds/{name}/model"),
    ):
        assert is_problem(response, 409, "round_over")
        assert now_open in response.json()["detail"]
    assert job.round(token)["name"] == now_open


def test_a_client_that_is_not_asked_waits_until_all_are(job: Federated) -> None:
    asked, other = job.invite(2)
    name = job.report(1, clients=[0, 2, 3])
    assert (job.round(asked)["phase"], job.round(other)["phase"]) == ("open", "waiting")
    assert is_problem(job.put(other, name), 409, "update_refused")
    job.report(1, clients=None)
    assert job.round(other)["phase"] == "open"


def test_a_wait_ends_when_a_round_opens(job: Federated) -> None:
    (token,) = job.invite()
    found: list[dict[str, Any]] = []
    waiting = threading.Thread(target=lambda: found.append(job.round(token, wait_s=30.0)))
    waiting.start()
    signals = job.server.context.runtime.signals
    wait_until(lambda: signals._subscribers.get(f"{job.job_id}/rounds"), "the client to wait")
    job.report(1)
    waiting.join(20.0)
    assert found[0]["phase"] == "open"


@pytest.mark.parametrize(
    ("content", "part", "status", "code"),
    [
        (UPDATE + b"x", 0, 413, "body_too_large"),
        (UPDATE[:-1], 0, 422, "bad_update"),
        (UPDATE, 1, 422, "bad_update"),
    ],
)
def test_a_part_that_does_not_fit_the_model_is_refused(
    job: Federated, content: bytes, part: int, status: int, code: str
) -> None:
    (token,) = job.invite()
    name = job.report(1)
    assert is_problem(job.put(token, name, content, part), status, code)
    missing = job.send(token, name)
    assert is_problem(missing, 422, "bad_update")
    assert "part 0" in missing.json()["detail"]
    assert job.sent(name) == {}


@pytest.mark.parametrize(
    ("said", "pointer"),
    [
        ({"num_samples": 0}, "/num_samples"),
        ({"loss": "NaN"}, "/loss"),
        ({"val_loss": True}, "/val_loss"),
        ({"sha256": "x"}, "/sha256"),
        ({"client": 3}, "/client"),
    ],
)
def test_numbers_that_can_not_be_are_refused(
    job: Federated, said: dict[str, Any], pointer: str
) -> None:
    (token,) = job.invite()
    name = job.report(1)
    job.put(token, name)
    response = job.send(token, name, **said)
    assert is_problem(response, 422, "invalid_document")
    assert response.json()["pointer"] == pointer


def test_a_restart_asks_again_for_what_is_not_in_the_storage(job: Federated) -> None:
    here, lost = job.invite(2)
    name = job.report(1)
    for token in (here, lost):
        job.put(token, name)
        job.send(token, name)
    job.server.hands.end(job.job_id, 1, Cause.NODE_LOST, "gone")
    assert job.round(lost)["phase"] == "waiting", "no attempt lives"
    assert is_problem(job.put(lost, name), 409, "round_over")
    assert job.server.hands.claim(job.job_id, 1) is not None
    job.attempt = 2
    job.report(1, received=[0])
    assert (job.round(here)["phase"], job.round(lost)["phase"]) == ("waiting", "open")


def test_no_more_are_invited_than_the_document_has(job: Federated) -> None:
    job.invite(3)
    refused = job.owner("POST", "/clients", json={"clients": 2})
    assert is_problem(refused, 409, "too_many_clients")
    assert "is 4, and 3" in refused.json()["detail"]
    assert job.owner("DELETE", "/clients/1").status_code == 204
    assert is_problem(job.owner("DELETE", "/clients/1"), 404, "client_not_found")
    assert [one["client"] for one in job.owner("GET", "/clients").json()["items"]] == [0, 2]
    job.invite(2)


def test_a_call_invites_1000_clients_at_most_and_others_are_answered_meanwhile(
    guarded: LiveServer,
) -> None:
    job = Federated(guarded, {"clients": 2100, "clients_per_round": 3})
    other = Federated(guarded)
    refused = job.owner("POST", "/clients", json={"clients": 1001})
    assert is_problem(refused, 422, "invalid_document")
    assert refused.json()["pointer"] == "/clients"
    assert "1000" in refused.text
    assert job.owner("GET", "/clients").json()["items"] == []
    answered, over = list[float](), threading.Event()

    def ask() -> None:
        while not over.is_set():
            assert other.owner("GET", "").status_code == 200
            answered.append(time.monotonic())

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: bool(answered), "an answer")
    begun = time.monotonic()
    tokens = [*job.invite(1000), *job.invite(1000)]
    ended = time.monotonic()
    over.set()
    asking.join()
    assert len({*tokens}) == 2000
    assert [one["client"] for one in job.owner("GET", "/clients").json()["items"]] == [*range(2000)]
    assert job.round(tokens[1999])["client"] == 1999
    during = [at for at in answered if begun < at < ended]
    assert during, "nothing else was answered"
    refused = job.owner("POST", "/clients", json={"clients": 101})
    assert is_problem(refused, 409, "too_many_clients")


def test_only_jobs_with_clients_outside_have_any(guarded: LiveServer) -> None:
    headers = bearer("ann")
    made = guarded.ask("POST", "/v1/jobs", json={"recipe": "image_classification"}, headers=headers)
    path = f"/v1/jobs/{made.json()['id']}/clients"
    assert is_problem(guarded.ask("GET", path, headers=headers), 409, "not_federated")
    assert is_problem(guarded.ask("POST", path, headers=headers, json={}), 409, "not_federated")


def test_a_revoked_token_is_refused_and_its_hash_is_none(job: Federated) -> None:
    (token,) = job.invite()
    assert job.round(token)["phase"] == "waiting"
    assert is_problem(job.client(digest(token.encode()), "GET", "/round"), 401, "unauthorized")
    job.owner("DELETE", "/clients/0")
    assert is_problem(job.client(token, "GET", "/round"), 401, "unauthorized")


def test_a_token_is_in_no_table(job: Federated) -> None:
    (token,) = job.invite()
    dump = Path(job.server.settings.home, "dray.db").read_bytes()
    assert token.encode() not in dump


def every_call(server: LiveServer) -> Iterator[tuple[str, str]]:
    """Yield (method, path) of all operations except those for clients."""
    for path, calls in server.app.openapi()["paths"].items():
        for method in calls:
            if not path.startswith("/v1/federated/"):
                yield method.upper(), path


OPEN = {"/healthz", "/readyz", "/v1/schema", "/v1/downloads/{secret}"}


def test_the_token_of_a_client_does_nothing_else(job: Federated, server: LiveServer) -> None:
    """Neither on this server, nor on a server without tokens, nor in the rounds of another job."""
    (token,) = job.invite()
    other = Federated(job.server)
    name = other.report(1)
    for method, path in (
        *(("GET", "/round"), ("GET", "/form"), ("GET", f"/rounds/{name}/model")),
        *(("PUT", f"/rounds/{name}/parts/0"), ("POST", f"/rounds/{name}/update")),
    ):
        assert is_problem(other.client(token, method, path), 401, "unauthorized")
    calls = [*every_call(server)]
    assert len(calls) > 60
    for site in (job.server, server):
        with site.client(headers=bearer(token)) as http:
            for method, path in calls:
                response = http.request(method, re.sub(r"\{job_id\}", job.job_id, path))
                if path not in OPEN:
                    assert response.status_code == 403, (method, path, response.text)


def test_the_token_of_a_user_is_none_of_a_client(job: Federated) -> None:
    job.report(1)
    assert is_problem(job.client("ann", "GET", "/round"), 401, "unauthorized")
    bare = job.server.ask("GET", f"/v1/federated/{job.job_id}/round")
    assert is_problem(bare, 401, "unauthorized")


def test_a_rank_without_such_clients_reports_no_round(job: Federated) -> None:
    headers = bearer("ann")
    plain = job.server.ask(
        "POST", "/v1/jobs", json={"recipe": "image_classification"}, headers=headers
    ).json()["id"]
    job.server.train(plain)
    job.job_id, of_job = plain, job.job_id
    job.report(1)
    events = job.server.ask("GET", f"/v1/jobs/{plain}/events", headers=headers).json()["items"]
    assert "frames_refused" in {event["type"] for event in events}
    job.job_id = of_job
