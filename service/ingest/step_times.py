"""The times of the steps of elastic jobs, by the size of the group: sizes are chosen by them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ray_workers.shared.contracts import Phase
from service.db.models import AttemptRow, JobRow

CHANGED = 0.05
"""Relative change of a time that is noted: a fit for each report would gain nothing."""
SMOOTHING = 0.3
"""The weight of a new time in the mean of those with the same size."""


def noted(job: JobRow, attempt: AttemptRow, said: Mapping[str, Any]) -> dict[str, Any] | None:
    """The job's `step_times` with what its rank 0 said now; None where nothing changes.

    Only recipes have one batch size for the whole job. While a group changes its size nobody knows
    with which workers the step was taken.
    """
    speed = said.get("samples_per_s")
    if job.min_workers is None or job.spec.get("recipe") is None or not speed:
        return None
    if not job.spec["elastic"].get("by_speed", True):
        return None
    is_settled = attempt.granted is None and attempt.recalled is None and not attempt.lacking
    if not is_settled or attempt.phase != Phase.RUNNING:
        return None
    train = job.spec["train"]
    batch_size = int(train["global_batch_size"])
    num_workers = sum(part["num_workers"] for part in attempt.slices)
    num_nodes = len({part["node_id"] for part in attempt.slices})
    known = job.step_times or {
        "alike": alike(job.spec),
        "batch_size": batch_size,
        "micro_batch_size": train.get("micro_batch_size") or batch_size,
        "times": [],
    }
    size = [num_workers, num_nodes, batch_size]
    times = {tuple(each[:3]): each[3] for each in known["times"]}
    before, seconds = times.get(tuple(size)), batch_size / speed
    if before is not None:
        seconds = before + SMOOTHING * (seconds - before)
        if abs(seconds - before) < CHANGED * before:
            return None
    times[tuple(size)] = float(f"{seconds:.3g}")
    return {**known, "times": [[*key, value] for key, value in times.items()]}


def alike(spec: Mapping[str, Any]) -> str:
    """Equal for jobs whose steps take as long with the same workers."""
    parts = [spec.get(name) for name in ("name", "recipe", "model", "parallel", "sync")]
    train = spec["train"]
    parts += [spec["resources"], spec["data"].get("source")]
    parts += [train.get(name) for name in ("precision", "recompute", "compile", "micro_batch_size")]
    without_size = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(without_size.encode()).hexdigest()[:32]
