"""Independent steps: local SGD and DiLoCo compared with their equations, with the same result on
every rank."""

from __future__ import annotations

import copy
import functools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dray.spec import JobSpec
from ray_workers.recipes import RECIPES
from ray_workers.shared import heartbeat
from ray_workers.shared.contracts import LEFT_EXIT_CODE, RankTask
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.checkpoint import checkpoint_files
from ray_workers.training.core.faultpoints import FaultPoint, arm
from ray_workers.training.data.sampler import DistributedBatchSampler
from ray_workers.training.parallel.meta_init import materialise
from tests.marks import ONE_SET, soak
from tests.unit.training.jobs import assert_same, die_at_step_18, document, series, weights
from tests.unit.training.ranks import checkpoint_refs, run_ranks

EVERY = 3
LR, MOMENTUM = 0.05, 0.9
OUTER = {"lr": 0.7, "momentum": 0.8}
STEPS_PER_EPOCH = 8
"""The model is evaluated after each epoch, so the ranks also agree at these points."""


def job(world_size: int, sync: dict[str, Any], **train: Any) -> dict[str, Any]:
    sgd = {"name": "sgd", "lr": LR, "momentum": MOMENTUM}
    # With this seed, no sample is at the threshold of a ReLU, where rounding would matter.
    options: dict[str, Any] = {
        "optimizer": sgd,
        "schedule": {"name": "constant"},
        "epochs": 2,
        "seed": 1,
    }
    return document(world_size, **(options | train)) | {"sync": sync}


def reference(spec: dict[str, Any], world_size: int, outer: dict[str, float] | None) -> nn.Module:
    """Compute all ranks, one after another, in plain tensor code; return the model on which they
    agree."""
    asked = JobSpec.model_validate(spec)
    workload = RECIPES["image_classification"].build(asked, DataPolicy.open())
    agreed = workload.model
    materialise(agreed, torch.device("cpu"), asked.train.seed)
    velocities = [torch.zeros_like(p) for p in agreed.parameters()]
    models = [copy.deepcopy(agreed) for _ in range(world_size)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=LR, momentum=MOMENTUM) for m in models]
    for step in range(1, 2 * STEPS_PER_EPOCH + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            batches = DistributedBatchSampler(
                len(workload.train),
                samples_per_step=asked.train.global_batch_size,
                seed=asked.train.seed,
                shares=[rank],
                num_shares=world_size,
            )
            batch = batches.at(step, step)[0]
            inputs, targets = workload.train.fetch(workload.train.rows[batch.indices.numpy()])
            optimizer.zero_grad()
            # Weighted by samples, so that the mean over all ranks is the mean over the batch.
            (workload.loss_sum(model(inputs), targets) * world_size / batch.num_global).backward()
            optimizer.step()
        if step % EVERY == 0 or step % STEPS_PER_EPOCH == 0:
            _agree(agreed, models, velocities, outer)
    return agreed


@torch.no_grad()
def _agree(
    agreed: nn.Module,
    models: list[nn.Module],
    velocities: list[Tensor],
    outer: dict[str, float] | None,
) -> None:
    everyones = zip(*(m.parameters() for m in models), strict=True)
    for weight, velocity, own in zip(agreed.parameters(), velocities, everyones, strict=True):
        mean = torch.stack(list(own)).mean(dim=0)
        if outer is None:
            weight.copy_(mean)
        else:  # DiLoCo, algorithm 1, with Nesterov's momentum
            change = weight - mean
            velocity.copy_(outer["momentum"] * velocity + change)
            weight -= outer["lr"] * (change + outer["momentum"] * velocity)
        for one in own:
            one.copy_(weight)


@ONE_SET
@pytest.mark.parametrize(
    ("outer", "world_size"),
    [(None, 4), (OUTER, 2), soak(None, 2), soak(OUTER, 4)],
    ids=["local SGD-4", "DiLoCo-2", "local SGD-2", "DiLoCo-4"],
)
def test_the_equation_holds(
    tmp_path: Path, world_size: int, outer: dict[str, float] | None
) -> None:
    spec = job(world_size, {"every": EVERY, "outer": outer})
    assert run_ranks(tmp_path, spec, world_size=world_size) == [0] * world_size
    found = weights(tmp_path)
    for name, expected in reference(spec, world_size, outer).state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)
    assert set(series(tmp_path, "train/loss")) == set(range(1, 17)), "rank 0 reports its own"


