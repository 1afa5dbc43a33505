"""What changed between two jobs, and lineages, on the command line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dray.cli.commands.changes import patch_of
from dray.views import FileDiff
from tests.unit.api.serving import LiveServer
from tests.unit.cli.running import Cli


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a clean work tree of Git with a program."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "train.py").write_text(f"# of {tmp_path}\nlr = 0.1\r\nprint(lr)\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for command in (("init", "-q", "-b", "main"), ("add", "-A"), ("commit", "-qm", "first")):
        subprocess.run(["git", "-C", str(root), *identity, *command], check=True)
    monkeypatch.chdir(root)
    return root


def head(folder: Path) -> str:
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_job_records_its_commit_and_what_changed_is_shown(cli: Cli, folder: Path) -> None:
    first = cli("submit", "--name", "clean", "--", "train.py").split()[0]
    git = cli.json("get", first)["spec"]["origin"]["git"]
    assert git == {"commit": head(folder), "dirty": False, "branch": "main"}
    text = (folder / "train.py").read_bytes()
    (folder / "train.py").write_bytes(text.replace(b"0.1", b"0.2"))
    (folder / "new file").write_text("new\n")
    second = cli("submit", "--name", "changed", "--workers", "2", "--", "train.py").split()[0]
    assert cli.json("get", second)["spec"]["origin"]["git"]["dirty"]
    shown = cli("diff", first, second)
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "resources.num_workers 1 2" in lines
    assert f"commit {head(folder)[:12]} {head(folder)[:12]} with uncommitted changes" in lines
    assert "code: 2 files differ" in lines
    assert "train.py changed, +1 -1" in lines
    assert "new file added, +1 -0" in lines
    assert "are unknown" in shown
    patch = cli("diff", first, second, "--code")
    (folder / "train.py").write_bytes(text)
    (folder / "new file").unlink()
    subprocess.run(["git", "apply", "-"], input=patch.encode(), cwd=folder, check=True)
    assert (folder / "train.py").read_bytes() == text.replace(b"0.1", b"0.2")
    assert (folder / "new file").read_text() == "new\n"
    assert cli.json("diff", first, second)["code"]["num_files"] == 2
    cli("diff", first, first, exits=2)
    assert "can't be compared with itself" in cli.err


@pytest.mark.usefixtures("folder")
def test_a_copy_names_its_job_and_keeps_the_commit_of_its_code(cli: Cli) -> None:
    first = cli("submit", "--name", "origin", "--", "train.py").split()[0]
    second = cli("submit", "--like", first, "--name", "copy").split()[0]
    origins = [cli.json("get", job_id)["spec"]["origin"] for job_id in (first, second)]
    assert origins[1] == {**origins[0], "job": first}
    shown = cli("lineage", second)
    assert f"copy ({second}), QUEUED: edited from origin ({first}), QUEUED" in shown
    assert cli.json("lineage", first)["links"] == [
        {"parent": first, "child": second, "kind": "edited", "step": None, "model": None}
    ]


def test_the_lineage_of_a_job_without_one_says_so(cli: Cli, server: LiveServer) -> None:
    job_id = server.submit(name="alone")
    assert "made from no other job" in cli("lineage", job_id)
    array = server.submit(name="many", array={"size": 2})
    assert "of the array array-" in cli("lineage", array)


@pytest.mark.parametrize("path", ["a b", 'q"uote', "ü/☃.py", "plain.py"])
def test_a_patch_names_files_as_git_does(tmp_path: Path, path: str) -> None:
    file = FileDiff(
        path=path,
        change="added",
        old_bytes=None,
        new_bytes=2,
        is_executable=[True],
        text="@@ -0,0 +1,1 @@\n+x\n",
    )
    patch = "\n".join(patch_of(file)) + "\n"
    subprocess.run(["git", "apply", "-"], input=patch.encode(), cwd=tmp_path, check=True)
    assert (tmp_path / path).read_text() == "x\n"
    assert (tmp_path / path).stat().st_mode & 0o100
