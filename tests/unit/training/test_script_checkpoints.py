"""Checkpoints of a user's script: saved, reported, found again, and skipped if damaged."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dray import train
from dray.train import checkpoints, files, reporting
from dray.train.checkpoints import CheckpointRef
from dray.train.spool import begin_count, note_known, segments
from tests.unit.training.test_train_api import written


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the state to that of a new process."""
    monkeypatch.setattr(reporting, "_job_checkpoints", None)
    monkeypatch.setattr(reporting.atexit, "register", lambda *_: None)
    for name in ("DRAY_CHECKPOINT_URL", "DRAY_RESUME_FROM", "DRAY_SPOOL_DIR", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAY_SPOOL_DIR", str(tmp_path / "spool"))
    monkeypatch.setenv("DRAY_CHECKPOINT_URL", (tmp_path / "attempt-1").as_uri())
    return tmp_path / "spool"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    (folder / "parts").mkdir(parents=True)
    (folder / "model.pt").write_bytes(b"model" * 1000)
    (folder / "parts" / "0.bin").write_bytes(b"part")
    return folder


def told(spool: Path, kind: str) -> list[dict[str, Any]]:
    return [frame["body"] for frame in written(spool) if frame["kind"] == kind]


def all_is_known(spool: Path) -> None:
    """Simulate that the service has stored all previous reports."""
    size = sum(path.stat().st_size for _, path in segments(spool))
    note_known(spool, size, size)


def next_attempt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spool: Path) -> None:
    """Start the next attempt like the service, with the checkpoints that the previous attempt saved
    and did not delete."""
    dropped = {body["url"] for body in told(spool, "checkpoint_dropped")}
    known = [
        {"url": body["url"], "step": body["step"], "manifest_sha256": body["manifest_sha256"]}
        for body in reversed(told(spool, "checkpoint"))
        if body["url"] not in dropped
    ]
    monkeypatch.setenv("DRAY_RESUME_FROM", json.dumps(known))
    monkeypatch.setenv("DRAY_SPOOL_DIR", str(tmp_path / "next-spool"))
    monkeypatch.setenv("DRAY_CHECKPOINT_URL", (tmp_path / "attempt-2").as_uri())
    monkeypatch.setattr(reporting, "_job_checkpoints", None)


def test_a_checkpoint_is_copied_hashed_committed_and_told(spool: Path, state: Path) -> None:
    saved = train.save_checkpoint(state, 10, {"val/loss": 0.5})
    assert saved is not None
    folder = files.local_path(saved.url)
    assert folder is not None
    assert (folder / "parts" / "0.bin").read_bytes() == b"part"
    manifest = (folder / "manifest.json").read_bytes()
    listed = json.loads(manifest)["files"]
    assert [(entry["path"], entry["size_bytes"]) for entry in listed] == [
        ("model.pt", 5000),
        ("parts/0.bin", 4),
    ]
    (body,) = told(spool, "checkpoint")
    assert body == {
        "step": 10,
        "url": saved.url,
        "size_bytes": saved.size_bytes,
        "manifest_sha256": hashlib.sha256(manifest).hexdigest(),
        "metrics": {"val/loss": 0.5},
    }


