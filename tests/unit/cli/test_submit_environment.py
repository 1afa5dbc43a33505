"""Packages and variables of a job by options of the command line."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.cli.running import Cli


def test_a_requirements_file_and_variables_come_along(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "requirements.txt").write_text("einops>=0.8\n# why not\n")
    document = tmp_path / "job.json"
    first = {"script": {"entrypoint": "train.py"}, "environment": {"env": {"A": "1", "B": "2"}}}
    document.write_text(json.dumps(first))
    words = ["--requirements", str(tmp_path / "requirements.txt"), "--env", "B=x=y"]
    job = json.loads(cli("submit", "--json", *words, str(document)))
    found = job["spec"]["environment"]
    assert found["requirements"] == "einops>=0.8\n# why not\n"
    assert found["env"] == {"A": "1", "B": "x=y"}


def test_a_mistake_in_the_options_sends_nothing(cli: Cli, tmp_path: Path) -> None:
    document, before = tmp_path / "job.json", cli.json("ls")
    document.write_text(json.dumps({"script": {"entrypoint": "train.py"}}))
    cli("submit", str(document), "--env", "NAME", exits=2)
    assert "NAME=VALUE" in cli.err
    cli("submit", str(document), "--requirements", str(tmp_path / "none.txt"), exits=2)
    assert "can't be read" in " ".join(cli.err.split())
    cli("submit", str(document), "--env", "RANK=3", exits=2)
    assert "set by dray itself" in cli.err
    assert cli.json("ls") == before
