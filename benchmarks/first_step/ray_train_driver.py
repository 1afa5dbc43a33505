"""The Ray Train side, in a process of its own: a Ray cluster that runs, and a driver on it.

Reads a folder per line from standard input, trains once, and answers with a line of JSON: when
`fit()` was called, in Unix seconds. Everything that Ray prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from benchmarks.first_step.work import NUM_RANKS

NUM_CPUS = 4
"""The ranks take two; Ray Train's own actors and the raylet's idle workers are not short."""


def train_rank(config: dict[str, Any]) -> None:
    """Runs in each of Ray Train's workers, in the process group that it has formed."""
    entered = time.time()
    from benchmarks.first_step import plain

    plain.train(Path(config["folder"]), entered)


def main(home: Path) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    temp_dir = str(home / "ray")
    ray.init(num_cpus=NUM_CPUS, include_dashboard=False, _temp_dir=temp_dir)
    answers.write("{}\n")
    for number, line in enumerate(sys.stdin):
        trainer = TorchTrainer(
            train_rank,
            train_loop_config={"folder": line.strip()},
            scaling_config=ScalingConfig(num_workers=NUM_RANKS, use_gpu=False),
            run_config=RunConfig(name=f"run-{number}", storage_path=str(home / "results")),
        )
        called = time.time()
        trainer.fit()
        answers.write(json.dumps({"called": called}) + "\n")
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
