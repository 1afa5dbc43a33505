"""Setting a job's packages and variables with command-line options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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


def test_the_packages_of_a_programs_folder_come_along(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "requirements.txt").write_bytes(b"\xef\xbb\xbfeinops>=0.8\ntqdm\n")
    monkeypatch.chdir(tmp_path)
    job = json.loads(cli("submit", "--json", "--", "train.py"))
    assert job["spec"]["environment"]["requirements"] == "einops>=0.8\ntqdm\n"
    assert "2 packages from requirements.txt will be installed" in cli.err
    job = json.loads(cli("submit", "--json", "--no-packages", "--", "train.py"))
    assert job["spec"].get("environment") is None
    (tmp_path / "other.txt").write_text("numpy\n")
    job = json.loads(cli("submit", "--json", "--requirements", "other.txt", "--", "train.py"))
    assert job["spec"]["environment"]["requirements"] == "numpy\n"
    (tmp_path / "requirements.txt").write_text("-r other.txt\n")
    job = json.loads(cli("submit", "--json", "--", "train.py"))
    assert job["spec"].get("environment") is None
    assert "no packages will be installed for the job: requirements.txt: -r names a file" in cli.err


def test_guesses_are_switched_off_by_an_option(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    monkeypatch.chdir(tmp_path)
    job = json.loads(cli("submit", "--json", "--no-guesses", "--", "train.py"))
    assert job["spec"]["script"]["guesses"] is False
