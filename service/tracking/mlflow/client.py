"""The process that calls MLflow's own client: `python -m service.tracking.mlflow.client`.

The process has no database and makes no decisions. The first line of its input contains the
addresses of MLflow and the storage. The addresses can contain passwords, so they are not passed as
arguments, which every user of the machine can read. Each further line is a call, and each line of
the output is a response. Responses can be in any order. The process exits when its input is closed.
Calls can be repeated, because MLflow stores identical points of a run only once.

    service -> process   [tracking URI, storage URL]
    service -> process   [number, method, arguments]
    process -> service   [number, "ok" | "refused" | "away", answer or message]
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
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
from service.tracking.mlflow.runs import JOB_TAG, VERSION_TAG

MOST_METRICS, MOST_OTHERS = 1000, 100
"""Maximum number of metrics, and of parameters or tags, that MLflow accepts in one request."""
PIECE_BYTES = 8 << 20
MOST_CHARS = 2000
"""Maximum length of an error message, which could contain a server's entire response."""
_CREDENTIALS_OR_LOAD = (401, 403, 408, 429)


class Runs:
    """The methods that can be called. Each call can run in its own thread."""

    def __init__(self, tracking_uri: str, storage_url: str) -> None:
        self._client = MlflowClient(tracking_uri)
        self._storage = Storage(storage_url)
        self._creating = threading.Lock()

    def begin(
        self, experiment: str, name: str, job_id: str, start_time_ms: int, params: dict[str, str]
    ) -> str:
        """Create the job's run with its parameters, unless it already exists, and return its id."""
        with self._creating:
            experiment_id = self._experiment_id(experiment)
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
        if not run_id:  # a server that is not MLflow could answer everything with {}
            raise RuntimeError(
                "the server at MLflow's address created no run: is it an MLflow server?"
            )
        for some in _in_parts([Param(*pair) for pair in params.items()], MOST_OTHERS):
            self._client.log_batch(run_id, params=some)
        return run_id

    def _experiment_id(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            experiment_id: str = found.experiment_id
            return experiment_id
        created: str = self._client.create_experiment(name)
        return created

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
        """Upload an artifact under its path. If the file is missing, the call is refused."""
        key = self._storage.key_of(url)
        folder, name = posixpath.split(path)
        local = self._storage.local_path(key)
        with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as copy:
            named = Path(scratch) / name
            if local is not None:
                named.symlink_to(local.resolve(strict=True))
            else:
                # The copy is an unnamed file, so it is deleted even if this process is killed.
                for start in range(0, size_bytes, PIECE_BYTES):
                    copy.write(self._storage.read_bytes(key, start, start + PIECE_BYTES))
                copy.flush()
                named.symlink_to(f"/proc/{os.getpid()}/fd/{copy.fileno()}")
            self._client.log_artifact(run_id, str(named), folder or None)

    def describe_model(self, run_id: str, config_url: str) -> None:
        """Add the description that MLflow needs to load a recipe's model."""
        config = json.loads(self._storage.read_bytes(self._storage.key_of(config_url)))
        self._client.log_text(run_id, mlmodel(config, run_id), MLMODEL)

    def register(self, run_id: str, name: str, version: int, card: str, aliases: list[str]) -> None:
        """Register the run as a version of a model, unless it is registered, and set the version's
        description and aliases. MLflow counts versions itself, so dray's number is a tag."""
        with self._creating:
            with contextlib.suppress(MlflowException):  # if it does not exist, the next call fails
                self._client.create_registered_model(name)
            # Searched by the run, because MLflow's filters can't contain every name.
            known = self._client.search_model_versions(f"run_id = '{run_id}'")
            tagged = (one for one in known if one.tags.get(VERSION_TAG) == str(version))
            found = next((one for one in tagged if one.name == name), None)
            found = found or self._client.create_model_version(
                name,
                f"runs:/{run_id}/",
                run_id,
                tags={VERSION_TAG: str(version)},
            )
        self._client.update_model_version(name, found.version, card)
        for alias in aliases:
            self._client.set_registered_model_alias(name, alias, found.version)
        others = set(self._client.get_model_version(name, found.version).aliases) - set(aliases)
        for alias in others:
            self._client.delete_registered_model_alias(name, alias)


def _in_parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _answer(runs: Runs, method: str, arguments: list[Any]) -> tuple[str, Any]:
    try:
        return "ok", getattr(runs, method)(*arguments)
    except Exception as error:
        kind = "" if isinstance(error, MlflowException) else f"{type(error).__name__}: "
        return "refused" if _is_refusal(error) else "away", f"{kind}{error}"[:MOST_CHARS]


def _is_refusal(error: Exception) -> bool:
    """Whether the failure is caused by the job, rather than by MLflow or the connection to it."""
    if isinstance(error, MlflowException):
        if error.error_code == "ENDPOINT_NOT_FOUND":  # the server is not MLflow
            return False
        status = error.get_http_status_code()
    elif (
        answer := getattr(error, "response", None)
    ) is not None:  # an error from `requests`, for an upload
        status = answer.status_code
    else:
        return isinstance(error, (FileNotFoundError, LookupError, ValueError))  # in an artifact
    return 400 <= status < 500 and status not in _CREDENTIALS_OR_LOAD


def main() -> None:
    tracking_uri, storage_url = json.loads(sys.stdin.readline())
    # MLflow and its plugins might print messages. Redirect the messages to the service's log.
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
        os._exit(0)  # the service has ended, so answers are no longer needed


if __name__ == "__main__":
    main()
