"""The step times of elastic jobs by group size, from which the scheduler chooses sizes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from ray_workers.shared.contracts import BATCH_SIZE, NOISE_SCALE, Phase
from ray_workers.shared.frame_fields import MAX_SECONDS
from service.db.models import AttemptRow, JobRow

OF_BATCH = (BATCH_SIZE, NOISE_SCALE)
"""Metrics of a job with a range of batch sizes."""
CHANGED = 0.05
"""Smallest relative change of a step time that is stored. Fitting the speed again after a smaller
change would not improve it."""
LEAST_SECONDS = 1e-6
SMOOTHING = 0.3
"""The weight of a new step time in the moving average for its size."""


def noted(
    job: JobRow, attempt: AttemptRow, progress: Mapping[str, Any], batch: Mapping[str, float]
) -> dict[str, Any] | None:
    """Return the job's `step_times`, updated with the speed in rank 0's progress; None if nothing
    changes.

    `batch` contains the last values of `OF_BATCH`. Only recipes have one batch size for the whole
    job. Nothing is stored while a group changes its size, because the number of workers of a step
    is then unknown.
    """
    speed = progress.get("samples_per_s")
    if job.min_workers is None or job.spec.get("recipe") is None or not speed:
        return None
    # The steps of a federated job are rounds, and each round has different clients.
    if not job.spec["elastic"].get("by_speed", True) or job.spec.get("federated"):
        return None
    if job.num_spares:  # some of the slots don't make the steps faster
        return None
    is_settled = attempt.granted is None and attempt.recalled is None and not attempt.lacking
    if not is_settled or attempt.phase != Phase.RUNNING:
        return None
    train = job.spec["train"]
    num_workers = sum(part["num_workers"] for part in attempt.slices)
    num_nodes = len({part["node_id"] for part in attempt.slices})
    known = job.step_times or {
        "alike": alike(job.spec),
        "batch_size": train["global_batch_size"],
        "micro_batch_size": train.get("micro_batch_size") or train["global_batch_size"],
        "times": [],
        **({"batch_range": train["batch_range"]} if train.get("batch_range") else {}),
    }
    in_force = _in_force(known, batch)
    batch_size = in_force["batch_size"]
    size = [num_workers, num_nodes, batch_size]
    times = {tuple(each[:3]): each[3] for each in known["times"]}
    before, seconds = times.get(tuple(size)), batch_size / speed
    if before is not None:
        seconds = before + SMOOTHING * (seconds - before)
        if abs(seconds - before) < CHANGED * before:
            is_new = any(known.get(name) != value for name, value in in_force.items())
            return {**known, **in_force} if is_new else None
    if not LEAST_SECONDS < seconds < MAX_SECONDS:
        return None  # an implausible time
    times[tuple(size)] = float(f"{seconds:.3g}")
    return {**known, **in_force, "times": [[*key, value] for key, value in times.items()]}


def _in_force(known: Mapping[str, Any], batch: Mapping[str, float]) -> dict[str, Any]:
    """Return the current batch size, and the noise scale if it was measured. A value that is out of
    range or not a number is ignored."""
    found = {name: known[name] for name in ("batch_size", "noise_scale") if name in known}
    if "batch_range" not in known:
        return found
    size, noise = batch.get(BATCH_SIZE, math.nan), batch.get(NOISE_SCALE, math.nan)
    least, most = known["batch_range"]
    if least <= size <= most:
        found["batch_size"] = int(size) // least * least
    before = found.get("noise_scale", math.inf)
    if 0 <= noise < math.inf and abs(noise - before) >= CHANGED * before:
        found["noise_scale"] = float(f"{noise:.3g}")
    return found


def alike(spec: Mapping[str, Any]) -> str:
    """Return a key that is equal for jobs whose steps take the same time with the same workers."""
    parts = [spec.get(name) for name in ("name", "recipe", "model", "method", "parallel", "sync")]
    train, data = spec["train"], spec["data"]
    parts += [spec["resources"], data.get("source"), data.get("sources")]
    parts += [train.get(name) for name in ("precision", "recompute", "compile", "micro_batch_size")]
    without_size = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(without_size.encode()).hexdigest()[:32]
