"""A group changes its global batch size between two rounds, while the order of samples is
unchanged."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_workers.shared.contracts import BATCH_SIZE, RankTask
from ray_workers.training.core.faultpoints import FaultPoint, arm, arm_with
from ray_workers.training.data.sampler import epoch_order, samples_of
from ray_workers.training.loop.step_reporter import Batch
from ray_workers.training.loop.trainer import Trainer
from tests.marks import SOAK
from tests.unit.training.elastic.test_recovery import once
from tests.unit.training.elastic.test_resizing import Resized
from tests.unit.training.jobs import assert_same, digits, document, series, weights
from tests.unit.training.ranks import checkpoint_refs, frames, replaced, run_ranks

LEAST, DECLARED, LARGER = 50, 100, 200
STEPS_PER_EPOCH = 29
"""Number of batches of minimum size in an epoch; the digits have 1,438 training samples."""


def ranged(num_workers: int, **train: Any) -> dict[str, Any]:
    options = {"global_batch_size": DECLARED, "batch_range": [LEAST, 400], "measure_noise": True}
    spec = document(num_workers, **{**options, "schedule": {"name": "constant"}, **train})
    return spec | {"elastic": {"min_workers": 1}, "checkpoint": {"every_steps": 20, "keep": 9}}


def note_samples(task: RankTask) -> None:
    """Record the samples in each batch of this rank, in order, with the first step of the batch."""

    def note(trainer: Trainer) -> None:
        begins.append(trainer.progress.step + 1)

    def note_batch(batch: Batch) -> None:
        (share,) = batch.feed.shares
        rows = {"first": begins[-1], "rank": task.rank, "rows": share.batch.indices.tolist()}
        with Path(f"{task.page_prefix}.samples").open("a") as file:
            file.write(json.dumps(rows) + "\n")

    begins: list[int] = []
    arm_with(FaultPoint.STEP_BEGINS, note)
    arm_with(FaultPoint.DATA_LOADED, note_batch)


def _samples(before: int, last: int) -> int:
    """Return the number of samples in the steps after `before`; the last step of an epoch has
    38."""
    return sum(38 if step % STEPS_PER_EPOCH == 0 else LEAST for step in range(before + 1, last + 1))


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(1, 1, 50), (1, 4, 200), (28, 29, 50 + 38), (29, 29, 38), (30, 31, 100), (57, 58, 50 + 38)],
)
def test_the_samples_of_a_batch_of_steps(first: int, last: int, expected: int) -> None:
    assert samples_of(first, last, num_samples=1438, samples_per_step=LEAST) == expected


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that runs on one rank and then, without stopping, on two with twice the batch size."""
    home = tmp_path_factory.mktemp("changed")
    group = Resized(home, ranged(2), 1, [(9, 1)], note_samples)
    try:
        group.gang.start()
        group.until_step(4)
        group.gain(LARGER)
        group.gang.wait(recovers=False)
        assert [process.exitcode for process in group.gang.processes] == [0, 0]
    finally:
        group.gang.kill()
    return home


def batch_sizes(home: Path, attempt: int = 1) -> dict[int, float]:
    return series(home, BATCH_SIZE, attempt=attempt)


def test_all_ranks_change_at_one_step_and_each_epoch_has_every_sample_once_in_order(
    changed: Path,
) -> None:
    seen: dict[int, dict[int, list[int]]] = {}
    for path in (changed / "attempt-1" / "pages").glob("*.samples"):
        for line in path.read_text().splitlines():
            noted = json.loads(line)
            seen.setdefault(noted["first"], {})[noted["rank"]] = noted["rows"]
    firsts = sorted(seen)
    for epoch in range(3):
        first, last = epoch * STEPS_PER_EPOCH + 1, (epoch + 1) * STEPS_PER_EPOCH
        of_epoch = [seen[at] for at in firsts if first <= at <= last]
        rows = [row for batch in of_epoch for rank in sorted(batch) for row in batch[rank]]
        assert rows == epoch_order(len(digits().train), 0, epoch).tolist()
    told = batch_sizes(changed)
    assert sorted(told) == [*(at - 1 for at in firsts[1:]), 3 * STEPS_PER_EPOCH]
    (change,) = [step for step, later in pairwise(sorted(told)) if told[step] != told[later]]
    assert set(told.values()) == {DECLARED, LARGER}
    assert all((size == LARGER) is (step > change) for step, size in told.items())
    before = [at for at in firsts if at <= change]
    assert all(set(seen[at]) == ({0} if at in before else {0, 1}) for at in firsts)


