"""The directory in which a script runs contains the files next to the script, and no others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ray_workers.shared.folders import work_dir


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, configuration, packages, data and a tool's files. Restores the
    current directory."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "project"
    for path in ("train.py", "config.json", "pkg/sub/a.py", ".git/HEAD", "__pycache__/train.pyc"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)
    return folder


def test_files_next_to_the_script_are_found_by_their_relative_paths(
    project: Path, tmp_path: Path
) -> None:
    work_dir.enter(tmp_path / "work" / "job", project)
    assert Path.cwd() == tmp_path / "work" / "job"
    assert Path().stat().st_mode & 0o777 == 0o700
    for path in ("train.py", "config.json", "pkg/sub/a.py", ".git/HEAD"):
        assert Path(path).read_text() == path
    assert Path("config.json").is_symlink()
    assert Path(".git").is_symlink()
    assert not Path("pkg/sub").is_symlink()
    assert not Path("__pycache__").exists()
    Path("pkg/sub/made").write_text("by the job")
    assert not (project / "pkg/sub/made").exists()


def test_what_the_job_made_stays_and_what_came_to_the_script_comes_to_the_job(
    project: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "work" / "job"
    work_dir.enter(directory, project)
    Path("config.json").unlink()
    Path("config.json").write_text("the job's own")
    (project / "later.json").write_text("later")
    work_dir.enter(directory, project)
    assert Path("config.json").read_text() == "the job's own"
    assert (project / "config.json").read_text() == "config.json"
    assert Path("later.json").read_text() == "later"


def test_a_folder_of_very_many_files_is_linked_as_a_whole(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_dir, "MAX_LINKS", 10)
    (project / "images").mkdir()
    for number in range(20):
        (project / "images" / str(number)).touch()
    for _ in range(2):
        work_dir.enter(tmp_path / "work" / "job", project)
        assert Path("images").is_symlink()
        assert Path("config.json").exists()
        assert len(list(Path("images").iterdir())) == 20


def test_a_directory_below_the_scripts_own_folder_does_not_hold_itself(
    project: Path,
) -> None:
    for _ in range(2):
        work_dir.enter(project / "runs" / "work" / "job", project)
    assert not Path("runs").exists()


def test_the_directories_of_deleted_jobs_go_and_their_links_lead_nowhere_else(
    project: Path, tmp_path: Path
) -> None:
    root = tmp_path / "work"
    for job in ("job-1", "job-2"):
        work_dir.enter(root / job, project)
    os.chdir(tmp_path)
    assert work_dir.jobs_in(root) == ["job-1", "job-2"]
    work_dir.remove(root, ["job-1", "job-9", "../project"])
    assert work_dir.jobs_in(root) == ["job-2"]
    assert (project / ".git/HEAD").exists()
    assert work_dir.jobs_in(tmp_path / "nothing") == []
