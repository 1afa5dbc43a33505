"""A job as MLflow has it: the experiment, status, parameters and tags of its run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from dray import views
from dray.views import JobState
from service.domain.tracking.search import EXPERIMENT

MAX_PARAM_CHARS, MAX_TAG_CHARS, MAX_KEY_CHARS = 6000, 5000, 250
"""MLflow's limits."""
DEFAULT_EXPERIMENT = "Default"
JOB_TAG = "dray.job_id"
"""The tag by which the run of a job is found."""
NOTES_TAG, TAGS_TAG = "mlflow.note.content", "dray.tags"
"""The tags with what people write about a job; MLflow shows the first as its description."""

STATUS: Mapping[JobState, str] = {
    JobState.QUEUED: "SCHEDULED",
    JobState.STARTING: "RUNNING",
    JobState.RUNNING: "RUNNING",
    JobState.RECOVERING: "RUNNING",
    JobState.CANCELLING: "RUNNING",
    JobState.SUCCEEDED: "FINISHED",
    JobState.FAILED: "FAILED",
    JobState.CANCELLED: "KILLED",
}
"""The status of a run for each state of a job."""


def experiment_of(labels: Mapping[str, str]) -> str:
    return labels.get(EXPERIMENT, DEFAULT_EXPERIMENT)


def milliseconds(time: datetime) -> int:
    """As Unix time."""
    return int(1000 * time.timestamp())


def params_of(document: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a document that are set, by their paths with dots, as MLflow takes them."""
    return {
        _key(path): (value if isinstance(value, str) else json.dumps(value))[:MAX_PARAM_CHARS]
        for path, value in _flat("", document)
    }


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), inner)
    elif value is not None and value not in ({}, []):
        yield path, value


def _key(text: str) -> str:
    """The name of a parameter or tag with MLflow's characters."""
    return re.sub(r"[^\w./ -]", "_", text)[:MAX_KEY_CHARS]


def tags_of(job: views.Job, notes: str | None) -> dict[str, str]:
    """The labels, and facts of the job. notes: None of a job that nobody has written about; where
    notes or tags were removed, an empty text takes the place of those that a run has."""
    script = job.spec.get("script") or {}
    code = script.get("code")
    source = code if isinstance(code, Mapping) else {}
    facts = {
        "mlflow.runName": job.name,
        "mlflow.user": job.owner,
        "mlflow.source.type": "JOB",
        "mlflow.source.name": script.get("entrypoint") or job.spec.get("recipe"),
        "mlflow.source.git.commit": source.get("commit"),
        "mlflow.source.git.repoURL": source.get("git"),
        JOB_TAG: job.id,
        "dray.code": code if isinstance(code, str) else None,
        "dray.state": job.state.value,
        "dray.reason": f"{job.reason.code}: {job.reason.message}",
        "dray.owner": job.owner,
        "dray.project": job.project,
        "dray.queue": job.queue,
        "dray.attempts": job.attempt or None,
        "dray.recoveries": job.recoveries or None,
        "dray.world_size": job.world_size or None,
        "dray.array_id": job.array_id,
        "dray.array_index": job.array_index,
        NOTES_TAG: notes,
        TAGS_TAG: None if notes is None else ", ".join(job.tags),
        "dray.cost": job.cost and f"{job.cost.total:.6g} {job.cost.currency}",
    }
    texts = {key: f"{value}"[:MAX_TAG_CHARS] for key, value in facts.items() if value is not None}
    return {**{_key(key): value for key, value in job.labels.items()}, **texts}