def test_the_rate_follows_the_batch(changed: Path) -> None:
    rates = series(changed, "train/lr")
    steps = [0, *sorted(rates)]
    for before, step in pairwise(steps):
        assert rates[step] == pytest.approx(0.003 * math.sqrt(_samples(before, step) / DECLARED))


@SOAK
def test_a_job_that_resumes_goes_on_with_the_batch_that_it_had_and_learns_the_same_to_the_bit(
    changed: Path, tmp_path: Path
) -> None:
    refs = [ref for ref in checkpoint_refs(changed) if ref.step == 40]
    assert run_ranks(tmp_path, ranged(2), world_size=2, resume_from=refs) == [0, 0]
    told = batch_sizes(tmp_path)
    assert told == {step: size for step, size in batch_sizes(changed).items() if step > 40}
    for key in ("train/loss", "train/grad_norm", "train/lr", "val/loss"):
        whole = series(changed, key)
        assert series(tmp_path, key) == {s: v for s, v in whole.items() if s > 40}, key
    assert_same(weights(tmp_path), weights(changed))
    (told_of,) = frames(tmp_path, kind="resumed")
    assert told_of["position"] == {
        "epoch": 1,
        "step_in_epoch": 40 - STEPS_PER_EPOCH,
        "samples": (40 - STEPS_PER_EPOCH) * LEAST,
    }


def die_in_step_58(task: RankTask) -> None:
    """Kill the first process of the second rank."""
    if task.rank == 1 and task.incarnation == 0:
        act = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
        arm(FaultPoint.BEFORE_OPTIMIZER, act, at_step=2 * STEPS_PER_EPOCH)


@SOAK
def test_a_rank_that_is_replaced_has_the_batch_of_the_others(changed: Path, tmp_path: Path) -> None:
    """The batch size comes from their state, because the round in which the rank joins does not
    specify one."""
    refs = [ref for ref in checkpoint_refs(changed) if ref.step == 40]
    codes = run_ranks(
        *(tmp_path, ranged(2)),
        world_size=2,
        resume_from=refs,
        before=die_in_step_58,
        recovers=True,
    )
    assert (codes, replaced(tmp_path)) == ([0, 0], [1])
    whole = series(changed, "train/loss")
    assert once(tmp_path, "train/loss") == {s: v for s, v in whole.items() if s > 40}
    assert_same(weights(tmp_path), weights(changed))


def test_a_range_changes_nothing_while_the_batch_is_the_documents(tmp_path: Path) -> None:
    """This applies up to the short batch at the end of the epoch, whose learning rate depends on
    its size."""
    plain = document(2, global_batch_size=DECLARED, max_steps=14, measure_noise=True)
    with_range = ranged(2, batch_range=[DECLARED, 400], max_steps=14)
    plain["train"]["schedule"] = with_range["train"]["schedule"]
    for name, spec in (("plain", plain), ("ranged", with_range)):
        assert run_ranks(tmp_path / name, spec, world_size=2) == [0, 0]
    assert_same(weights(tmp_path / "ranged"), weights(tmp_path / "plain"))
    one, other = (series(tmp_path / name, "train/loss") for name in ("plain", "ranged"))
    assert one == other


def test_a_larger_batch_has_the_gradient_of_its_samples(tmp_path: Path) -> None:
    """A batch of twice the minimum is the same as in a job that specifies this size."""
    plain = document(2, global_batch_size=DECLARED, max_steps=10, measure_noise=True)
    with_range = ranged(2, max_steps=20)
    plain["train"]["schedule"] = with_range["train"]["schedule"]
    for name, spec in (("plain", plain), ("ranged", with_range)):
        assert run_ranks(tmp_path / name, spec, world_size=2) == [0, 0]
    one, other = (series(tmp_path / name, "train/loss") for name in ("plain", "ranged"))
    assert {2 * step: loss for step, loss in one.items()} == other
    for name, tensor in weights(tmp_path / "plain").items():
        assert torch.equal(weights(tmp_path / "ranged")[name], tensor), name
