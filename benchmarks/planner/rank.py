"""Peak memory of one rank of a job during steps, as counted by torch's memory tracker."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.step_time.rank import rank_task
from dray.spec import JobSpec
from ray_workers.recipes import RECIPES
from ray_workers.shared.heartbeat import HeartbeatPage, RankAssignment
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.loop.trainer import Trainer
from ray_workers.training.parallel.data_parallel.local_sgd import LocalSgd
from ray_workers.training.parallel.gossip.synchronous import SynchronousGossip
from ray_workers.training.process import rank_main

NUM_STEPS = 3
CPU = torch.device("cpu")


class Totals(MemTracker):  # type: ignore[no-untyped-call]
    """Torch's tracker without module statistics, which require that each module is called once per
    step, and hooks that don't work with pipelines."""

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = _NoModules()  # type: ignore[assignment]


class _NoModules:
    is_bw = False
    parents: frozenset[str] = frozenset()

    def register_user_hooks(self, *_: Any) -> None: ...
    def clear_user_hooks(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: Any) -> None: ...


def peak_bytes(document: str, rank: int, world_size: int, folder: Path) -> int:
    """Return the peak size in bytes of all tensors in the steps after the first.

    Optimizer state exists from the first step on. The data set is read before and is not counted.
    The process must already be in a group of `world_size`.
    """
    spec = JobSpec.model_validate_json(document)
    assert spec.recipe is not None
    task = rank_task(spec, rank, world_size, folder)
    os.environ.update(rank_main.environment(task, spec))
    torch.set_num_threads(1)
    loop = Trainer(
        task, spec, RECIPES[spec.recipe].build(spec, DataPolicy.open()), HeartbeatPage(None)
    )
    tracker = Totals()
    model = getattr(loop.strategy, "model", None)
    if model is not None:  # otherwise it is created when the rank takes its place
        tracker.track_external(model)
    strategy = loop.strategy
    if isinstance(strategy, LocalSgd):
        tracker.track_external(*strategy.agreed)
    if isinstance(strategy, SynchronousGossip):
        tracker.track_external(*strategy.mixing.own)
    with tracker:
        loop.join_group(RankAssignment(0, rank, world_size, None))
        loop.restore()
        _step(loop, 1)
    with tracker:  # measures the peak from here on
        for step in range(2, NUM_STEPS + 1):
            _step(loop, step)
    found: int = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    loop.close()
    return found


def _step(trainer: Trainer, step: int) -> None:
    batch = trainer.load_batch(step)
    loss = trainer.forward_backward(step, batch)
    trainer.report(step, batch, loss, trainer.update(step, loss))
    trainer.commit(step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    found = peak_bytes((folder / "job.json").read_text(), rank, world_size, folder)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
