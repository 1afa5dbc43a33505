"""The loop on real ranks: processes, gloo, files."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits

from dray.spec import JobSpec
from ray_workers import recipes
from ray_workers.contracts import CheckpointRef, DataPolicy, RankTask
from ray_workers.training import checkpoints, pacing, samples, storage
from ray_workers.training.initialising import materialise
from ray_workers.training.loop import Loop
from ray_workers.training.workload import Workload
from tests.unit.training.ranks import checkpoint_refs, frames, run_ranks


def document(num_workers: int, **train: Any) -> dict[str, Any]:
    """A small job with everything on that could tell two runs apart."""
    return {
        "recipe": "image_classification",
        "model": {"name": "mlp", "width": 24},
        "train": {
            "global_batch_size": 200,
            "epochs": 3,
            "schedule": {"name": "cosine", "warmup_steps": 4},
            "optimizer": {"lr": 0.003, "weight_decay": 0.01},
            **train,
        },
        "resources": {"num_workers": num_workers},
    }


def digits() -> Workload:
    spec = JobSpec.model_validate(document(1))
    work = recipes.RECIPES["image_classification"].build(spec, DataPolicy())
    materialise(work.model, torch.device("cpu"), spec.train.seed)
    return work


def weights(home: Path, attempt: int = 1) -> dict[str, torch.Tensor]:
    return load_file(home / f"attempt-{attempt}" / "artifacts" / "model.safetensors")


def series(home: Path, key: str, *, rank: int = 0, attempt: int = 1) -> dict[int, float]:
    told = frames(home, rank=rank, attempt=attempt, kind="metrics")
    found = [(m["step"], m["values"][key]) for m in told if key in m["values"]]
    assert len({step for step, _ in found}) == len(found), f"{key} was told twice for a step"
    return dict(found)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("alone")
    assert run_ranks(home, document(1), world_size=1) == [0]
    return home


@pytest.mark.parametrize("world_size", [2, 3])
def test_more_ranks_and_smaller_micro_batches_learn_the_same(
    alone: Path, tmp_path: Path, world_size: int
) -> None:
    """200 over 3 ranks are shares of 66 and 67, the last batch of an epoch is of 37 samples."""
    spec = document(world_size, micro_batch_size=32)
    assert run_ranks(tmp_path, spec, world_size=world_size) == [0] * world_size
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(weights(tmp_path)[name], tensor, rtol=0, atol=1e-6)
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert series(tmp_path, key) == pytest.approx(series(alone, key), rel=1e-5)
    assert series(tmp_path, "val/accuracy") == series(alone, "val/accuracy")


def test_a_rank_without_a_share_takes_part_and_counts_for_nothing(
    alone: Path, tmp_path: Path
) -> None:
    """1,437 samples in batches of 4 leave one over for the last batch: one rank has none."""
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
    assert kinds[0] == "resumed"
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


def die_at_step_18(task: RankTask) -> None:
    step_of = Loop._step

    def step(loop: Loop, number: int) -> None:
        step_of(loop, number)
        if number == 18:
            loop.keeper.wait()  # else that of step 15 may not be committed yet
            os.kill(os.getpid(), signal.SIGKILL)

    Loop._step = step  # type: ignore[method-assign]


EVERYTHING_ON = {"max_grad_norm": 1.0, "micro_batch_size": 40}
"""What each state of training has to be saved for, if a resumed run is to be equal."""


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (2, {"precision": "fp16", "ema": {"decay": 0.9}}),
        (2, {"optimizer": {"name": "adafactor", "lr": 0.01}, "label_smoothing": 0.1}),
        (1, {"early_stopping": {"patience": 1, "min_delta": 0.01}}),
    ],
    ids=["alone", "two", "three", "fp16 and average", "adafactor", "early stopping"],
)
def test_a_run_that_was_killed_and_resumed_ends_equal_to_the_bit(
    tmp_path: Path, world_size: int, options: dict[str, Any]
) -> None:
    spec = document(world_size, **EVERYTHING_ON, **options)
    spec |= {
        "model": {"name": "cnn", "width": 8, "dropout": 0.2},
        "checkpoint": {"every_steps": 5, "keep": 2},
    }
    left_alone, killed = tmp_path / "left-alone", tmp_path / "killed"
    assert run_ranks(left_alone, spec, world_size=world_size) == [0] * world_size

    codes = run_ranks(killed, spec, world_size=world_size, before=die_at_step_18)
    assert codes == [-signal.SIGKILL] * world_size
    refs = checkpoint_refs(killed)
    assert [ref.step for ref in refs] == [15, 10, 5]
    codes = run_ranks(killed, spec, world_size=world_size, attempt=2, resume_from=refs[:2])
    assert codes == [0] * world_size

    (receipt,) = frames(killed, attempt=2, kind="resumed")
    assert (receipt["step"], receipt["url"]) == (15, refs[0].url)
    for key in ("train/loss", "train/lr", "train/grad_norm", "val/loss", "val/accuracy"):
        whole = series(left_alone, key)
        again = series(killed, key, attempt=2)
        assert again == {step: value for step, value in whole.items() if step > 15}
    one = checkpoints.load(checkpoint_refs(left_alone)[0])
    other = checkpoints.load(checkpoint_refs(killed, attempt=2)[0])
    assert one.saved.step == other.saved.step == 24
    assert_same(one.state, other.state)
    assert weights(left_alone).keys() == weights(killed, attempt=2).keys()


def assert_same(one: Any, other: Any) -> None:
    """Equal all the way down, tensors to the bit."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def test_a_resume_in_another_world_size_goes_on_at_the_same_place_in_the_data(
    tmp_path: Path,
) -> None:
    spec = document(3) | {"checkpoint": {"every_steps": 5}}
    left_alone, killed = tmp_path / "left-alone", tmp_path / "killed"
    assert run_ranks(left_alone, spec, world_size=2, before=note_the_order) == [0, 0]
    codes = run_ranks(killed, spec, world_size=2, before=die_at_step_18)
    assert codes == [-signal.SIGKILL] * 2
    refs = checkpoint_refs(killed)
    codes = run_ranks(
        killed, spec, world_size=3, attempt=2, resume_from=refs, before=note_the_order
    )
    assert codes == [0, 0, 0]
    (receipt,) = frames(killed, attempt=2, kind="resumed")
    assert (receipt["step"], receipt["world_size"]) == (15, 2)
    assert receipt["position"] == {"epoch": 1, "step_in_epoch": 7, "samples": 1400}
    whole, again = order(left_alone, 1, 2), order(killed, 2, 3)
    assert sorted(whole) == list(range(1, 25))
    assert again == {step: samples for step, samples in whole.items() if step > 15}
    losses = series(left_alone, "train/loss")
    resumed = series(killed, "train/loss", attempt=2)
    assert resumed == pytest.approx({s: v for s, v in losses.items() if s > 15}, rel=1e-4)
    for name, tensor in weights(left_alone).items():
        torch.testing.assert_close(weights(killed, attempt=2)[name], tensor, rtol=0, atol=1e-5)


