"""An attempt is either launched or given up, whichever comes first, and never both.

A service that was stopped on its way to a launch may send it long after another one has given the
attempt up and started the next. So a process that launches an attempt, or gives it up, first writes
its name into Ray's own key-value store, which takes one value only. Keys go with the Ray cluster,
as the attempts do; each takes about a hundred bytes.
"""

from __future__ import annotations

from ray_workers.node import compat_ray
from ray_workers.shared.names import namespace, supervisor_name


class LaunchedBefore(Exception):
    """The attempt was launched before, or given up."""


def claim_launch(deployment_id: str, job_id: str, attempt: int) -> None:
    """LaunchedBefore if the attempt must not be launched any more."""
    if _has_value(deployment_id, job_id, attempt, "launched"):
        raise LaunchedBefore(f"attempt {attempt} of {job_id} was launched before, or given up")


def give_up(deployment_id: str, job_id: str, attempt: int) -> None:
    """Keep the attempt from being launched from now on."""
    _has_value(deployment_id, job_id, attempt, "given up")


def _has_value(deployment_id: str, job_id: str, attempt: int, value: str) -> bool:
    """Whether the attempt had one already; else it has this one now."""
    key = supervisor_name(job_id, attempt)
    return compat_ray.put_once(key, value, namespace(deployment_id))
