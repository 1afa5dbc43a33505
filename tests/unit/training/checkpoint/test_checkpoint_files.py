from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dray.train import files
from dray.train.checkpoints import CheckpointRef
from dray.train.spool import Known
from dray.train.storage_faults import StorageError
from ray_workers.training.checkpoint import checkpoint_files, resuming
from ray_workers.training.checkpoint.checkpoint_files import LoadedCheckpoint, SkippedCheckpoint
from ray_workers.training.checkpoint.manager import superseded
from ray_workers.training.checkpoint.manifests import CheckpointMetadata, CommittedCheckpoint
from ray_workers.training.core.errors import BrokenCheckpointError
from ray_workers.training.core.faultpoints import FaultPoint, arm

POSITION = {"epoch": 1, "step_in_epoch": 2}


def save(folder: Path, step: int, **metrics: float) -> CheckpointRef:
    state = {"model": {"w": torch.full((3,), float(step))}}
    saved = checkpoint_files.save(
        folder.as_uri(), CheckpointMetadata(step, metrics, POSITION, loss=1 / step), state
    )
    return CheckpointRef(saved.url, step, saved.manifest_sha256)


def choose(*refs: CheckpointRef) -> tuple[LoadedCheckpoint | None, list[SkippedCheckpoint]]:
    return resuming.choose(refs, lambda sound: sound)


def folder_of(ref: CheckpointRef) -> Path:
    return Path(ref.url.removeprefix("file://"))


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    ref = save(tmp_path, 7, **{"val/loss": 0.5})
    assert ref.url.endswith("/step-000000000007")
    loaded = checkpoint_files.load(ref)
    assert loaded.saved.step == 7
    assert loaded.saved.metrics == {"val/loss": 0.5}
    assert torch.equal(loaded.state["model"]["w"], torch.full((3,), 7.0))
    files = sorted(folder_of(ref).iterdir())
    assert [path.name for path in files] == ["manifest.json", "state.json", "state.safetensors"]
    assert (loaded.position, loaded.loss) == (POSITION, 1 / 7)
    assert loaded.saved.size_bytes == sum(path.stat().st_size for path in files)


def test_any_url_that_fsspec_knows_will_do() -> None:
    state = {"model": {"w": torch.ones(2)}}
    saved = checkpoint_files.save("memory://runs/c", CheckpointMetadata(3, {}, POSITION), state)
    ref = CheckpointRef(saved.url, 3, saved.manifest_sha256)
    assert torch.equal(checkpoint_files.load(ref).state["model"]["w"], torch.ones(2))
    checkpoint_files.drop(saved)
    with pytest.raises(BrokenCheckpointError):
        checkpoint_files.load(ref)


