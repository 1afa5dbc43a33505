"""The loop on real ranks, with processes, gloo, and files."""

from __future__ import annotations

import errno
import functools
import json
import math
import os
from pathlib import Path

import pytest
import torch

from dray.train import files, storage_faults
from ray_workers import recipes
from ray_workers.recipes import results
from ray_workers.shared import heartbeat
from ray_workers.shared.contracts import STORAGE_EXIT_CODE, Cause, RankTask
from ray_workers.training.checkpoint import checkpoint_files, interval
from ray_workers.training.core.faultpoints import FaultPoint, arm, arm_with
from ray_workers.training.loop.trainer import Trainer
from tests.marks import ONE_SET, SOAK
from tests.unit.training.jobs import (
    change_the_data,
    digits,
    document,
    keep_nothing_in_memory,
    series,
    weights,
)
from tests.unit.training.ranks import checkpoint_refs, frames, run_ranks


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("alone")
    assert run_ranks(home, document(1), world_size=1) == [0]
    return home


@ONE_SET
@pytest.mark.parametrize("world_size", [2, 3])
def test_more_ranks_and_smaller_micro_batches_learn_the_same(
    alone: Path, tmp_path: Path, world_size: int
) -> None:
    """With 3 ranks, 200 samples are divided into shares of 66 and 67; the last batch of an epoch
    has 37 samples."""
    spec = document(world_size, micro_batch_size=32)
    assert run_ranks(tmp_path, spec, world_size=world_size) == [0] * world_size
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(weights(tmp_path)[name], tensor, rtol=0, atol=1e-6)
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert series(tmp_path, key) == pytest.approx(series(alone, key), rel=1e-5)
    assert series(tmp_path, "val/accuracy") == series(alone, "val/accuracy")


@SOAK
def test_a_rank_without_a_share_takes_part_and_counts_for_nothing(
    alone: Path, tmp_path: Path
) -> None:
    """With 1,437 samples in batches of 4, the last batch has only one sample, so one rank has
    none."""
    options = {"global_batch_size": 4, "max_steps": 362, "epochs": 2, "optimizer": {"lr": 1e-4}}
    homes = [tmp_path / "1", tmp_path / "2"]
    for world_size, home in enumerate(homes, start=1):
        codes = run_ranks(home, document(world_size, **options), world_size=world_size)
        assert codes == [0] * world_size
    losses = [series(home, "train/loss") for home in homes]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    for name, tensor in weights(homes[0]).items():
        torch.testing.assert_close(weights(homes[1])[name], tensor, rtol=0, atol=1e-5)


def test_each_step_is_told_once_by_every_rank_with_what_the_design_promises(
    tmp_path: Path,
) -> None:
    assert run_ranks(tmp_path, document(2), world_size=2) == [0, 0]
    steps = list(range(1, 25))
    for key in ("train/loss", "train/lr", "train/grad_norm", "perf/samples_per_s"):
        assert list(series(tmp_path, key)) == steps
    for rank in (0, 1):
        for key in ("perf/step_time_s", "perf/data_wait_s"):
            assert list(series(tmp_path, key, rank=rank)) == steps
    assert series(tmp_path, "train/loss", rank=1) == {}
    assert list(series(tmp_path, "val/accuracy")) == [8, 16, 24]
    assert series(tmp_path, "train/loss")[24] < series(tmp_path, "train/loss")[1]
    told = frames(tmp_path, kind="metrics")
    assert {m.get("total_steps") for m in told if "train/loss" in m["values"]} == {24}
    kinds = [f["kind"] for f in frames(tmp_path)]
    assert kinds[:2] == ["packages", "resumed"]
    assert frames(tmp_path, kind="resumed") == [{"step": 0, "url": ""}]
    assert kinds[-4:] == ["artifact"] * 4


def test_the_result_is_a_model_that_can_be_used(alone: Path) -> None:
    artifacts = alone / "attempt-1" / "artifacts"
    classifier = recipes.load(artifacts)
    images, labels = digits().validation.take(torch.arange(len(digits().validation)))
    predicted = classifier.predict(images)
    accuracy = sum(
        guess == str(label) for guess, label in zip(predicted, labels.tolist(), strict=True)
    ) / len(labels)
    metrics = json.loads((artifacts / "metrics.json").read_text())
    assert accuracy == pytest.approx(metrics["val/accuracy"])
    assert metrics["step"] == 24
    assert metrics["train/loss"] == series(alone, "train/loss")[24]


def test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_never_the_job(
    tmp_path: Path,
) -> None:
    spec = document(2) | {"checkpoint": {"every_steps": 5, "keep": 9}}
    assert run_ranks(tmp_path, spec, world_size=2, before=fill_the_disk_twice) == [0, 0]
    assert [ref.step for ref in checkpoint_refs(tmp_path)] == [24, 20, 5]
    for ref in checkpoint_refs(tmp_path):
        assert checkpoint_files.load(ref).saved.step == ref.step
    folder = tmp_path / "attempt-1" / "checkpoints"
    assert sorted(path.name[-2:] for path in folder.iterdir()) == ["05", "20", "24"]


