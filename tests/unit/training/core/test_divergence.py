"""If values in training are not finite, this is reported, and training ends or continues as
specified."""

from __future__ import annotations

import functools
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dray.spec import OnDivergence
from dray.train.prepared.dtensor import local
from ray_workers.shared.contracts import Cause, RankTask
from ray_workers.training.core.divergence import MOST_IN_A_ROW, DivergedError, Divergence
from ray_workers.training.core.faultpoints import FaultPoint, arm, arm_with
from ray_workers.training.data.device_dataset import InMemorySamples
from ray_workers.training.loop.trainer import Trainer
from ray_workers.training.parallel.model_parallel.sharded_gradients import ShardedGradientEngine
from tests.marks import ONE_SET, SOAK, soak
from tests.unit.training.jobs import document, series, wait_for_checkpoint, weights
from tests.unit.training.ranks import checkpoint_refs, frames, run_ranks

BAD_STEP = 7


def _spoil(first: int, stop: int, task: RankTask) -> None:
    """Set a gradient in these steps to NaN; with a divided model, only on rank 0."""

    def spoil(trainer: Trainer) -> None:
        is_divided = isinstance(trainer.strategy.gradients, ShardedGradientEngine)
        if trainer.progress.step + 1 in range(first, stop) and not (is_divided and task.rank):
            parameters = trainer.strategy.model.parameters()
            grad = next(p.grad for p in parameters if p.grad is not None)
            local(grad).view(-1)[0] = math.nan

    arm_with(FaultPoint.BACKWARD_DONE, spoil)


def _overflow(first: int, stop: int, task: RankTask) -> None:
    """Make the loss in these steps infinite; the gradients, and therefore the weights, are
    finite."""

    def overflow(trainer: Trainer) -> None:
        if trainer.progress.step + 1 in range(first, stop):
            carried = trainer.strategy.gradients._objective.slot.grad
            assert carried is not None
            carried.fill_(math.inf)

    arm_with(FaultPoint.BACKWARD_DONE, overflow)


ONE = functools.partial(_spoil, BAD_STEP, BAD_STEP + 1)
EVER = functools.partial(_spoil, BAD_STEP, 10**6)
LAST = functools.partial(_spoil, 18, 10**6)


def job(rule: OnDivergence, **train: Any) -> dict[str, Any]:
    saved = {"checkpoint": {"every_steps": 2, "keep": 20}}
    return document(2, on_divergence=rule, max_steps=20, **train) | saved


@pytest.mark.parametrize("rule", ["fail", "rollback"])
def test_a_training_that_diverges_ends_and_leaves_no_checkpoint_of_it(
    rule: OnDivergence, tmp_path: Path
) -> None:
    assert run_ranks(tmp_path, job(rule), world_size=2, before=ONE) == [1, 1]
    for rank in (0, 1):
        (error,) = frames(tmp_path, rank=rank, kind="error")
        assert (error["cause"], error["type"]) == (Cause.DIVERGED, "DivergedError")
        assert (
            f"at step {BAD_STEP + MOST_IN_A_ROW - 1}. The loss or the gradient norm has been non-"
            in error["message"]
        )
        assert f"since step {BAD_STEP}." in error["message"]
    (told,) = frames(tmp_path, kind="divergence")
    assert (told["step"], told["then"]) == (BAD_STEP, rule)
    assert not frames(tmp_path, rank=1, kind="divergence")
    assert {ref.step for ref in checkpoint_refs(tmp_path)} == {2, 4, 6}
    assert max(series(tmp_path, "train/loss")) == BAD_STEP + MOST_IN_A_ROW - 1


@pytest.mark.parametrize("rule", [soak("fail"), "rollback", "skip_step"])
def test_no_checkpoint_is_saved_while_the_loss_overflows_though_the_weights_are_finite(
    rule: OnDivergence, tmp_path: Path
) -> None:
    """A later attempt would resume in the middle of the non-finite steps."""
    overflow = functools.partial(_overflow, BAD_STEP, BAD_STEP + 5)
    assert run_ranks(tmp_path, job(rule), world_size=2, before=overflow) == [0, 0]
    found = {ref.step for ref in checkpoint_refs(tmp_path)}
    assert found == {2, 4, 6, 12, 14, 16, 18, 20}


