"""The process that calls MLflow's own client: `python -m service.tracking.mlflow.client`.

It has no database and decides nothing. Each line of its input is a call, and each line of its
output the answer, in any order; it ends with its input. Every call may be made again: nothing is
doubled then, since MLflow takes an equal point of a run once.

    service -> process   [number, method, arguments]
    process -> service   [number, "ok" | "refused" | "away", answer or sentence]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from service.storage.storage import Storage
from service.tracking.mlflow.models import MLMODEL, mlmodel
from service.tracking.mlflow.process import MLFLOW_CALLS
from service.tracking.mlflow.runs import JOB_TAG

MOST_METRICS, MOST_OTHERS = 1000, 100
"""Most of each kind that MLflow takes at a time."""
PIECE_BYTES = 8 << 20
_CREDENTIALS_OR_LOAD = (401, 403, 408, 429)


class Runs:
    """The calls, each of which may be made in a thread of its own."""

    def __init__(self, tracking_uri: str, storage_url: str) -> None:
        self._client = MlflowClient(tracking_uri)
        self._storage = Storage(storage_url)
        self._experiments: dict[str, str] = {}
        self._creating = threading.Lock()

    def begin(
        self, experiment: str, name: str, job_id: str, start_time_ms: int, params: dict[str, str]
    ) -> str:
        """The id of the job's run, which has the parameters. An earlier call may have created it,
        and its answer been lost."""
        with self._creating:
            experiment_id = self._experiment(experiment)
            found = self._client.search_runs(
                [experiment_id], f"tags.`{JOB_TAG}` = '{job_id}'", max_results=1
            )
            if found:
                run_id: str = found[0].info.run_id
            else:
                created = self._client.create_run(
                    experiment_id, start_time_ms, {JOB_TAG: job_id}, name
                )
                run_id = created.info.run_id
        for some in _in_parts([Param(*pair) for pair in params.items()], MOST_OTHERS):
            self._client.log_batch(run_id, params=some)
        return run_id

    def _experiment(self, name: str) -> str:
        if name not in self._experiments:
            found = self._client.get_experiment_by_name(name)
            self._experiments[name] = (
                self._client.create_experiment(name) if found is None else found.experiment_id
            )
        return self._experiments[name]

    def log(
        self, run_id: str, metrics: list[tuple[str, float, int, int]], tags: dict[str, str]
    ) -> None:
        for some in _in_parts([Metric(*metric) for metric in metrics], MOST_METRICS):
            self._client.log_batch(run_id, metrics=some)
        for others in _in_parts([RunTag(*pair) for pair in tags.items()], MOST_OTHERS):
            self._client.log_batch(run_id, tags=others)

    def set_status(self, run_id: str, status: str, end_time_ms: int | None) -> None:
        if end_time_ms is None:
            self._client.update_run(run_id, status)
        else:
            self._client.set_terminated(run_id, status, end_time_ms)

    def upload(self, run_id: str, path: str, url: str, size_bytes: int) -> None:
        """Upload an artifact under its path. Refused if its file is not in the storage."""
        key = self._storage.key_of(url)
        folder = Path(path).parent.as_posix()
        parent = None if folder == "." else folder
        local = self._storage.local_path(key)
        if local is not None and local.name == Path(path).name:
            self._client.log_artifact(run_id, str(local), parent)
            return
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / Path(path).name
            with copy.open("wb") as file:
                for start in range(0, size_bytes, PIECE_BYTES):
                    file.write(self._storage.read_bytes(key, start, start + PIECE_BYTES))
            self._client.log_artifact(run_id, str(copy), parent)

    def describe_model(self, run_id: str, config_url: str) -> None:
        """Add the description by which MLflow loads the model of a recipe."""
        config = json.loads(self._storage.read_bytes(self._storage.key_of(config_url)))
        self._client.log_text(run_id, mlmodel(config, run_id), MLMODEL)


def _in_parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _answer(runs: Runs, method: str, arguments: list[Any]) -> tuple[str, Any]:
    """ "away" for a failure that has nothing to do with the job."""
    try:
        return "ok", getattr(runs, method)(*arguments)
    except MlflowException as error:
        status = error.get_http_status_code()
        is_ours = 400 <= status < 500 and status not in _CREDENTIALS_OR_LOAD
        return "refused" if is_ours else "away", str(error)
    except (FileNotFoundError, LookupError, ValueError) as error:  # of an artifact
        return "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "away", f"{type(error).__name__}: {error}"


def main() -> None:
    tracking_uri, storage_url = sys.argv[1:]
    # MLflow and its plugins may print; their words go to the service's log.
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)
    runs, writing = Runs(tracking_uri, storage_url), threading.Lock()

    def work(number: int, method: str, arguments: list[Any]) -> None:
        line = json.dumps([number, *_answer(runs, method, arguments)])
        with writing:
            answers.write(line + "\n")
            answers.flush()

    with ThreadPoolExecutor(MLFLOW_CALLS) as pool:
        for line in sys.stdin:
            pool.submit(work, *json.loads(line))
        os._exit(0)  # the service is gone: nobody wants the answers that are still to come


if __name__ == "__main__":
    main()
