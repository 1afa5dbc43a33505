"""One rank of the measurement, started by torchrun: a job in which each share of a batch takes a
given time.

python -m benchmarks.topologies.rank document.json folder slowness
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from benchmarks.job_rank import train
from benchmarks.topologies.work import NUM_RANKS, SHARE_S, SLOW_RANK
from dray.spec import JobSpec, ParameterServer
from ray_workers.training.core.faultpoints import FaultPoint, arm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("document", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("slowness", type=float, help="slowdown factor of the slow rank")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    spec = JobSpec.model_validate_json(options.document.read_text())
    slowness = options.slowness if rank == SLOW_RANK else 1.0
    computed_s = SHARE_S * quarters_of(spec) * slowness
    arm(FaultPoint.SHARE_BEGINS, lambda: time.sleep(computed_s))
    if rank == 0:
        began = time.perf_counter()
        evaluated_s: list[float] = []

        def begin() -> None:
            nonlocal began
            began = time.perf_counter()

        def evaluate() -> None:
            evaluated_s.append(time.perf_counter() - began)
            (options.folder / "seconds.json").write_text(json.dumps(evaluated_s))

        arm(FaultPoint.RESTORED, begin)
        arm(FaultPoint.BEFORE_EVALUATION, evaluate)
    train(options.document, options.folder)


def quarters_of(spec: JobSpec) -> float:
    """Return how many quarters of a batch a rank computes in one step."""
    sync = spec.sync
    if isinstance(sync, ParameterServer) and sync.mode != "synchronous":
        return NUM_RANKS
    return NUM_RANKS / spec.num_ranks_that_train


if __name__ == "__main__":
    main()
