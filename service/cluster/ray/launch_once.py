"""Ensures that an attempt is either launched or given up, whichever comes first, never both.

A service that was suspended during a launch may send it long after another service has given the
attempt up and started the next. So a process that launches an attempt, or gives it up, first writes
a value for the attempt to Ray's own key-value store, which accepts only the first value. Keys
disappear with the Ray cluster, as the attempts do; each needs about a hundred bytes.
"""

from __future__ import annotations

from ray_workers.node import compat_ray
from ray_workers.shared.names import namespace, supervisor_name


class LaunchedBefore(Exception):
    """The attempt was launched before, or given up."""


def claim_launch(deployment_id: str, job_id: str, attempt: int) -> None:
    """Reserve the launch of the attempt. Raises LaunchedBefore if it is no longer allowed."""
    if _has_value(deployment_id, job_id, attempt, "launched"):
        raise LaunchedBefore(f"attempt {attempt} of {job_id} was launched before, or given up")


def give_up(deployment_id: str, job_id: str, attempt: int) -> None:
    """Prevent the launch of the attempt from now on."""
    _has_value(deployment_id, job_id, attempt, "given up")


def _has_value(deployment_id: str, job_id: str, attempt: int, value: str) -> bool:
    """Set the attempt's value unless it has one; return whether it had one."""
    key = supervisor_name(job_id, attempt)
    return compat_ray.put_once(key, value, namespace(deployment_id))
