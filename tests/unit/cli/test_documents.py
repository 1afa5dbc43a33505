"""Commands that help to write a job document, and what is said where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dray
from dray.spec.authoring.schema import job_schema
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
    assert "is a job" in cli("submit", str(path), "--dry-run")
    assert cli("init", kind, "-o", "-", "--schema", "x").startswith(
        "# yaml-language-server: $schema=x\n"
    )


def test_a_document_that_is_there_is_not_overwritten_unasked(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("mine")
    cli("init", "-o", str(path), exits=2)
    assert "is there already" in cli.err
    assert path.read_text() == "mine"
    cli("init", "-o", str(path), "--force")
    assert dray.load_spec(path).recipe == "image_classification"
    cli("init", "image_clasification", "-o", "-", exits=2)
    assert "is none of image_classification" in cli.err


def test_a_document_for_a_script_of_the_node_is_written(cli: Cli, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    path = tmp_path / "job.yaml"
    cli("init", str(script), "-o", str(path))
    spec = dray.load_spec(path)
    assert spec.script is not None
    assert spec.script.entrypoint == str(script)


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