def test_with_a_warning_alone_every_checkpoint_is_saved(tmp_path: Path) -> None:
    overflow = functools.partial(_overflow, BAD_STEP, BAD_STEP + 5)
    assert run_ranks(tmp_path, job("warn"), world_size=2, before=overflow) == [0, 0]
    assert {ref.step for ref in checkpoint_refs(tmp_path)} == set(range(2, 21, 2))


@SOAK
def test_a_rank_that_replaces_rank_0_during_a_divergence_saves_no_checkpoint_of_it(
    tmp_path: Path,
) -> None:
    spec = job("rollback")
    assert run_ranks(tmp_path, spec, world_size=2, before=_overflow_and_die, recovers=True) == [
        0,
        0,
    ]
    found = {ref.step for ref in checkpoint_refs(tmp_path)}
    assert found == {2, 4, 6, 12, 14, 16, 18, 20}


def _overflow_and_die(task: RankTask) -> None:
    _overflow(BAD_STEP, BAD_STEP + 5, task)
    if task.rank == 0 and task.incarnation == 0:
        arm(FaultPoint.STEP_BEGINS, functools.partial(_die_after_save, task), at_step=BAD_STEP + 3)


def _die_after_save(task: RankTask) -> None:
    wait_for_checkpoint(task, BAD_STEP - 1)
    os.kill(os.getpid(), signal.SIGKILL)


@ONE_SET
@pytest.mark.parametrize("rule", ["fail", soak("rollback"), "warn", soak("skip_step")])
def test_an_evaluation_that_is_not_finite_is_reported_and_fails_at_the_end(
    rule: OnDivergence, tmp_path: Path
) -> None:
    spec = job(rule)
    codes = run_ranks(tmp_path, spec, world_size=2, before=_spoil_the_validation)
    assert all(map(math.isfinite, series(tmp_path, "train/loss").values()))
    (told,) = frames(tmp_path, kind="divergence")
    assert (told["step"], told["grad_norm"]) == (8, None)
    assert math.isnan(told["loss"])
    if rule == "warn":
        assert codes == [0, 0]
        return
    assert codes == [1, 1]
    (error,) = frames(tmp_path, kind="error")
    assert error["cause"] == Cause.DIVERGED
    assert "val/loss is nan at the end" in error["message"]


def _spoil_the_validation(task: RankTask) -> None:
    """Make one of the validation samples non-finite."""

    def spoil(trainer: Trainer) -> None:
        samples = trainer.evaluation._samples
        assert isinstance(samples, InMemorySamples)
        samples.inputs.view(-1)[0] = math.nan

    arm_with(FaultPoint.GROUP_JOINED, spoil)


def test_a_job_that_ends_before_that_has_no_result(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, job("fail") | {"checkpoint": {}}, world_size=2, before=LAST) == [
        1,
        1,
    ]
    assert not (tmp_path / "attempt-1" / "artifacts").exists()


def test_a_warning_ends_nothing(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, job("warn"), world_size=2, before=EVER) == [0, 0]
    assert len(frames(tmp_path, kind="divergence")) == 1
    assert {ref.step for ref in checkpoint_refs(tmp_path)} == {2, 4, 6}


@ONE_SET
@pytest.mark.parametrize("zero", [None, soak(1), 3], ids=["replicas", "zero 1", "fsdp"])
def test_a_step_that_is_skipped_changes_no_weight(zero: int | None, tmp_path: Path) -> None:
    spec = job("skip_step", schedule={"name": "constant"})
    if zero is not None:
        spec["parallel"] = {"shard": 2, "zero": zero}
    assert run_ranks(tmp_path, spec, world_size=2, before=ONE) == [0, 0]
    assert all(bool(tensor.isfinite().all()) for tensor in weights(tmp_path).values())
    losses = series(tmp_path, "train/loss")
    assert all(map(math.isfinite, losses.values()))
    norms = series(tmp_path, "train/grad_norm")
    assert [step for step, norm in norms.items() if not math.isfinite(norm)] == [BAD_STEP]