def fill_the_disk_twice(task: RankTask) -> None:
    def refuse() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for step in (10, 15):
        arm(FaultPoint.BEFORE_MANIFEST, refuse, at_step=step)


def test_a_result_waits_for_space_and_nothing_is_trained_again(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, document(2), world_size=2, before=fill_the_disk_at_the_end) == [0, 0]
    told = [body["path"] for body in frames(tmp_path, kind="artifact")]
    assert sorted(set(told)) == ["config.json", "labels.json", "metrics.json", "model.safetensors"]
    assert weights(tmp_path)


def fill_the_disk_at_the_end(task: RankTask) -> None:
    storage_faults.PAUSE_S = 0.05
    store, refusals = files.store, iter(range(3))

    def refuse(source: Path, url: str) -> tuple[int, str]:
        if next(refusals, None) is not None:
            raise files.StorageError(f"{url} can't be written: no space left on device")
        return store(source, url)

    files.store = refuse


def test_a_disk_that_stays_full_at_the_end_is_the_machines_fault(tmp_path: Path) -> None:
    codes = run_ranks(tmp_path, document(1), world_size=1, before=leave_no_space_for_a_result)
    assert codes == [STORAGE_EXIT_CODE]
    (error,) = frames(tmp_path, kind="error")
    assert error["cause"] == Cause.INFRASTRUCTURE
    assert "the result could not be written within 0.2 s" in error["message"]
    assert checkpoint_refs(tmp_path)[0].step == 24, "another attempt has only the result to write"


def leave_no_space_for_a_result(task: RankTask) -> None:
    storage_faults.PAUSE_S, storage_faults.WAIT_S = 0.05, 0.2

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    results.save_file = refuse


def test_an_interval_of_its_own_choice_changes_nothing_that_is_learned(
    alone: Path, tmp_path: Path
) -> None:
    spec = document(2) | {"checkpoint": {"every_steps": "auto", "keep": 99}}
    assert run_ranks(tmp_path, spec, world_size=2, before=save_at_once) == [0, 0]
    steps = [ref.step for ref in reversed(checkpoint_refs(tmp_path))]
    assert steps[0] == 1
    assert steps[-1] == 24
    chosen = series(tmp_path, "perf/checkpoint_every_steps")
    assert set(chosen) <= set(series(tmp_path, "perf/checkpoint_stall_s"))
    assert all(every >= 1 for every in chosen.values())
    assert list(series(tmp_path, "val/accuracy")) == [8, 16, 24]
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(weights(tmp_path)[name], tensor, rtol=0, atol=1e-6)


def save_at_once(task: RankTask) -> None:
    interval.FIRST_SAVE_S = 0.0


def test_an_evaluation_shows_on_the_page_that_it_gets_on(tmp_path: Path) -> None:
    codes = run_ranks(tmp_path, document(1, max_steps=2), world_size=1, before=note_since)
    assert codes == [0]
    before, after = map(float, (tmp_path / "since").read_text().split())
    assert before < after


def note_since(task: RankTask) -> None:
    page = heartbeat.page_path(task.page_prefix)

    def note() -> None:
        with (page.parents[2] / "since").open("a") as file:
            print(heartbeat.parse_status(page.read_bytes()).since, file=file)

    arm(FaultPoint.BEFORE_EVALUATION, note)
    arm(FaultPoint.AFTER_EVALUATION, note)


def test_the_best_checkpoint_is_measured_and_outlives_newer_ones(tmp_path: Path) -> None:
    # The learning rate explodes after the warmup, so the best checkpoint is an early one.
    spec = document(1, optimizer={"name": "sgd", "lr": 50.0}, schedule={"warmup_steps": 200})
    spec |= {"checkpoint": {"every_steps": 4, "keep": 1, "best": "val/accuracy"}}
    assert run_ranks(tmp_path, spec, world_size=1) == [0]
    told = frames(tmp_path, kind="checkpoint")
    assert [c["step"] for c in told] == [4, 8, 12, 16, 20, 24]
    accuracy = {c["step"]: c["metrics"]["val/accuracy"] for c in told}
    best = max(accuracy, key=lambda step: (accuracy[step], -step))
    assert best != 24
    gone = {c["step"] for c in frames(tmp_path, kind="checkpoint_dropped")}
    assert gone == set(accuracy) - {best, 24}
    left = {path.name for path in (tmp_path / "attempt-1" / "checkpoints").iterdir()}
    assert left == {f"step-{step:012d}" for step in (best, 24)}


@SOAK  # fp16 does, and more
def test_bf16_computes_otherwise_and_learns_nearly_the_same(alone: Path, tmp_path: Path) -> None:
    assert run_ranks(tmp_path, document(1, precision="bf16"), world_size=1) == [0]
    losses, exact = series(tmp_path, "train/loss"), series(alone, "train/loss")
    assert losses != exact
    assert losses == pytest.approx(exact, rel=0.02)