def test_nothing_is_sent_in_between(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, job(2, {"every": EVERY}), world_size=2) == [0, 0]
    sent = series(tmp_path, "perf/sent_bytes")
    agreed = {3, 6, 8, 9, 12, 15, 16}
    assert agreed <= set(sent)
    elements = sum(tensor.numel() for tensor in weights(tmp_path).values())
    dense = 4 * elements * len(agreed)
    assert dense <= sum(sent.values()) <= 1.2 * dense
    # The kernel can send the last bytes of a step after the next step has begun.
    late = sum(num_bytes for step, num_bytes in sent.items() if step not in agreed)
    assert late < 0.1 * dense
    by_all = series(tmp_path, "sync/sent_bytes").values()
    assert sum(by_all) * 8 == pytest.approx(2 * sum(sent.values()), rel=0.1), "of 8 steps each"
    assert min(series(tmp_path, "train/consensus_distance").values()) > 0.0


def test_it_resumes_equal_to_the_bit_with_the_state_that_each_rank_had(tmp_path: Path) -> None:
    adam = {"name": "adamw", "lr": 0.003}
    spec = job(2, {"every": EVERY, "outer": OUTER}, optimizer=adam, epochs=3)
    spec["checkpoint"] = {"every_steps": 5, "keep": 2}
    left_alone, killed = tmp_path / "left-alone", tmp_path / "killed"
    assert run_ranks(left_alone, spec, world_size=2) == [0, 0]
    codes = run_ranks(killed, spec, world_size=2, before=die_at_step_18)
    assert codes == [-signal.SIGKILL] * 2
    refs = checkpoint_refs(killed)
    assert refs[0].step == 15
    assert run_ranks(killed, spec, world_size=2, attempt=2, resume_from=refs) == [0, 0]
    one = checkpoint_files.load(checkpoint_refs(left_alone)[0])
    other = checkpoint_files.load(checkpoint_refs(killed, attempt=2)[0])
    assert len(one.state["local"]["inner"]) == 1
    assert_same(one.state, other.state)


def test_more_ranks_than_before_go_on_from_it(tmp_path: Path) -> None:
    before = job(2, {"every": EVERY, "outer": OUTER})
    assert run_ranks(tmp_path, before, world_size=2) == [0, 0]
    ref = checkpoint_refs(tmp_path)[0]
    after = job(3, {"every": EVERY, "outer": OUTER}, epochs=3)
    codes = run_ranks(tmp_path, after, world_size=3, attempt=2, resume_from=[ref])
    assert codes == [0, 0, 0]
    assert series(tmp_path, "val/loss", attempt=2)[24] < series(tmp_path, "val/loss")[16]


def test_who_is_asked_to_leave_does_when_the_ranks_agree(tmp_path: Path) -> None:
    spec = job(2, {"every": EVERY}, epochs=40)
    codes = run_ranks(tmp_path, spec, world_size=2, before=_ask_to_leave_at_step_4)
    assert codes[0] == LEFT_EXIT_CODE
    assert checkpoint_refs(tmp_path)[0].step == 6


def _ask_to_leave_at_step_4(task: RankTask) -> None:
    ask_rank_0_to_leave(task, at_step=4, others_end_at=7)


def ask_rank_0_to_leave(task: RankTask, *, at_step: int, others_end_at: int) -> None:
    """The supervisor terminates the others after rank 0 has left."""
    if task.rank == 0:
        ask = functools.partial(heartbeat.ask_to_leave, task.page_prefix)
        arm(FaultPoint.STEP_BEGINS, ask, at_step=at_step)
    arm(FaultPoint.STEP_BEGINS, lambda: os._exit(0), at_step=others_end_at)
