"""Download links: they work once, without a token, and only while the token with which they were
created is valid."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from ray_workers.shared.contracts import Frame
from ray_workers.shared.names import attempt_prefix
from tests.unit.api.routes.reports.test_checkpoints import STATE, saved
from tests.unit.api.serving import LiveServer, serving
from tests.unit.service.helpers import log

CONTENT = bytes(range(256)) * 8192  # two chunks
ANN = {"Authorization": "Bearer anns token"}


def line(name: str, token: str) -> str:
    return f"{name}:{hashlib.sha256(token.encode()).hexdigest()}\n"


@dataclass
class Guarded:
    """A server with tokens, and a job with a file, a checkpoint and the logs of two ranks."""

    server: LiveServer
    tokens: Path
    job_id: str
    artifact_id: str

    def ask(self, **wanted: Any) -> httpx.Response:
        path = f"/v1/jobs/{self.job_id}/downloads"
        return self.server.ask("POST", path, headers=ANN, json=wanted)

    def link(self, **wanted: Any) -> str:
        response = self.ask(**wanted)
        assert response.status_code == 201, response.text
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["location"] == response.json()["url"]
        url: str = response.json()["url"]
        return url


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("downloads")
    tokens = folder / "tokens"
    tokens.write_text(line("ann", "anns token"))
    with serving(folder / "home", tokens_file=tokens) as server:
        body = {"recipe": "image_classification", "resources": {"num_workers": 2}}
        job_id = server.ask("POST", "/v1/jobs", json=body, headers=ANN).json()["id"]
        frames: list[Frame] = [
            server.artifact(job_id, "out/the model's.bin", CONTENT),
            saved(server, job_id, 10),
            *(log(n, f"line {n}") for n in range(3)),
        ]
        server.train(job_id, *frames)
        server.hands.report(job_id, 1, [log(0, "from the other", rank=1)])
        listed = server.ask("GET", f"/v1/jobs/{job_id}/artifacts", headers=ANN).json()["items"]
        yield Guarded(server, tokens, job_id, listed[0]["id"])


def is_refused(response: httpx.Response) -> bool:
    return (response.status_code, response.json()["code"]) == (404, "download_link_not_found")


def test_it_gives_the_file_once_and_needs_no_token(site: Guarded) -> None:
    url = site.link(artifact=site.artifact_id)
    response = site.server.ask("GET", url)
    assert response.content == CONTENT
    assert response.headers["content-length"] == str(len(CONTENT))
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["accept-ranges"] == "none"
    assert response.headers["content-disposition"] == (
        "attachment; filename*=UTF-8''the%20model%27s.bin"
    )
    again = site.server.ask("GET", url)
    assert is_refused(again)
    assert "press the button again" in again.json()["hint"]


def test_what_was_cut_off_goes_on_with_another_link(site: Guarded) -> None:
    wanted = {"artifact": site.artifact_id}
    with site.server.client() as client, client.stream("GET", site.link(**wanted)) as begun:
        begin = next(begun.iter_bytes(1000))
        etag = begun.headers["etag"]
    headers = {"Range": f"bytes={len(begin)}-", "If-Range": etag}
    rest = site.server.ask("GET", site.link(**wanted), headers=headers)
    assert rest.status_code == 206
    assert begin + rest.content == CONTENT


def test_a_head_does_not_spend_it(site: Guarded) -> None:
    url = site.link(artifact=site.artifact_id)
    assert site.server.ask("HEAD", url).status_code == 405
    assert site.server.ask("GET", url).status_code == 200


def test_files_of_checkpoints_and_logs_come_by_it_too(site: Guarded) -> None:
    def content(**wanted: Any) -> bytes:
        return site.server.ask("GET", site.link(**wanted)).content

    assert content(checkpoint={"step": 10, "path": "state.pt"}) == STATE
    assert content(log={"rank": 0}) == b"line 0\nline 1\nline 2\n"
    assert content(log={"rank": 0, "attempt": 2}) == b""
    lines = content(log={}).splitlines()
    assert sorted(lines) == [
        *(b"[1:0] line %d" % n for n in range(3)),
        b"[1:1] from the other",
    ]


def test_a_file_that_is_not_whole_any_more_is_not_taken_for_it(site: Guarded) -> None:
    storage = site.server.hands.storage
    key = f"{attempt_prefix(site.job_id, 1)}/artifacts/out/the model's.bin"
    url = site.link(artifact=site.artifact_id)
    storage.write_bytes(key, CONTENT[:-1])
    try:
        listed = f"/v1/jobs/{site.job_id}/artifacts/{site.artifact_id}"
        for response in (
            site.ask(artifact=site.artifact_id),
            site.server.ask("GET", url),
            site.server.ask("GET", listed, headers=ANN),
        ):
            assert (response.status_code, response.json()["code"]) == (404, "artifact_not_found")
            assert f"its file in the storage has {len(CONTENT) - 1}" in response.json()["detail"]
    finally:
        storage.write_bytes(key, CONTENT)


@pytest.mark.parametrize(
    ("wanted", "status", "code"),
    [
        ({"artifact": "none"}, 404, "artifact_not_found"),
        ({"checkpoint": {"step": 10, "path": "../x"}}, 404, "checkpoint_not_found"),
        ({"checkpoint": {"step": 11, "path": "state.pt"}}, 404, "checkpoint_not_found"),
        ({}, 422, "invalid_document"),
        ({"artifact": "a", "log": {}}, 422, "invalid_document"),
        ({"log": {"rank": -1}}, 422, "invalid_document"),
    ],
)
def test_what_is_not_there_is_told_when_a_link_is_asked_for(
    site: Guarded, wanted: dict[str, Any], status: int, code: str
) -> None:
    response = site.ask(**wanted)
    assert (response.status_code, response.json()["code"]) == (status, code)


def test_a_link_is_made_by_a_token_and_dies_with_it(site: Guarded) -> None:
    path = f"/v1/jobs/{site.job_id}/downloads"
    assert site.server.ask("POST", path, json={"log": {}}).status_code == 401
    before = site.tokens.read_text()
    try:
        for after in (line("bob", "b"), line("ann", "another token")):
            url = site.link(log={})
            site.tokens.write_text(after)
            assert is_refused(site.server.ask("GET", url))
            site.tokens.write_text(before)
    finally:
        site.tokens.write_text(before)