def test_digits_are_learned(tmp_path: Path) -> None:
    spec = document(2, epochs=5, global_batch_size=128, optimizer={"lr": 0.006})
    spec |= {"model": {"name": "cnn", "width": 16}}
    assert run_ranks(tmp_path, spec, world_size=2) == [0, 0]
    assert list(series(tmp_path, "val/accuracy").values())[-1] >= 0.97


def test_fp16_computes_otherwise_and_learns_nearly_the_same(alone: Path, tmp_path: Path) -> None:
    assert run_ranks(tmp_path, document(1, precision="fp16"), world_size=1) == [0]
    losses, exact = series(tmp_path, "train/loss"), series(alone, "train/loss")
    assert losses != exact
    assert losses == pytest.approx(exact, rel=0.02)
    norms = series(tmp_path, "train/grad_norm")
    assert norms == pytest.approx(series(alone, "train/grad_norm"), rel=0.05), "it is unscaled"


def test_an_overflow_in_fp16_changes_no_weight_and_lowers_the_scale(tmp_path: Path) -> None:
    spec = document(1, precision="fp16", max_steps=1) | {"checkpoint": {"every_steps": 1}}
    assert run_ranks(tmp_path, spec, world_size=1, before=scale_the_loss_too_high) == [0]
    (ref,) = checkpoint_refs(tmp_path)
    state = checkpoint_files.load(ref).state
    assert state["scaler"]["scale"] == 2.0**126
    assert not math.isfinite(series(tmp_path, "train/grad_norm")[1])
    for name, tensor in digits().model.state_dict().items():
        assert torch.equal(state["model"][name], tensor)


def scale_the_loss_too_high(task: RankTask) -> None:
    made = torch.amp.GradScaler
    torch.amp.GradScaler = functools.partial(made, init_scale=2.0**127)  # type: ignore


def test_the_average_of_the_weights_is_what_is_judged_and_left(tmp_path: Path) -> None:
    spec = document(2, ema={"decay": 0.5}) | {"checkpoint": {"every_steps": 1, "keep": 24}}
    assert run_ranks(tmp_path, spec, world_size=2) == [0, 0]
    saved = {ref.step: checkpoint_files.load(ref).state for ref in checkpoint_refs(tmp_path)}
    for name in saved[1]["model"]:
        average = saved[1]["model"][name]
        for step in range(2, 25):
            average = 0.5 * average + 0.5 * saved[step]["model"][name]
        torch.testing.assert_close(weights(tmp_path)[name], average, rtol=1e-4, atol=1e-6)
        assert not torch.equal(weights(tmp_path)[name], saved[24]["model"][name])


def test_training_stops_when_nothing_gets_better_and_keeps_what_it_has(tmp_path: Path) -> None:
    stopping = {"metric": "val/accuracy", "patience": 2}
    options = {"epochs": 50, "early_stopping": stopping, "optimizer": {"lr": 1e-9}}
    assert run_ranks(tmp_path, document(2, **options), world_size=2) == [0, 0]
    assert list(series(tmp_path, "val/accuracy")) == [8, 16, 24]
    assert checkpoint_refs(tmp_path)[0].step == 24
    assert frames(tmp_path, kind="metrics")[-1]["total_steps"] == 24
    told = json.loads((tmp_path / "attempt-1" / "artifacts" / "metrics.json").read_text())
    assert told["step"] == 24


def test_an_evaluation_that_is_done_again_is_no_reason_to_stop(tmp_path: Path) -> None:
    """The group recovered between an evaluation and the save."""
    stopping = {"metric": "val/accuracy", "patience": 2}
    options = {"epochs": 50, "early_stopping": stopping, "optimizer": {"lr": 1e-9}}
    codes = run_ranks(tmp_path, document(1, **options), world_size=1, before=measure_twice)
    assert codes == [0]
    assert frames(tmp_path, kind="metrics")[-1]["total_steps"] == 24


def measure_twice(task: RankTask) -> None:
    for step in (8, 16, 24):
        again = functools.partial(Trainer.evaluate, step=step)
        arm_with(FaultPoint.BEFORE_EVALUATION, again, at_step=step)


def test_ranks_that_read_different_data_say_so(tmp_path: Path) -> None:
    codes = run_ranks(tmp_path, document(2), world_size=2, before=change_the_data_of_rank_1)
    assert codes == [1, 1]
    for rank in (0, 1):
        (error,) = frames(tmp_path, rank=rank, kind="error")
        assert "the ranks have read different data" in error["message"]


def change_the_data_of_rank_1(task: RankTask) -> None:
    if task.rank == 1:
        change_the_data(task)


def test_samples_read_batch_by_batch_are_learned_the_same_to_the_bit(
    alone: Path, tmp_path: Path
) -> None:
    assert run_ranks(tmp_path, document(1), world_size=1, before=keep_nothing_in_memory) == [0]
    for name, tensor in weights(alone).items():
        assert torch.equal(weights(tmp_path)[name], tensor)
    assert series(tmp_path, "train/loss") == series(alone, "train/loss")
