"""The peer of metric ingest, run by the Python of MLflow's own virtual environment.

Arguments: the SQLite file, the points of a batch, the keys. For each line on standard input, a
number of batches, it logs so many through MLflow's SQLAlchemy store and answers the seconds that
each took, as JSON. It imports nothing of dray's.
"""

from __future__ import annotations

import json
import math
import sys
import time


def main() -> None:
    from mlflow.entities import Metric
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    path, batch_points, keys = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    store = SqlAlchemyStore(f"sqlite:///{path}", f"{path}.artifacts")
    run = store.create_run("0", "user", 0, [], "run")
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
            store.log_batch(run.info.run_id, batch, [], [])
            took.append(time.perf_counter() - began)
        print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main()
