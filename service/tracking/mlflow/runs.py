"""A job in MLflow's terms: the experiment, status, parameters and tags of its run."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from dray import views
from dray.views import JobState
from service.domain.tracking.search_tree import EXPERIMENT
from service.domain.tracking.sources import git_of

MAX_PARAM_CHARS, MAX_TAG_CHARS, MAX_KEY_CHARS = 6000, 5000, 250
"""MLflow's limits."""
DEFAULT_EXPERIMENT = "Default"
JOB_TAG = "dray.job_id"
VERSION_TAG = "dray.version"
"""The tag that identifies a job's run."""
NOTES_TAG, TAGS_TAG = "mlflow.note.content", "dray.tags"
"""The MLflow tags that contain a job's notes (shown by MLflow as the description) and a job's
tags."""

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
"""Mapping from the state of a job to the status of its run."""


def experiment_of(labels: Mapping[str, str]) -> str:
    return labels.get(EXPERIMENT) or DEFAULT_EXPERIMENT  # MLflow experiments need a name


def milliseconds(time: datetime) -> int:
    """Return the Unix time in milliseconds."""
    return int(1000 * time.timestamp())


def params_of(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields that a document sets, keyed by dotted path, in a form that MLflow
    accepts."""
    return {
        key_of(path): (value if isinstance(value, str) else json.dumps(value))[:MAX_PARAM_CHARS]
        for path, value in _flat("", document)
    }


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), inner)
    elif value is not None and value not in ({}, []):
        yield path, value


def key_of(name: str) -> str:
    """Convert a name to a key that MLflow accepts. Different names become different keys."""
    fits = re.sub(r"[^\w./ -]", "_", name)
    # MLflow requires the name to be a normalised path.
    if posixpath.normpath(fits) != fits or fits == "." or fits.startswith(("..", "/")):
        fits = "_" + fits.replace("/", "_")
    if fits == name and len(fits) <= MAX_KEY_CHARS:
        return fits
    mark = _mark(name)
    return fits[: MAX_KEY_CHARS - len(mark)] + mark


def artifact_path_of(path: str) -> str:
    """Convert an artifact's path to a path that MLflow's client can put into a URL unquoted."""
    fits = re.sub(r"[#?%]|^ ", "_", path)
    if fits == path:
        return path
    stem, suffix = posixpath.splitext(fits)
    return stem + _mark(path) + suffix


def _mark(name: str) -> str:
    """Return a suffix that keeps names different after characters have been replaced."""
    return "-" + hashlib.sha256(name.encode()).hexdigest()[:6]


def tags_of(job: views.Job, notes: str | None) -> dict[str, str]:
    """Return the run's tags: the job's labels, and facts about the job.

    `notes` is None if the job's tags and notes have never changed. Notes and tags that have changed
    are written even if they are empty, to replace the run's previous notes and tags.
    """
    script = job.spec.get("script") or {}
    code = script.get("code")
    source = code if isinstance(code, Mapping) else {}
    facts = {
        "mlflow.runName": job.name,
        "mlflow.user": job.owner,
        "mlflow.source.type": "JOB",
        "mlflow.source.name": script.get("entrypoint") or job.spec.get("recipe"),
        "mlflow.source.git.commit": (git_of(job.spec) or {}).get("commit"),
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
        "dray.variant": job.variant,
        NOTES_TAG: notes,
        TAGS_TAG: None if notes is None else ", ".join(job.tags),
        "dray.cost": job.cost and f"{job.cost.total:.6g} {job.cost.currency}",
    }
    texts = {key: f"{value}"[:MAX_TAG_CHARS] for key, value in facts.items() if value is not None}
    return {**{key_of(key): value for key, value in job.labels.items()}, **texts}
