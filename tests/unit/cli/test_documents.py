"""Commands that help with writing a job document, and their output if there is no document."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

import dray
from dray.client import Client
from dray.spec.authoring.describing import job_schema
from dray.spec.authoring.starting import KINDS
from tests.unit.api.serving import LiveServer
from tests.unit.cli.running import Cli


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_to_begin_with_is_written_and_is_a_job(
    cli: Cli, kind: str, tmp_path: Path, server: LiveServer
) -> None:
    path = tmp_path / "job.yaml"
    assert "submit it with" in cli("init", kind, "-o", str(path))
    assert f"$schema={server.url}/v1/schema\n" in path.read_text()
    assert "describes a job" in cli("submit", str(path), "--dry-run")
    assert cli("init", kind, "-o", "-", "--schema", "x").startswith(
        "# yaml-language-server: $schema=x\n"
    )


def test_a_document_that_is_there_is_not_overwritten_unasked(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("mine")
    cli("init", "-o", str(path), exits=2)
    assert "already exists" in cli.err
    assert path.read_text() == "mine"
    cli("init", "-o", str(path), "--force")
    assert dray.load_spec(path).recipe == "image_classification"
    cli("init", "image_clasification", "-o", "-", exits=2)
    assert "is not one of image_classification" in cli.err


def test_a_document_for_a_script_names_it_and_its_folder(
    cli: Cli, server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "lin.py").write_text("print(1)\n")
    cli("init", "nets/lin.py")
    document = yaml.safe_load((tmp_path / "job.yaml").read_text())
    assert document["name"] == "lin"
    assert document["script"] == {"entrypoint": "nets/lin.py", "args": [], "code": "."}
    spec = dray.load_spec("job.yaml")
    assert spec.script is not None
    assert str(spec.script.code).startswith("code-")
    assert "job.yaml describes a job: nets/lin.py on 1 worker" in cli(
        "submit", "job.yaml", "--dry-run"
    )
    by_cli = cli("submit", "job.yaml").split()[0]
    by_sdk = Client(server.url).submit("job.yaml").id
    for job_id in (by_cli, by_sdk):
        assert {file["path"] for file in cli.json("code", job_id)} == {"job.yaml", "nets/lin.py"}
    cli("init", "gone.py", "--force", exits=2)
    assert "there is no file gone.py" in cli.err


@pytest.mark.parametrize(
    ("where", "output", "entrypoint", "code"),
    [
        ("project", "conf/job.yaml", "lin.py", ".."),
        ("elsewhere", "job.yaml", "lin.py", "../project"),
        (".", "job.yaml", "project/lin.py", "."),
        (".", "project/conf/job.yaml", "project/lin.py", "../.."),
    ],
)
def test_paths_of_a_document_begin_at_its_own_folder(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    output: str,
    entrypoint: str,
    code: str,
) -> None:
    for folder in ("project/conf", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "project" / "lin.py").write_text("print(1)\n")
    monkeypatch.chdir(tmp_path / where)
    script = os.path.relpath(tmp_path / "project" / "lin.py")
    cli("init", script, "-o", output)
    document = yaml.safe_load(Path(output).read_text())
    assert document["script"] == {"entrypoint": entrypoint, "args": [], "code": code}
    monkeypatch.chdir("/")
    assert "lin.py\n" in cli("submit", str(tmp_path / where / output), "--dry-run")


def test_the_schema_is_printed_and_served_without_a_token(cli: Cli, server: LiveServer) -> None:
    assert json.loads(cli("schema")) == job_schema()
    answer = server.ask("GET", "/v1/schema")
    assert answer.json() == job_schema()
    assert answer.headers["content-type"] == "application/schema+json"


def test_numbers_on_the_command_line_may_have_units(cli: Cli, server: LiveServer) -> None:
    job_id = server.submit()
    cli("wait", job_id, "--timeout", "0.1", exits=5)
    for wrong in ("2x", "-1", "nan"):
        cli("wait", job_id, "--timeout", wrong, exits=2)
        assert "Traceback" not in cli.err
    cli("wait", job_id, "--timeout", "1h", "--state", "QUEUED")
