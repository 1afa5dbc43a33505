"""One rank of the measurement, started by torchrun: a job of which each share takes a given time.

python -m benchmarks.topologies.rank document.json folder slowness
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from benchmarks.job_rank import train
from benchmarks.topologies.work import SHARE_S, SLOW_RANK
from ray_workers.training.core.faultpoints import FaultPoint, arm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("document", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("slowness", type=float, help="of the slow rank")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    share_s = SHARE_S * (options.slowness if rank == SLOW_RANK else 1.0)
    arm(FaultPoint.SHARE_BEGINS, lambda: time.sleep(share_s))
    if rank == 0:
        began = time.perf_counter()

        def begin() -> None:
            nonlocal began
            began = time.perf_counter()

        def end() -> None:
            took_s = time.perf_counter() - began
            (options.folder / "seconds.json").write_text(json.dumps(took_s))

        arm(FaultPoint.RESTORED, begin)
        arm(FaultPoint.BEFORE_EVALUATION, end)  # there is one, after the last step
    train(options.document, options.folder)


if __name__ == "__main__":
    main()
