"""Trains one job document in this process, as a rank alone would, and prints what it measured.

python -m benchmarks.large_batch.train '{"recipe": ...}'
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path

import torch

from dray.spec import JobSpec
from ray_workers.contracts import DataPolicy, RankTask
from ray_workers.pages import Page
from ray_workers.recipes import RECIPES
from ray_workers.training.loop import Loop
from ray_workers.training.membership import Membership


def measured(document: dict[str, object]) -> dict[str, float]:
    """The metrics of the last evaluation."""
    spec = JobSpec.model_validate(document)
    assert spec.recipe is not None
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as folder:
        task = RankTask(
            job_id="job",
            attempt=1,
            rank=0,
            incarnation=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            node_rank=0,
            master_addr="127.0.0.1",
            master_port=0,
            spec=spec.model_dump(mode="json"),
            spool_dir=str(Path(folder, "spool")),
            checkpoint_url=Path(folder, "checkpoints").as_uri(),
            artifact_url=Path(folder, "artifacts").as_uri(),
        )
        workload = RECIPES[spec.recipe].build(spec, DataPolicy())
        loop = Loop(task, spec, workload, Page(None))
        membership = Membership(task, loop.page)
        membership.join(lambda: loop.take(membership.place))
        loop.enter()
        try:
            loop.fit(membership)
        finally:
            loop.end()
        return loop.metrics


def main() -> None:
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        found = measured(json.loads(sys.argv[1]))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