def note_the_order(task: RankTask) -> None:
    """Leave beside the spool which samples each step computes."""
    step_of, seen = Loop._step, {}

    def step(loop: Loop, number: int) -> None:
        step_of(loop, number)
        seen[number] = loop.feed.at(number).shares[0].batch.indices.tolist()
        Path(f"{task.page_prefix}.order").write_text(json.dumps(seen))

    Loop._step = step  # type: ignore[method-assign]


def order(home: Path, attempt: int, world_size: int) -> dict[int, list[int]]:
    """The samples of each step over all ranks, in the order of the ranks."""
    found: dict[int, list[int]] = {}
    for rank in range(world_size):
        path = home / f"attempt-{attempt}" / "pages" / f"r{rank}.0.order"
        for step, share in json.loads(path.read_text()).items():
            found[int(step)] = found.get(int(step), []) + share
    return found


def test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_never_the_job(
    tmp_path: Path,
) -> None:
    spec = document(2) | {"checkpoint": {"every_steps": 5, "keep": 9}}
    assert run_ranks(tmp_path, spec, world_size=2, before=fill_the_disk_twice) == [0, 0]
    assert [ref.step for ref in checkpoint_refs(tmp_path)] == [24, 20, 5]
    for ref in checkpoint_refs(tmp_path):
        assert checkpoints.load(ref).saved.step == ref.step
    folder = tmp_path / "attempt-1" / "checkpoints"
    assert sorted(path.name[-2:] for path in folder.iterdir()) == ["05", "20", "24"]


