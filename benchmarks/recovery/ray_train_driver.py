"""The Ray Train side, which runs in a separate process."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.torch.torchft_config import TorchftConfig

from benchmarks.ray_train import serve
from benchmarks.recovery.work import ELASTIC, NUM_RANKS, REPLICA_GROUPS, WHOLE


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


def train_replica(config: dict[str, Any]) -> None:
    """Train as a replica group of one rank with torchft, until the measurement is complete."""
    import torch
    from ray import train

    from benchmarks.recovery import torchft_rank

    folder = Path(config["folder"])
    torch.set_num_threads(1)
    torchft_rank.main(folder, train.get_context().get_world_rank(), is_over=(folder / WHOLE).exists)


def main(home: Path) -> None:
    def trainer_of(folder: Path, name: str, mode: str) -> TorchTrainer:
        has_replicas = mode == REPLICA_GROUPS
        # Ray Train takes a tuple for elastic training, which the types of its API don't mention.
        num_workers: Any = (1, NUM_RANKS) if mode == ELASTIC else NUM_RANKS
        lighthouse = {"min_replicas": 1, "join_timeout_ms": 10_000, "heartbeat_timeout_ms": 1_000}
        return TorchTrainer(
            train_replica if has_replicas else train_rank,
            train_loop_config={"folder": str(folder)},
            torch_config=TorchftConfig(lighthouse, backend="gloo") if has_replicas else None,
            scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=False),
            run_config=RunConfig(
                name=name,
                storage_path=str(home / "results"),
                failure_config=FailureConfig(max_failures=1),
            ),
        )

    serve(home, trainer_of)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
