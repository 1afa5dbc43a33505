"""Registered models over HTTP, with both clients and on the command line."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

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
