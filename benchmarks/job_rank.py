"""One rank of a recipe job, started by torchrun: dray's training without its service.

python -m benchmarks.job_rank document.json folder
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from benchmarks.step_time.rank import rank_task
from dray.spec import JobSpec
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.training.process import rank_main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("document", type=Path)
    parser.add_argument("folder", type=Path, help="folder for spools and results")
    options = parser.parse_args()
    train(options.document, options.folder)


def train(document: Path, folder: Path, dtype: str = "float32") -> None:
    """Train as the rank given by the environment, and then exit this process."""
    spec = JobSpec.model_validate_json(document.read_text())
    torch.set_default_dtype(getattr(torch, dtype))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    task = rank_task(spec, rank, world_size, folder)
    os.environ.update(rank_main.environment(task, spec))
    torch.set_num_threads(spec.resources.cpus_per_worker)
    rank_main.run_recipe(task, spec, HeartbeatPage(None))
    # Exit like dray's training processes: gloo's threads can abort during interpreter shutdown.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
