"""The peer for metric ingest, run with the Python of MLflow's virtual environment.

Arguments: the SQLite file, the number of points per batch, and the keys. Each line on standard
input is a number of batches. The script logs this many batches with `MlflowClient` directly on the
SQLite store, and prints the seconds of each as JSON. It imports nothing from dray.
"""

from __future__ import annotations

import json
import math
import sys
import time


def main() -> None:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    path, batch_points, keys = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    client = MlflowClient(f"sqlite:///{path}")
    run = client.create_run("0")
    num_steps = batch_points // len(keys)
    step = 1
    print("ready", flush=True)
    for line in sys.stdin:
        took = []
        for _ in range(int(line)):
            batch = [
                Metric(key, math.sin(at / 1000), 1000 * at, at)
                for at in range(step, step + num_steps)
                for key in keys
            ]
            step += num_steps
            began = time.perf_counter()
            client.log_batch(run.info.run_id, batch)
            took.append(time.perf_counter() - began)
        print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main()
