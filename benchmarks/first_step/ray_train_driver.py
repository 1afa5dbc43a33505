"""The Ray Train side, which runs in a separate process."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from benchmarks.first_step.work import NUM_RANKS
from benchmarks.ray_train import serve


def train_rank(config: dict[str, Any]) -> None:
    """Train in the process group that Ray Train has created. Runs in each of its workers."""
    entered = time.time()
    from benchmarks.first_step import plain

    plain.train(Path(config["folder"]), entered)


def main(home: Path) -> None:
    def trainer_of(folder: Path, name: str) -> TorchTrainer:
        return TorchTrainer(
            train_rank,
            train_loop_config={"folder": str(folder)},
            scaling_config=ScalingConfig(num_workers=NUM_RANKS, use_gpu=False),
            run_config=RunConfig(name=name, storage_path=str(home / "results")),
        )

    serve(home, trainer_of)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
