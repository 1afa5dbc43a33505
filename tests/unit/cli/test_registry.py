"""Registered models over HTTP, with both clients and on the command line."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import dray
from dray import errors
from tests.unit.api.routes.reports.test_checkpoints import saved
from tests.unit.api.serving import LiveServer, serving
from tests.unit.cli.running import Cli
from tests.unit.service.helpers import metrics

TOKENS = {"ann": "a" * 20, "bob": "b" * 20, "root": "r" * 20}


def done(server: LiveServer, name: str = "digits", steps: tuple[int, ...] = (10,)) -> str:
    """Return a job that succeeded with a result and checkpoints."""
    job_id = server.submit(name=name, data={"source": "sklearn://digits"})
    server.train(
        job_id,
        metrics(10, {"val/accuracy": 0.9}, total_steps=10),
        *(saved(server, job_id, step) for step in steps),
        server.artifact(job_id, "model.safetensors", b"weights"),
    )
    server.succeed(job_id)
    return job_id


def test_a_result_is_registered_used_and_deleted(
    server: LiveServer, cli: Cli, tmp_path: Path
) -> None:
    job_id = done(server)
    card = tmp_path / "card.md"
    card.write_text("# Digits\n")
    made = cli("model", "register", job_id, "Zahlen", "--alias", "best", "--card", str(card))
    assert made == "model://Zahlen@1\n"
    assert cli("model", "register", job_id, "zahlen") == "model://Zahlen@1\n", "registered once"
    second = done(server, "second")
    assert cli("model", "register", second, "zahlen") == "model://Zahlen@2\n"
    assert "Zahlen@best is version 2" in cli("model", "alias", "Zahlen@2", "best", "--from", "1")
    cli("model", "alias", "Zahlen@1", "best", "--from", "7", exits=3)
    assert "refers to version 2" in cli.err
    listed = next(m for m in cli.json("model", "ls") if m["name"] == "Zahlen")
    assert (listed["latest_version"], listed["aliases"]) == (2, {"best": 2})
    moves = cli.json("model", "show", "Zahlen", "--moves")
    assert [(m["from_version"], m["to_version"]) for m in moves] == [(1, 2), (None, 1)]
    assert [v["version"] for v in cli.json("model", "show", "Zahlen")] == [2, 1]
    shown = cli("model", "show", "Zahlen@1")
    assert "# Digits" in shown
    assert hashlib.sha256(b"weights").hexdigest() in shown
    assert "data: sklearn://digits" in shown
    cli("model", "card", "Zahlen@1", str(card))
    cli("model", "download", "zahlen@best", str(tmp_path / "files"))
    assert (tmp_path / "files" / "model.safetensors").read_bytes() == b"weights"
    cli("delete", "--yes", job_id, exits=3)
    assert "model://Zahlen@1 is its result" in cli.err
    cli("model", "rm", "Zahlen@2", exits=3)
    assert "the alias 'best' refers to version 2" in cli.err
    cli("model", "unalias", "Zahlen", "best")
    cli("model", "rm", "Zahlen@2")
    assert cli("model", "register", second, "Zahlen") == "model://Zahlen@3\n", "2 is not used again"
    cli("model", "rm", "Zahlen")
    cli("model", "show", "Zahlen@1", exits=3)
    assert cli("model", "register", second, "Zahlen") == "model://Zahlen@4\n"
    cli("model", "rm", "Zahlen")
    cli("delete", "--yes", job_id)


def test_a_job_starts_from_the_version_that_the_alias_named_at_submission(
    server: LiveServer,
) -> None:
    with dray.Client(server.url) as client:
        first, second = done(server, steps=(10, 20)), done(server)
        client.register_model("start", first, step=10, aliases=["production"])
        client.register_model("start", second)
        job = client.submit(
            {
                "recipe": "image_classification",
                "data": {"source": "sklearn://digits"},
                "init_from": "model://Start@production",
            }
        )
        client.set_model_alias("start", "production", 2)
        asked = client.get(job.id).spec["init_from"]
        assert asked["job"] == first
        assert asked["step"] == 10
        assert asked["model"] == "model://start@1"
        again = client.submit(client.get(job.id).spec)
        assert again.spec["init_from"] == asked, "a document that is submitted again"
        for each in (job, again):
            assert server.hands.claim(each.id).init_from.step == 10  # type: ignore[union-attr]
            server.succeed(each.id)
        with pytest.raises(errors.Unprocessable, match="no alias 'nobody'") as caught:
            client.submit({"recipe": "image_classification", "init_from": "model://start@nobody"})
        assert caught.value.problem.pointer == "/init_from/model"
        with pytest.raises(errors.CheckpointInUse, match="model://start@1"):
            client.delete(first)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("registry")
    lines = [
        f"{name}:{hashlib.sha256(token.encode()).hexdigest()}{':admin' if name == 'root' else ''}"
        for name, token in TOKENS.items()
    ]
    (folder / "tokens").write_text("\n".join(lines))
    with serving(folder / "home", tokens_file=folder / "tokens") as server:
        yield server


def test_others_read_but_do_not_change_a_model(guarded: LiveServer) -> None:
    def ask(user: str, method: str, path: str, **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {TOKENS[user]}"}
        return guarded.ask(method, f"/v1/models{path}", headers=headers, json=body or None)

    headers = {"Authorization": f"Bearer {TOKENS['ann']}"}
    document = {"recipe": "image_classification"}
    job_id = guarded.ask("POST", "/v1/jobs", json=document, headers=headers).json()["id"]
    guarded.train(job_id, guarded.artifact(job_id, "model.bin", b"abc"))
    guarded.succeed(job_id)
    assert ask("ann", "POST", "", name="ours", job=job_id).status_code == 201
    assert ask("ann", "POST", "", name="ours", job=job_id).status_code == 200
    assert ask("bob", "GET", "/ours/versions/1").json()["created_by"] == "ann"
    for method, path, body in [
        ("POST", "", {"name": "OURS", "job": job_id}),
        ("PUT", "/ours/aliases/best", {"version": 1}),
        ("DELETE", "/ours/aliases/best", {}),
        ("PATCH", "/ours/versions/1", {"card": "x"}),
        ("DELETE", "/ours/versions/1", {}),
        ("DELETE", "/ours", {}),
    ]:
        answer = ask("bob", method, path, **body)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), (method, path)
    for method, path, body, status in [
        ("PUT", "/ours/aliases/best", {"version": 2}, 404),
        ("PUT", "/ours/aliases/Best", {"version": 1}, 422),
        ("PUT", "/ours/aliases/best", {"version": 10**30}, 422),
        ("PUT", "/ours/aliases/best", {"version": True}, 422),
        ("GET", "/ours/versions/99999999999999999999", {}, 404),
        ("GET", "/none", {}, 404),
        ("DELETE", "/ours/versions/latest", {}, 422),
        ("POST", "", {"name": "a/b", "job": job_id}, 422),
        ("POST", "", {"name": "x", "job": job_id, "aliases": ["3"]}, 422),
        ("GET", "?cursor=x", {}, 400),
    ]:
        answer = ask("ann", method, path, **body)
        assert answer.status_code == status, (method, path, answer.text)
    assert ask("root", "PUT", "/ours/aliases/best", version=1).status_code == 200
    moves = ask("bob", "GET", "/ours/moves").json()["items"]
    assert [one["moved_by"] for one in moves] == ["root"]
    assert [one["name"] for one in ask("bob", "GET", "").json()["items"]] == ["ours"]


def test_a_registered_result_is_loaded(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAY_URL", server.url)
    job_id = done(server)
    with dray.Client(server.url) as client:
        client.register_model("loaded", job_id, aliases=["production"])
        client.register_model("loaded", job_id, step=10, aliases=["half"])

    def read(folder: str, *, device: str) -> tuple[bytes, str]:
        return Path(folder, "model.safetensors").read_bytes(), device

    monkeypatch.setattr("ray_workers.recipes.load", read)
    assert dray.load("model://loaded@production", device="meta") == (b"weights", "meta")
    with pytest.raises(ValueError, match="model://loaded@2 is a checkpoint"):
        dray.load("model://loaded@half")
    with pytest.raises(errors.ModelVersionNotFound):
        dray.load("model://loaded@7")
