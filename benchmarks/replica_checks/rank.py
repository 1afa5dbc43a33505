"""One rank of the measurement, started by torchrun: blocks of steps with and without comparisons
alternate (A B B A) in the same training."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.replica_checks.work import STEPS_PER_BLOCK, spec_of
from benchmarks.step_time.rank import AlternatingLoop, alternate, rank_task
from ray_workers.recipes import RECIPES
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.process import rank_main


class NoLoop:
    """The other loop of `AlternatingLoop`, which is not used."""

    def train(self, num_steps: int) -> None:
        raise NotImplementedError


class CheckedLoop(AlternatingLoop):
    """Compares replicas in blocks 1, 4, 5, 8 and so on. `plain_s` are the other blocks' times."""

    @contextmanager
    def steps_are_timed(
        self, sent_bytes: Callable[[], int | None], num_ranks: int
    ) -> Iterator[None]:
        self._every = self.replica_check._every
        with super().steps_are_timed(sent_bytes, num_ranks):
            yield

    def _end_block(self) -> None:
        self._wait_for_device()
        took = time.perf_counter() - self._began
        (self.dray_s if self.replica_check._every else self.plain_s).append(took)
        number = len(self.dray_s) + len(self.plain_s)
        self.replica_check._every = self._every if number % 4 in (0, 3) else None
        self._meet()
        self.reporter.restart_clock()
        self._began = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("every", type=int)
    parser.add_argument("num_blocks", type=int)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    spec = spec_of(options.every, options.num_blocks * STEPS_PER_BLOCK + 1)
    task = rank_task(spec, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options.folder)
    os.environ.update(rank_main.environment(task, spec))
    torch.set_num_threads(spec.resources.cpus_per_worker)
    workload = RECIPES["image_classification"].build(spec, DataPolicy.open())
    loop = CheckedLoop(task, spec, workload, NoLoop, STEPS_PER_BLOCK)
    alternate(loop, options.folder)


if __name__ == "__main__":
    main()
