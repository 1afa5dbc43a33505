"""A run continues from a checkpoint as if it had not been interrupted, or starts with another job's
weights."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from dray.train.checkpoints import CheckpointRef
from ray_workers.shared.contracts import RankTask
from ray_workers.training.checkpoint import checkpoint_files
from ray_workers.training.core.faultpoints import FaultPoint, arm_with
from ray_workers.training.loop.step_reporter import Batch
from ray_workers.training.loop.trainer import Trainer
from ray_workers.training.parallel.optim import optimizer_step
from tests.marks import ONE_SET, SOAK, soak
from tests.unit.training.jobs import (
    assert_same,
    change_the_data,
    die_at_step_18,
    document,
    keep_nothing_in_memory,
    series,
    weights,
)
from tests.unit.training.ranks import checkpoint_refs, frames, run_ranks

EVERYTHING_ON = {"max_grad_norm": 1.0, "micro_batch_size": 40}
"""Options for all tests; each of them adds options that have a state to save."""


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        soak(1, {}),
        soak(2, {}),
        soak(3, {}),
        (2, {"precision": "fp16", "ema": {"decay": 0.9}}),
        soak(2, {"optimizer": {"name": "adafactor", "lr": 0.01}, "label_smoothing": 0.1}),
        soak(1, {"early_stopping": {"patience": 1, "min_delta": 0.01}}),
    ],
    ids=["alone", "two", "three", "fp16 and average", "adafactor", "early stopping"],
)
def test_a_run_that_was_killed_and_resumed_ends_equal_to_the_bit(
    tmp_path: Path, world_size: int, options: dict[str, Any]
) -> None:
    spec = document(world_size, **EVERYTHING_ON, **options)
    spec |= {
        "model": {"name": "cnn", "width": 4, "dropout": 0.2},
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
    one = checkpoint_files.load(checkpoint_refs(left_alone)[0])
    other = checkpoint_files.load(checkpoint_refs(killed, attempt=2)[0])
    assert one.saved.step == other.saved.step == 24
    assert_same(one.state, other.state)
    assert weights(left_alone).keys() == weights(killed, attempt=2).keys()


def test_a_resume_in_another_world_size_continues_at_the_same_position_in_the_data(
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
    """Write the samples of each step to a file next to the spool."""
    loaded: list[Batch] = []
    seen = {}
    path = Path(f"{task.page_prefix}.order")

    def note(trainer: Trainer) -> None:
        seen[trainer.progress.step + 1] = loaded[-1].feed.shares[0].batch.indices.tolist()
        path.write_text(json.dumps(seen))

    arm_with(FaultPoint.DATA_LOADED, loaded.append)
    arm_with(FaultPoint.STEP_ENDS, note)


def order(home: Path, attempt: int, world_size: int) -> dict[int, list[int]]:
    """Return the samples of each step from all ranks, in rank order."""
    found: dict[int, list[int]] = {}
    for rank in range(world_size):
        path = home / f"attempt-{attempt}" / "pages" / f"r{rank}.0.order"
        for step, share in json.loads(path.read_text()).items():
            found[int(step)] = found.get(int(step), []) + share
    return found


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
        "size_bytes": checkpoint_files.load(refs[1]).saved.size_bytes,
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


@SOAK
def test_a_run_goes_on_from_all_that_another_job_left(tmp_path: Path) -> None:
    first, second, alone = (tmp_path / name for name in ("first", "second", "alone"))
    options: dict[str, Any] = {**EVERYTHING_ON, "schedule": {"name": "constant"}}
    options["optimizer"] = {"name": "sgd", "lr": 0.05, "momentum": 0.9}
    longer = {**options, "epochs": 4}
    assert run_ranks(alone, document(2, **longer), world_size=2) == [0, 0]
    assert run_ranks(first, document(2, **options), world_size=2) == [0, 0]
    ref = checkpoint_refs(first)[0]
    whole = {"init_from": {"job": "job-first", "take": "everything"}}
    spec = document(2, **longer) | whole
    assert run_ranks(second, spec, world_size=2, init_from=ref) == [0, 0]
    (receipt,) = frames(second, kind="resumed")
    assert (receipt["step"], receipt["url"]) == (24, ref.url)
    assert receipt["optimizer_restored"]
    assert receipt["position"] == {"epoch": 3, "step_in_epoch": 0, "samples": 0}
    for key in ("train/loss", "val/loss"):
        later = {step: value for step, value in series(alone, key).items() if step > 24}
        assert series(second, key) == later
    assert_same(weights(second), weights(alone))

    done = tmp_path / "done"
    assert run_ranks(done, document(1, **options) | whole, world_size=1, init_from=ref) == [1]
    (error,) = frames(done, kind="error")
    assert error["cause"] == "bad_data"
    assert "is from step 24, but the job ends after step 24" in error["message"]

    elsewhere = tmp_path / "elsewhere"
    codes = run_ranks(
        elsewhere,
        document(1, **longer) | whole,
        world_size=1,
        init_from=ref,
        before=change_the_data,
    )
    assert codes == [1]
    (error,) = frames(elsewhere, kind="error")
    assert "start a new job that loads the weights with init_from" in error["message"]


def test_how_long_another_job_waited_for_an_improvement_is_not_gone_on_with(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    never = {"metric": "val/accuracy", "patience": 1, "min_delta": 10.0}
    assert run_ranks(first, document(1, early_stopping=never), world_size=1) == [0]
    ref = checkpoint_refs(first)[0]
    assert ref.step == 16, "the first evaluation was the best, and the second was not better"
    spec = document(1, early_stopping={"metric": "val/loss", "patience": 1}, epochs=4)
    spec["init_from"] = {"job": "job-first", "take": "everything"}
    assert run_ranks(second, spec, world_size=1, init_from=ref) == [0]
    assert list(series(second, "val/loss")) == [24, 32]


def test_a_state_that_numbers_its_parameters_is_not_divided(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_ranks(first, document(1, epochs=1), world_size=1, before=_number_parameters) == [0]
    spec = document(2) | {"parallel": {"shard": 2, "zero": 1}}
    spec["init_from"] = {"job": "job-first", "take": "everything"}
    ref = checkpoint_refs(first)[0]
    assert run_ranks(second, spec, world_size=2, init_from=ref) == [1, 1]
    (error,) = frames(second, kind="error")
    assert "Load only the weights, or do not divide the model" in error["message"]


def _number_parameters(task: RankTask) -> None:
    """Write optimizer states in the old format."""
    optimizer_step.named_state = lambda optimizer, names: optimizer.state_dict()


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
    expected = "cannot be read" if fault == "torn" else OTHER_WIDTH
    assert re.search(expected, error["message"])
    assert "\n" not in error["message"]


@pytest.mark.parametrize("num_damaged", [1, 2, 3])
def test_a_damaged_checkpoint_of_another_job_is_named_with_the_next_that_is_intact(
    tmp_path: Path, num_damaged: int
) -> None:
    """It is not replaced silently. All damaged checkpoints have another hash than reported."""
    first, second = tmp_path / "first", tmp_path / "second"
    options = document(1, max_steps=6) | {"checkpoint": {"every_steps": 2, "keep": 3}}
    assert run_ranks(first, options, world_size=1) == [0]
    refs = checkpoint_refs(first)
    assert [ref.step for ref in refs] == [6, 4, 2]
    for ref in refs[:num_damaged]:
        path = next(Path(ref.url.removeprefix("file://")).glob("*.safetensors"))
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    spec = document(2) | {"init_from": {"job": "job-first", "step": 6}}
    codes = run_ranks(second, spec, world_size=2, init_from=refs[0], older=refs[1:])
    assert codes == [1, 1]
    for rank in range(2):
        (error,) = frames(second, rank=rank, kind="error")
        assert error["cause"] == "bad_data"
        assert error["message"].startswith(
            "init_from: the checkpoint of step 6 of job-first is damaged: "
        )
        intact = {1: 4, 2: 2}.get(num_damaged)
        expected = (
            "The job has no older checkpoint that is intact"
            if intact is None
            else f"to start from it, set init_from.step to {intact}"
        )
        assert error["message"].endswith(expected)


OTHER_WIDTH = (
    r"^init_from: the checkpoint belongs to a different model: body\.1\.weight is 24 x 64 in the "
    r"checkpoint and 25 x 64 in the model, body\.1\.bias is 24 in the checkpoint and 25 in the "
    r"model, .* \(and \d+ more tensors\)\. Use the same model"
)


@ONE_SET
@pytest.mark.parametrize(
    "parallel", [{"shard": 2}, {"shard": 2, "zero": 1}, {"pipeline": 2}], ids=str
)
def test_a_divided_model_refuses_weights_of_another_shape_in_the_same_words(
    parallel: dict[str, int], tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    resnet = {"name": "resnet", "depth": 8, "width": 4}
    spec = document(1, max_steps=1) | {"model": resnet}
    assert run_ranks(first, spec, world_size=1) == [0]
    (ref,) = checkpoint_refs(first)
    spec = document(2) | {"model": {**resnet, "depth": 14}, "parallel": parallel}
    spec["checkpoint"] = {"every_steps": 5}
    codes = run_ranks(second, spec, world_size=2, init_from=ref)
    assert set(codes) == {1}
    (error,) = frames(second, kind="error")
    assert error["cause"] == "bad_data"
    assert re.search(
        r"a different model: body\.\S+ is .* in the checkpoint and .* in the model",
        error["message"],
    )


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
    assert (
        "the checkpoint of step 2 was written by training on a different data set"
        in error["message"]
    )


@SOAK
@pytest.mark.parametrize("loader_workers", [soak(0), 2])
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
    one = checkpoint_files.load(checkpoint_refs(left_alone)[0])
    other = checkpoint_files.load(checkpoint_refs(killed, attempt=2)[0])
    assert_same(one.state, other.state)


def keep_nothing_in_memory_and_die(task: RankTask) -> None:
    keep_nothing_in_memory(task)
    die_at_step_18(task)
