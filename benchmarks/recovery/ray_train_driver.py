"""The Ray Train side, which runs in a separate process."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from benchmarks.ray_train import serve
from benchmarks.recovery.work import NUM_RANKS


def train_rank(config: dict[str, Any]) -> None:
    """Train in the process group that Ray Train has created. Runs in each of its workers."""
    import torch
    import torch.distributed as dist
    from ray import train

    from benchmarks.recovery import plain

    class Reported:
        """Checkpoints saved with `ray.train.report`."""

        def newest(self) -> plain.State | None:
            checkpoint = train.get_checkpoint()
            if checkpoint is None:
                return None
            with checkpoint.as_directory() as folder:
                state: plain.State = torch.load(Path(folder, "state.pt"), weights_only=True)
            return state

        def save(self, step: int, state: plain.State) -> None:
            if dist.get_rank() != 0:
                train.report({"step": step})
                return
            with tempfile.TemporaryDirectory() as folder:
                torch.save(state, Path(folder, "state.pt"))
                train.report({"step": step}, checkpoint=train.Checkpoint.from_directory(folder))

    torch.set_num_threads(1)
    plain.train(Path(config["folder"]), Reported())


def main(home: Path) -> None:
    def trainer_of(folder: Path, name: str) -> TorchTrainer:
        return TorchTrainer(
            train_rank,
            train_loop_config={"folder": str(folder)},
            scaling_config=ScalingConfig(num_workers=NUM_RANKS, use_gpu=False),
            run_config=RunConfig(
                name=name,
                storage_path=str(home / "results"),
                failure_config=FailureConfig(max_failures=1),
            ),
        )

    serve(home, trainer_of)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
