"""One rank of the measurement, started by torchrun: both loops in one process, in alternating
blocks."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from benchmarks.step_time.rank import AlternatingLoop, alternate, rank_task
from benchmarks.strategies.plain import PlainLoop
from benchmarks.strategies.work import STEPS_PER_BLOCK, WAYS, document
from ray_workers.recipes import RECIPES
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.process import rank_main


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("num_blocks", type=int)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # One more step than is timed, because the model is evaluated and saved after the last one.
    spec = document(options.way, options.source, options.num_blocks * STEPS_PER_BLOCK + 1)
    task = rank_task(spec, rank, world_size, options.folder)
    os.environ.update(rank_main.environment(task, spec))
    torch.set_num_threads(spec.resources.cpus_per_worker)
    workload, plain = (
        RECIPES["language_model"].build(spec, DataPolicy.open())
        for _ in ("dray's", "the plain loop's")
    )
    loop = AlternatingLoop(
        task, spec, workload, lambda: PlainLoop(options.way, plain, spec.train), STEPS_PER_BLOCK
    )
    alternate(loop, options.folder)


if __name__ == "__main__":
    main()