def fill_the_disk_twice(task: RankTask) -> None:
    write_all = storage._write_all

    def write(fd: int, chunk: memoryview) -> None:
        if re.search("step-0*1[05]/", str(Path(f"/proc/self/fd/{fd}").readlink())):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(fd, chunk)

    storage._write_all = write


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
    pacing.FIRST_SAVE_S = 0.0


def test_a_torn_checkpoint_is_skipped_by_all_ranks_together(tmp_path: Path) -> None:
    spec = document(2) | {"checkpoint": {"every_steps": 10}}
    assert run_ranks(tmp_path, spec, world_size=2) == [0, 0]
    refs = checkpoint_refs(tmp_path)
    assert [ref.step for ref in refs] == [24, 20, 10]
    torn = Path(refs[0].url.removeprefix("file://")) / "state.safetensors"
    torn.write_bytes(torn.read_bytes()[:100])
    assert run_ranks(tmp_path, spec, world_size=2, attempt=2, resume_from=refs) == [0, 0]
    (receipt,) = frames(tmp_path, attempt=2, kind="resumed")
    manifest = json.loads((Path(refs[1].url.removeprefix("file://")) / "manifest.json").read_text())
    (passed_over,) = receipt.pop("passed_over")
    assert passed_over["step"] == 24
    assert "has 100 bytes" in passed_over["why"]
    assert receipt == {
        "step": 20,
        "url": refs[1].url,
        "sha256": refs[1].manifest_sha256,
        "size_bytes": checkpoints.load(refs[1]).saved.size_bytes,
        "position": {"epoch": 2, "step_in_epoch": 4, "samples": 800},
        "world_size": 2,
        "optimizer_restored": True,
        "rng": manifest["rng"],
        "loss_before": series(tmp_path, "train/loss")[20],
    }
    assert list(series(tmp_path, "train/loss", attempt=2)) == [21, 22, 23, 24]
    for name, tensor in weights(tmp_path).items():
        assert torch.equal(weights(tmp_path, attempt=2)[name], tensor)


def test_a_run_that_was_complete_only_leaves_its_result_again(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, document(1), world_size=1) == [0]
    refs = checkpoint_refs(tmp_path)
    codes = run_ranks(tmp_path, document(1), world_size=1, attempt=2, resume_from=refs)
    assert codes == [0]
    assert frames(tmp_path, attempt=2, kind="metrics") == []
    artifacts = [tmp_path / f"attempt-{n}" / "artifacts" / "metrics.json" for n in (1, 2)]
    assert artifacts[0].read_text() == artifacts[1].read_text()


def test_the_best_checkpoint_is_measured_and_outlives_newer_ones(tmp_path: Path) -> None:
    # The rate explodes after the warm-up, so the best is an early one.
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


def test_bf16_computes_otherwise_and_learns_nearly_the_same(alone: Path, tmp_path: Path) -> None:
    assert run_ranks(tmp_path, document(1, precision="bf16"), world_size=1) == [0]
    losses, exact = series(tmp_path, "train/loss"), series(alone, "train/loss")
    assert losses != exact
    assert losses == pytest.approx(exact, rel=0.02)


def test_digits_are_learned(tmp_path: Path) -> None:
    spec = document(2, epochs=10, global_batch_size=256, optimizer={"lr": 0.003})
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
    state = checkpoints.load(ref).state
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
    saved = {ref.step: checkpoints.load(ref).state for ref in checkpoint_refs(tmp_path)}
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