def test_the_next_attempt_goes_on_from_the_newest(
    spool: Path, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        (state / "model.pt").write_bytes(b"%d" % step)
        train.save_checkpoint(state, step)
    assert train.load_checkpoint() is None, "these are this attempt's own"
    next_attempt(monkeypatch, tmp_path, spool)
    found = train.load_checkpoint()
    assert found is not None
    assert (found.step, (found.path / "model.pt").read_bytes()) == (20, b"20")
    (receipt,) = told(tmp_path / "next-spool", "resumed")
    assert (receipt["step"], receipt["passed_over"]) == (20, [])


def test_only_rank_0_leaves_a_receipt(
    spool: Path, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train.save_checkpoint(state, 10)
    next_attempt(monkeypatch, tmp_path, spool)
    monkeypatch.setenv("RANK", "1")
    assert train.load_checkpoint() is not None
    assert not (tmp_path / "next-spool").exists()


@pytest.mark.parametrize("damage", ["a bit", "a file less", "no manifest", "another manifest"])
def test_a_damaged_checkpoint_is_passed_over(
    spool: Path, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    train.save_checkpoint(state, 10)
    newest = train.save_checkpoint(state, 20)
    assert newest is not None
    folder = files.local_path(newest.url)
    assert folder is not None
    match damage:
        case "a bit":
            (folder / "model.pt").write_bytes(b"Model" + b"model" * 999)
        case "a file less":
            (folder / "parts" / "0.bin").unlink()
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "another manifest":
            (folder / "manifest.json").write_text('{"files": []}')
    next_attempt(monkeypatch, tmp_path, spool)
    found = train.load_checkpoint()
    assert found is not None
    assert found.step == 10
    (receipt,) = told(tmp_path / "next-spool", "resumed")
    assert [each["step"] for each in receipt["passed_over"]] == [20]


def test_where_all_are_damaged_it_begins_anew_and_says_so(
    spool: Path, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = train.save_checkpoint(state, 10)
    assert saved is not None
    folder = files.local_path(saved.url)
    assert folder is not None
    (folder / "manifest.json").write_text("{}")
    next_attempt(monkeypatch, tmp_path, spool)
    assert train.load_checkpoint() is None
    (receipt,) = told(tmp_path / "next-spool", "resumed")
    assert (receipt["step"], receipt["url"], len(receipt["passed_over"])) == (0, "", 1)


def test_the_newest_stay_over_attempts_and_the_others_go(
    spool: Path, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20, 30):
        train.save_checkpoint(state, step)
    assert [body["step"] for body in told(spool, "checkpoint_dropped")] == [10]
    next_attempt(monkeypatch, tmp_path, spool)
    train.save_checkpoint(state, 40)
    assert [body["step"] for body in told(tmp_path / "next-spool", "checkpoint_dropped")] == [20]
    left = sorted(path.parent.name for path in tmp_path.glob("attempt-*/step-*/manifest.json"))
    assert left == ["step-000000000030", "step-000000000040"]
    assert not list(tmp_path.glob("attempt-1/step-000000000020"))


def test_what_the_service_knows_of_stays_until_it_knows_of_what_is_newer(
    spool: Path, state: Path
) -> None:
    """If a node is lost, everything that it has not reported is also lost."""
    begin_count(spool)
    for step in (10, 20):
        train.save_checkpoint(state, step)
    all_is_known(spool)
    for step in (30, 40, 50):
        train.save_checkpoint(state, step)
    assert [body["step"] for body in told(spool, "checkpoint_dropped")] == [30]
    all_is_known(spool)
    reporting._checkpoints_of_the_job().tidy()
    assert [body["step"] for body in told(spool, "checkpoint_dropped")] == [30, 10, 20]


def test_a_step_that_is_saved_is_left_as_it_is(spool: Path, state: Path) -> None:
    """Writing it again would destroy it first."""
    saved = train.save_checkpoint(state, 10)
    (state / "model.pt").write_bytes(b"other")
    assert train.save_checkpoint(state, 10) == saved
    assert saved is not None
    folder = files.local_path(saved.url)
    assert folder is not None
    assert (folder / "model.pt").read_bytes() == b"model" * 1000
    assert len(told(spool, "checkpoint")) == 1


@pytest.mark.parametrize("loads", [True, False])
def test_whoever_begins_anew_keeps_what_it_saves(
    spool: Path, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loads: bool
) -> None:
    """This is the case although the previous checkpoints, which are damaged or were not loaded,
    have higher steps."""
    for step in (90, 100):
        train.save_checkpoint(state, step)
    next_attempt(monkeypatch, tmp_path, spool)
    if loads:
        for path in tmp_path.glob("attempt-1/*/model.pt"):
            path.unlink()
        assert train.load_checkpoint() is None
    for step in (10, 20):
        train.save_checkpoint(state, step)
    left = sorted(path.parent.name for path in tmp_path.glob("attempt-2/*/manifest.json"))
    assert left == ["step-000000000010", "step-000000000020"]


def test_what_was_resumed_from_stays_until_there_is_another(
    spool: Path, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (50, 100):
        train.save_checkpoint(state, step)
    next_attempt(monkeypatch, tmp_path, spool)
    (tmp_path / "attempt-1" / "step-000000000100" / "model.pt").unlink()
    found = train.load_checkpoint()
    assert found is not None
    assert found.step == 50
    train.save_checkpoint(state, 60, keep=1)
    dropped = [body["step"] for body in told(tmp_path / "next-spool", "checkpoint_dropped")]
    assert dropped == [50]
    assert (tmp_path / "attempt-2" / "step-000000000060" / "manifest.json").exists()


def test_a_storage_that_takes_nothing_costs_the_checkpoint_and_not_the_job(
    spool: Path,
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "full").write_text("no folder")
    monkeypatch.setenv("DRAY_CHECKPOINT_URL", (tmp_path / "full").as_uri())
    assert train.save_checkpoint(state, 10) is None
    assert "the checkpoint of step 10 could not be saved" in capsys.readouterr().out
    assert not spool.exists() or told(spool, "checkpoint") == []


def test_a_storage_that_gives_nothing_is_no_reason_to_begin_anew(
    spool: Path, state: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train.save_checkpoint(state, 10)
    next_attempt(monkeypatch, tmp_path, spool)

    def fail(url: str) -> bytes:
        raise PermissionError(f"no {url}")

    monkeypatch.setattr(files, "read", fail)
    with pytest.raises(train.StorageError, match="can't be read"):
        train.load_checkpoint()


def test_files_that_lie_far_away_are_brought_here(
    spool: Path, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAY_CHECKPOINT_URL", "memory://job/checkpoints")
    for step in (10, 20, 30):
        assert train.save_checkpoint(state, step) is not None
    assert [body["step"] for body in told(spool, "checkpoint_dropped")] == [10]
    next_attempt(monkeypatch, tmp_path, spool)
    found = train.load_checkpoint()
    assert found is not None
    assert found.step == 30
    assert (found.path / "parts" / "0.bin").read_bytes() == b"part"


def test_what_was_fetched_is_gone_when_the_process_ends(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, dray.train as t, json\n"
        "os.environ['DRAY_CHECKPOINT_URL'] = 'memory://j'\n"
        "pathlib.Path('s').mkdir(); pathlib.Path('s/f').write_text('x')\n"
        "from dray.train import checkpoints\n"
        "c, _ = checkpoints.commit(pathlib.Path('s'), 'memory://j', 1, {})\n"
        "os.environ['DRAY_RESUME_FROM'] = json.dumps([vars(c)])\n"
        "print(t.load_checkpoint().path)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert not Path(done.stdout.strip()).exists()


def test_a_folder_that_can_not_be_saved_is_refused(spool: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="found no file in"):
        train.save_checkpoint(empty, 1)
    (empty / "manifest.json").write_text("mine")
    with pytest.raises(ValueError, match=r"must not be called manifest\.json"):
        train.save_checkpoint(empty, 1)
    with pytest.raises(ValueError, match="must be from 0 to"):
        train.save_checkpoint(empty, -1)


def test_outside_of_dray_nothing_is_copied_and_there_is_nothing_to_load(state: Path) -> None:
    saved = train.save_checkpoint(state, 10)
    assert saved is not None
    assert (saved.url, saved.size_bytes) == (state.as_uri(), 5004)
    assert train.load_checkpoint() is None


def test_what_a_crash_leaves_half_written_is_no_checkpoint(tmp_path: Path, state: Path) -> None:
    """A checkpoint is only committed by its manifest."""
    committed, _ = checkpoints.commit(state, (tmp_path / "there").as_uri(), 3, {})
    folder = files.local_path(committed.url)
    assert folder is not None
    (folder / "manifest.json").unlink()
    with pytest.raises(checkpoints.BrokenCheckpoint):
        checkpoints.fetch(CheckpointRef(committed.url, 3, committed.manifest_sha256), tmp_path)
