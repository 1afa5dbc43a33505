"""Results in the working directory are named at the end of an attempt."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dray.train import saved_files
from ray_workers.node.folders import job_folders
from ray_workers.node.folders.code_cache import CodeCache
from ray_workers.node.folders.job_folders import FolderPlan
from ray_workers.node.folders.left_behind import left_behind


def put(root: Path, **sizes: int) -> None:
    for name, size in sizes.items():
        path = root / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)


def test_what_the_script_wrote_is_named_with_its_size(tmp_path: Path) -> None:
    work, code = tmp_path / "work", tmp_path / "code"
    put(code, train_py=10, sub__words_txt=7, conf_json=3)
    put(work, old_bin=99)
    os.utime(work / "old.bin", ns=(1, 1))
    since = time.time_ns() - 10**9
    put(work, train_py=10, sub__words_txt=7)
    (work / "link").symlink_to(tmp_path / "code/train.py")
    put(work / "__pycache__", train_pyc=5)
    put(work / ".cache", x=5)
    assert left_behind(work, since, code) == ""
    put(work, model_pt=4_200_000, conf_json=4, runs__a__b=1, runs__a__c=999)
    assert left_behind(work, since, code) == (
        "4 files were left in the working directory and not kept as artifacts: "
        "'model.pt' (4.2 MB), 'runs/' (1 KB), 'conf.json' (4 B); "
        "to keep results, write them to DRAY_OUTPUT_DIR or call train.save_artifact"
    )
    (work / "model.pt").unlink()
    (work / "conf.json").rename(work / "résumé\u202e.txt")
    assert r"'résumé\u202e.txt' (4 B)" in left_behind(work, since, code)
    (work / "résumé\u202e.txt").unlink()
    (work / "runs/a/c").unlink()
    assert left_behind(work, since, code).startswith("1 file was left")
    put(work, **{f"f{number}": 9 - number for number in range(7)})
    assert "'f4' (5 B) ...; to keep" in left_behind(work, since, code)
    assert left_behind(tmp_path / "none", since, None) == ""


def test_the_end_of_an_attempt_names_the_files_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, folder, work = tmp_path.as_uri(), tmp_path / "folders", tmp_path / "work"
    plan = FolderPlan(0, 0, f"{url}/output", f"{url}/kept", 1 << 20, 1 << 30, code="ab")
    monkeypatch.setattr(CodeCache, "files_of", lambda self, digest: tmp_path / digest)
    put(tmp_path / "ab", train_py=1)
    job_folders.begin(folder, plan)
    put(work, train_py=1, model_pt=2)
    job_folders.begin(folder, plan)  # as for a replacement on this node
    given = (folder, tmp_path / "spool", (), 0, work)
    kept = job_folders.keep_output(*given)
    assert "1 file was left" in kept.left_behind
    assert "'model.pt' (2 B)" in kept.left_behind
    (work / "model.pt").unlink()
    assert job_folders.keep_output(*given) == kept


def test_a_file_that_was_saved_as_an_artifact_is_not_left_behind_unless_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, work = tmp_path / "folders", tmp_path / "work"
    (folder / "output").mkdir(parents=True)
    monkeypatch.setenv("DRAY_OUTPUT_DIR", str(folder / "output"))
    put(work, model_pt=2, partial=3, log_txt=4)
    for name in ("model.pt", "log.txt", "partial"):
        saved_files.note(saved_files.version_of((work / name).stat()))
    (work / "partial").rename(work / "best.pt")
    put(work, log_txt=5)
    with (folder / "saved").open("a") as notes:
        notes.write("not\n1 2\n" + "9" * 30 + " 1 1 1\n")
    saved = saved_files.noted(folder)
    assert left_behind(work, 0, None, saved).startswith(
        "1 file was left in the working directory and not kept as artifacts: 'log.txt' (5 B)"
    )
    (folder / "saved").unlink()
    os.mkfifo(folder / "saved")
    assert saved_files.noted(folder) == frozenset()