def test_a_run_begins_with_another_jobs_weights_and_nothing_else_of_it(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_ranks(first, document(1), world_size=1) == [0]
    ref = checkpoint_refs(first)[0]
    options = {"max_steps": 1, "optimizer": {"lr": 1e-12}}
    codes = run_ranks(second, document(2, **options), world_size=2, init_from=ref)
    assert codes == [0, 0]
    (receipt,) = frames(second, kind="resumed")
    assert (receipt["step"], receipt["url"]) == (0, ref.url)
    assert not receipt["optimizer_restored"]
    assert receipt["position"] == {"epoch": 0, "step_in_epoch": 0, "samples": 0}
    assert list(series(second, "train/lr")) == [1]
    for name, tensor in weights(first).items():
        torch.testing.assert_close(weights(second)[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("fault", ["other model", "torn"])
def test_weights_that_do_not_fit_are_refused_with_the_reason(tmp_path: Path, fault: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_ranks(first, document(1, max_steps=1), world_size=1) == [0]
    ref = checkpoint_refs(first)[0]
    spec = document(1)
    if fault == "torn":
        ref = CheckpointRef(ref.url + "-gone", ref.step, ref.manifest_sha256)
    else:
        spec["model"] = {"name": "mlp", "width": 25}
    assert run_ranks(second, spec, world_size=1, init_from=ref) == [1]
    (error,) = frames(second, kind="error")
    assert error["cause"] == "bad_data"
    expected = "cannot be read" if fault == "torn" else "of another model.*width|size mismatch"
    assert re.search(expected, error["message"])


def test_a_resume_on_other_data_is_refused(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, document(1, max_steps=2), world_size=1) == [0]
    refs = checkpoint_refs(tmp_path)
    spec = document(1)
    codes = run_ranks(
        tmp_path, spec, world_size=1, attempt=2, resume_from=refs, before=change_the_data
    )
    assert codes == [1]
    (error,) = frames(tmp_path, attempt=2, kind="error")
    assert error["cause"] == "bad_data"
    assert "is not the one that the checkpoint of step 2 was trained on" in error["message"]


def test_ranks_that_read_different_data_say_so(tmp_path: Path) -> None:
    codes = run_ranks(tmp_path, document(2), world_size=2, before=change_the_data_of_rank_1)
    assert codes == [1, 1]
    for rank in (0, 1):
        (error,) = frames(tmp_path, rank=rank, kind="error")
        assert "the ranks have read different data" in error["message"]


def change_the_data(task: RankTask) -> None:
    build = recipes.RECIPES["image_classification"].build

    def changed(spec: JobSpec, policy: DataPolicy) -> Workload:
        return dataclasses.replace(build(spec, policy), fingerprint="f" * 64)

    changed_recipe = dataclasses.replace(recipes.RECIPES["image_classification"], build=changed)
    recipes.RECIPES["image_classification"] = changed_recipe  # type: ignore[index]


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


def keep_nothing_in_memory(task: RankTask) -> None:
    samples.RESIDENT_BYTES = 0
    samples.ResidentSamples = None  # type: ignore[assignment,misc]  # to make one is an error


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_samples_read_from_a_mapped_file_go_on_to_the_bit_after_a_kill(
    tmp_path: Path, loader_workers: int
) -> None:
    images = load_digits()
    np.savez(tmp_path / "digits.npz", x=images.images.astype(np.uint8), y=images.target)
    source = (tmp_path / "digits.npz").as_uri()
    spec = document(2, **EVERYTHING_ON) | {
        "data": {"source": source, "loader_workers": loader_workers},
        "checkpoint": {"every_steps": 5, "keep": 2},
    }
    left_alone, killed = tmp_path / "left-alone", tmp_path / "killed"
    assert run_ranks(left_alone, spec, world_size=2, before=keep_nothing_in_memory) == [0, 0]
    codes = run_ranks(killed, spec, world_size=2, before=keep_nothing_in_memory_and_die)
    assert codes == [-signal.SIGKILL] * 2
    refs = checkpoint_refs(killed)
    codes = run_ranks(
        *(killed, spec),
        world_size=2,
        attempt=2,
        resume_from=refs,
        before=keep_nothing_in_memory,
    )
    assert codes == [0, 0]
    (receipt,) = frames(killed, attempt=2, kind="resumed")
    assert receipt["step"] == 15
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        whole = series(left_alone, key)
        again = series(killed, key, attempt=2)
        assert again == {step: value for step, value in whole.items() if step > 15}
    one = checkpoints.load(checkpoint_refs(left_alone)[0])
    other = checkpoints.load(checkpoint_refs(killed, attempt=2)[0])
    assert_same(one.state, other.state)


def keep_nothing_in_memory_and_die(task: RankTask) -> None:
    keep_nothing_in_memory(task)
    die_at_step_18(task)