def test_what_is_not_needed_of_a_state_takes_no_memory(tmp_path: Path) -> None:
    num = 1 << 25
    state = {"model": {"w": torch.ones(num), "b": torch.ones(3)}}
    saved = checkpoint_files.save(tmp_path.as_uri(), CheckpointMetadata(3, {}, POSITION), state)
    before = own_memory_bytes()
    loaded = checkpoint_files.load(CheckpointRef(saved.url, 3, saved.manifest_sha256))
    assert own_memory_bytes() - before < num
    weights = loaded.state["model"]["w"]
    weights[: num // 4] += 1.0  # without the file
    # A quarter of the 4-byte numbers is `num`; other memory of this process varies during the test.
    assert num // 2 < own_memory_bytes() - before < 3 * num
    checkpoint_files.drop(saved)
    assert weights.sum() == num * 1.25


def own_memory_bytes() -> int:
    """Return the number of bytes of this process's memory that are not mapped from files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def test_what_an_older_dray_saved_is_loaded(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"state": {0: {"step": torch.ones(())}}}}
    torch.save(state, tmp_path / "state.pt")
    data = (tmp_path / "state.pt").read_bytes()
    entry = {"path": "state.pt", "size_bytes": len(data)}
    entry["sha256"] = hashlib.sha256(data).hexdigest()
    manifest = {"version": 1, "step": 4, "position": POSITION, "metrics": {}, "files": [entry]}
    ref = with_manifest(CheckpointRef(tmp_path.as_uri(), 4, ""), json.dumps(manifest))
    loaded = checkpoint_files.load(ref)
    assert torch.equal(loaded.state["model"]["w"], torch.ones(2))
    assert loaded.state["optimizer"]["state"][0]["step"] == 1
    assert loaded.loss is None


def with_manifest(ref: CheckpointRef, text: str) -> CheckpointRef:
    """Return the checkpoint as if it had been committed with this manifest."""
    (folder_of(ref) / "manifest.json").write_text(text)
    return CheckpointRef(ref.url, ref.step, hashlib.sha256(text.encode()).hexdigest())


FILES = ("state.safetensors", "state.json", "manifest.json")


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def make_longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def lose(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip_a_bit, cut_short, empty, make_longer, lose])
def test_a_damaged_checkpoint_is_passed_over_with_a_sentence_in_the_log(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    name: str,
) -> None:
    older, newer = save(tmp_path, 5), save(tmp_path, 9)
    damage(folder_of(newer) / name)
    with pytest.raises(BrokenCheckpointError, match=name.partition(".")[0]):
        checkpoint_files.load(newer)
    loaded, passed_over = choose(newer, older)
    assert loaded is not None
    assert loaded.saved.step == 5
    assert [each.step for each in passed_over] == [9]
    resuming.log_passed_over(passed_over)
    assert "skipping the checkpoint of step 9" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        {"version": 3},
        {"version": 4},
        {"version": None},
        {"step": 8},
        {"files": None},
        {"files": [{"path": "state.safetensors"}]},
        {"files": [{"path": "../x", "size_bytes": 1, "sha256": "0"}]},
        {"files": []},
        {"files": [{"path": "state.json", "size_bytes": 1, "sha256": "0"}] * 2},
        {"position": None},
        {"metrics": {"val/loss": "low"}},
        {"loss": "low"},
    ],
    ids=str,
)
def test_a_manifest_that_is_json_but_wrong_is_passed_over(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    older, newer = save(tmp_path, 5), save(tmp_path, 9)
    manifest = json.loads((folder_of(newer) / "manifest.json").read_text())
    newer = with_manifest(newer, json.dumps(manifest | change))
    loaded, passed_over = choose(newer, older)
    assert loaded is not None
    assert (loaded.saved.step, [each.step for each in passed_over]) == (5, [9])


@pytest.mark.parametrize("text", ["", "[]", "3", "{", '"manifest"', "\x00"])
def test_a_manifest_that_is_no_manifest_is_passed_over(tmp_path: Path, text: str) -> None:
    ref = with_manifest(save(tmp_path, 9), text)
    loaded, passed_over = choose(ref)
    assert loaded is None
    assert [each.step for each in passed_over] == [9]


@pytest.mark.parametrize(
    "tree", ["", "[1]", '{"dict": 3}', '{"tensor": "none"}', '{"list": []}', '{"dict": [[1]]}']
)
def test_a_state_that_is_hashed_but_no_state_is_passed_over(tmp_path: Path, tree: str) -> None:
    ref = save(tmp_path, 9)
    (folder_of(ref) / "state.json").write_text(tree)
    manifest = json.loads((folder_of(ref) / "manifest.json").read_text())
    manifest["files"][1]["size_bytes"] = len(tree)
    manifest["files"][1]["sha256"] = hashlib.sha256(tree.encode()).hexdigest()
    ref = with_manifest(ref, json.dumps(manifest))
    with pytest.raises(BrokenCheckpointError, match="does not contain a training state"):
        checkpoint_files.load(ref)


def test_nothing_sound_means_a_fresh_start(tmp_path: Path) -> None:
    ref = save(tmp_path, 5)
    flip_a_bit(folder_of(ref) / "state.safetensors")
    assert choose(ref)[0] is None
    assert choose() == (None, [])


def test_a_storage_that_gives_nothing_is_no_reason_to_begin_afresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = save(tmp_path, 5), save(tmp_path, 9)
    read = files.read

    def fail(url: str) -> bytes:
        if url.startswith(newer.url) or both_fail:
            raise PermissionError(f"no {url}")
        return read(url)

    both_fail = True
    monkeypatch.setattr(files, "read", fail)
    with pytest.raises(StorageError, match="step 9"):
        choose(newer, older)
    both_fail = False
    loaded, _ = choose(newer, older)
    assert loaded is not None
    assert loaded.saved.step == 5


def test_one_that_another_rank_can_not_read_is_passed_over_here_too(tmp_path: Path) -> None:
    older, newer = save(tmp_path, 5), save(tmp_path, 9)
    answers = iter([False, True])
    loaded, passed_over = resuming.choose([newer, older], lambda sound: next(answers))
    assert loaded is not None
    assert loaded.saved.step == 5
    assert passed_over == [SkippedCheckpoint(9, "another rank found the checkpoint to be invalid")]


def test_a_save_that_dies_midway_leaves_no_checkpoint(tmp_path: Path) -> None:
    ref = save(tmp_path, 5)

    def die() -> None:
        raise KeyboardInterrupt

    arm(FaultPoint.BEFORE_MANIFEST, die, at_step=5)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 5)
    assert not folder_of(ref).exists(), "something was left"


def named(step: int, **metrics: float) -> CommittedCheckpoint:
    return CommittedCheckpoint(
        f"u{step}", step, "", 0, {f"val/{key}": value for key, value in metrics.items()}
    )


def dropped(saved: list[CommittedCheckpoint], keep: int, best: str | None = None) -> list[int]:
    return [one.step for one in superseded(saved, keep=keep, best=best)]


def test_the_newest_are_kept() -> None:
    saved = [named(step) for step in (1, 2, 3, 4)]
    assert dropped(saved, keep=2) == [1, 2]
    assert dropped(saved, keep=9) == []


def test_the_newest_that_are_known_are_kept_as_well() -> None:
    saved = [named(step) for step in (1, 2, 3, 4, 5, 6)]
    told = {f"u{step}": 10.0 * step for step in (3, 4, 5, 6)}
    found = superseded(saved, keep=1, best=None, reported=told, known=Known(stored=29, sent=40))
    assert [one.step for one in found] == [1, 3, 5]


def test_the_best_is_kept_besides_the_newest() -> None:
    saved = [named(1, accuracy=0.5), named(2, accuracy=0.9), named(3, accuracy=0.7), named(4)]
    assert dropped(saved, keep=1, best="val/accuracy") == [1, 3]


def test_the_best_loss_is_the_lowest_and_nan_is_never_the_best() -> None:
    saved = [named(1, loss=math.nan), named(2, loss=0.1), named(3, loss=0.4), named(4, loss=0.3)]
    assert dropped(saved, keep=1, best="val/loss") == [1, 3]


def test_of_equals_the_earliest_is_the_best() -> None:
    saved = [named(1, accuracy=1.0), named(2, accuracy=1.0), named(3, accuracy=0.9)]
    assert dropped(saved, keep=1, best="val/accuracy") == [2]
