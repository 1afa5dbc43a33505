from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ray_workers.contracts import CheckpointRef
from ray_workers.training import checkpoints
from ray_workers.training.checkpoints import Keeper, Saved, superseded
from ray_workers.training.errors import BrokenCheckpointError
from tests.unit.training.ranks import frames

POSITION = {"epoch": 1, "step_in_epoch": 2}


def save(folder: Path, step: int, **metrics: float) -> CheckpointRef:
    state = {"model": {"w": torch.full((3,), float(step))}}
    saved = checkpoints.save(folder.as_uri(), step, state, metrics=metrics, position=POSITION)
    return CheckpointRef(saved.url, step, saved.manifest_sha256)


def folder_of(ref: CheckpointRef) -> Path:
    return Path(ref.url.removeprefix("file://"))


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    ref = save(tmp_path, 7, **{"val/loss": 0.5})
    assert ref.url.endswith("/step-000000000007")
    loaded = checkpoints.load(ref)
    assert loaded.saved.step == 7
    assert loaded.saved.metrics == {"val/loss": 0.5}
    assert torch.equal(loaded.state["model"]["w"], torch.full((3,), 7.0))
    files = sorted(folder_of(ref).iterdir())
    assert [path.name for path in files] == ["manifest.json", "state.pt"]
    assert loaded.saved.size_bytes == sum(path.stat().st_size for path in files)


def test_any_url_that_fsspec_knows_will_do() -> None:
    state = {"model": {"w": torch.ones(2)}}
    saved = checkpoints.save("memory://runs/c", 3, state, metrics={}, position=POSITION)
    ref = CheckpointRef(saved.url, 3, saved.manifest_sha256)
    assert torch.equal(checkpoints.load(ref).state["model"]["w"], torch.ones(2))
    checkpoints.drop(saved)
    with pytest.raises(BrokenCheckpointError):
        checkpoints.load(ref)


def flip_a_bit(ref: CheckpointRef) -> None:
    path = folder_of(ref) / "state.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_short(ref: CheckpointRef) -> None:
    path = folder_of(ref) / "state.pt"
    path.write_bytes(path.read_bytes()[:-10])


def lose_the_manifest(ref: CheckpointRef) -> None:
    (folder_of(ref) / "manifest.json").unlink()


def lose_the_state(ref: CheckpointRef) -> None:
    (folder_of(ref) / "state.pt").unlink()


def edit_the_manifest(ref: CheckpointRef) -> None:
    path = folder_of(ref) / "manifest.json"
    path.write_text(path.read_text().replace('"step": 9', '"step": 8'))


@pytest.mark.parametrize(
    "damage", [flip_a_bit, cut_short, lose_the_manifest, lose_the_state, edit_the_manifest]
)
def test_a_broken_checkpoint_is_passed_over_with_a_sentence_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[CheckpointRef], None]
) -> None:
    older, newer = save(tmp_path, 5), save(tmp_path, 9)
    damage(newer)
    with pytest.raises(BrokenCheckpointError):
        checkpoints.load(newer)
    loaded = checkpoints.newest_sound([newer, older])
    assert loaded is not None
    assert loaded.saved.step == 5
    assert "passing over the checkpoint of step 9" in capsys.readouterr().out


def test_nothing_sound_means_a_fresh_start(tmp_path: Path) -> None:
    ref = save(tmp_path, 5)
    flip_a_bit(ref)
    assert checkpoints.newest_sound([ref]) is None
    assert checkpoints.newest_sound([]) is None


def test_a_save_that_dies_midway_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = save(tmp_path, 5)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", die)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 5)
    assert not (folder_of(ref) / "manifest.json").exists()
    assert not list(folder_of(ref).glob(".*")), "a temporary file was left"


def named(step: int, **metrics: float) -> Saved:
    return Saved(f"u{step}", step, "", 0, {f"val/{key}": value for key, value in metrics.items()})


def dropped(saved: list[Saved], keep: int, best: str | None = None) -> list[int]:
    return [one.step for one in superseded(saved, keep=keep, best=best)]


def test_the_newest_are_kept() -> None:
    saved = [named(step) for step in (1, 2, 3, 4)]
    assert dropped(saved, keep=2) == [1, 2]
    assert dropped(saved, keep=9) == []


def test_the_best_is_kept_besides_the_newest() -> None:
    saved = [named(1, accuracy=0.5), named(2, accuracy=0.9), named(3, accuracy=0.7), named(4)]
    assert dropped(saved, keep=1, best="val/accuracy") == [1, 3]


def test_the_best_loss_is_the_lowest_and_nan_is_never_the_best() -> None:
    saved = [named(1, loss=math.nan), named(2, loss=0.1), named(3, loss=0.4), named(4, loss=0.3)]
    assert dropped(saved, keep=1, best="val/loss") == [1, 3]


def test_of_equals_the_earliest_is_the_best() -> None:
    saved = [named(1, accuracy=1.0), named(2, accuracy=1.0), named(3, accuracy=0.9)]
    assert dropped(saved, keep=1, best="val/accuracy") == [2]


def test_the_keeper_deletes_what_is_superseded_also_of_an_earlier_attempt_and_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = tmp_path / "attempt-2" / "spool" / "r0.0.metrics"
    monkeypatch.setenv("DRAY_SPOOL_DIR", str(spool))
    earlier = [save(tmp_path / "attempt-1", step) for step in (10, 5)]
    keeper = Keeper((tmp_path / "attempt-2").as_uri(), keep=2, best=None)
    keeper.adopt(earlier)
    for step in (15, 20):
        keeper.save(step, {"model": {}}, metrics={"val/loss": 1.0}, position=POSITION)
    told = frames(tmp_path, attempt=2)
    assert [(f["kind"], f["body"]["step"]) for f in told] == [
        ("checkpoint", 15),
        ("checkpoint_dropped", 5),
        ("checkpoint", 20),
        ("checkpoint_dropped", 10),
    ]
    assert not folder_of(earlier[0]).exists()
    body = told[0]["body"]
    loaded = checkpoints.load(CheckpointRef(body["url"], 15, body["manifest_sha256"]))
    assert loaded.saved.size_bytes == body["size_bytes"]
    assert body["metrics"] == {"val/loss": 1.0}