def test_weights_that_fail_at_every_sample_are_no_result_of_skipped_steps(tmp_path: Path) -> None:
    too_fast = {"optimizer": {"name": "sgd", "lr": 1000}, "schedule": {"name": "constant"}}
    spec = job("skip_step", **too_fast)
    spec["train"]["max_steps"] = MOST_IN_A_ROW
    spec["model"] = {"name": "cnn"}
    assert run_ranks(tmp_path, spec, world_size=2) == [1, 1]
    (error,) = frames(tmp_path, kind="error")
    assert error["cause"] == Cause.DIVERGED
    assert not math.isfinite(series(tmp_path, "val/loss")[MOST_IN_A_ROW])


def test_skipped_steps_at_the_end_leave_the_weights_before_them(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, job("skip_step"), world_size=2, before=LAST) == [0, 0]
    assert math.isfinite(series(tmp_path, "val/loss")[20])


def test_nothing_but_skipped_steps_ends_the_job(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, job("skip_step"), world_size=2, before=EVER) == [1, 1]
    (error,) = frames(tmp_path, kind="error")
    assert error["cause"] == Cause.DIVERGED


def test_steps_that_the_loss_scale_skips_do_not_count() -> None:
    watch = Divergence("fail", is_scaled=True)
    for step in range(1, 3 * MOST_IN_A_ROW):
        watch.step_done(0, step, 1.0, math.inf)
    watch.check_end(1.0)


def test_gradients_that_are_finite_at_no_scale_end_the_job(tmp_path: Path) -> None:
    spec = document(1, precision="fp16", epochs=10)
    assert run_ranks(tmp_path, spec, world_size=1, before=EVER) == [1]
    (error,) = frames(tmp_path, kind="error")
    assert error["cause"] == Cause.DIVERGED
    assert "not finite at any loss scale" in error["message"]
    assert not frames(tmp_path, kind="divergence")


def test_a_training_in_fp16_that_diverges_ends_as_soon_as_any(tmp_path: Path) -> None:
    sgd = {"name": "sgd", "lr": 1000.0}
    spec = document(1, precision="fp16", optimizer=sgd, schedule={"name": "constant"}, epochs=10)
    assert run_ranks(tmp_path, spec, world_size=1) == [1]
    (error,) = frames(tmp_path, kind="error")
    (told,) = frames(tmp_path, kind="divergence")
    assert error["cause"] == Cause.DIVERGED
    assert math.isnan(float(told["loss"]))
    assert max(series(tmp_path, "train/loss")) == told["step"] + MOST_IN_A_ROW - 1


def test_a_loss_that_is_no_number_counts_also_where_the_loss_is_scaled() -> None:
    watch = Divergence("fail", is_scaled=True)
    for step in range(1, MOST_IN_A_ROW):
        watch.step_done(1, step, math.nan, math.nan)
    with pytest.raises(DivergedError, match="since step 1"):
        watch.check_end(1.0)
    with pytest.raises(DivergedError, match="since step 1"):
        watch.step_done(1, MOST_IN_A_ROW, math.nan, math.nan)


def test_a_finite_step_begins_the_count_anew_and_a_repeated_one_counts_once() -> None:
    watch = Divergence("fail", is_scaled=False)
    for step in range(1, MOST_IN_A_ROW):
        watch.step_done(1, step, math.nan, 1.0)
    watch.step_done(1, MOST_IN_A_ROW - 1, math.nan, 1.0)
    watch.step_done(1, MOST_IN_A_ROW, 1.0, 1.0)
    watch.check_end(1.0)
    for step in range(MOST_IN_A_ROW + 1, 2 * MOST_IN_A_ROW):
        watch.step_done(1, step, 1.0, math.inf)
    with pytest.raises(DivergedError, match=f"since step {MOST_IN_A_ROW + 1}"):
        watch.step_done(1, 2 * MOST_IN_A_ROW, 1.0, math.inf)
