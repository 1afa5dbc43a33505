"""One rank of a job, started by torchrun, in the floating-point type that is asked for."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from benchmarks.equality.work import MESHES, document
from benchmarks.step_time.rank import rank_task
from dray.spec import JobSpec
from ray_workers.contracts import DataPolicy
from ray_workers.pages import Page
from ray_workers.recipes import RECIPES
from ray_workers.training import entry
from ray_workers.training.run import run

ALONE = "one process"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mesh", choices=[ALONE, *MESHES])
    parser.add_argument("dtype", choices=["float32", "float64"])
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    num_ranks, parallel = MESHES.get(options.mesh, (1, {}))
    spec = JobSpec.model_validate(document(options.source, num_ranks, parallel))
    torch.set_default_dtype(getattr(torch, options.dtype))
    task = rank_task(spec, int(os.environ["RANK"]), num_ranks, options.folder)
    os.environ.update(entry.environment(task, spec))
    torch.set_num_threads(1)
    run(task, spec, RECIPES["language_model"].build(spec, DataPolicy()), Page(None))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
