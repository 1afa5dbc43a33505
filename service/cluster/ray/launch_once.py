"""Ensures that an attempt is either launched or given up, depending on which is requested first,
but never both.

A service that was suspended while launching an attempt might continue the launch long after another
service has given up on the attempt and started the next attempt. Therefore, before a process
launches or gives up on an attempt, it writes a value for the attempt to Ray's own key-value store,
which accepts only the first value. The keys disappear together with the Ray cluster and its
attempts. Each key takes about a hundred bytes.
"""

from __future__ import annotations

from ray_workers.node import compat_ray
from ray_workers.shared.names import SHARED_PREFIX, namespace, supervisor_name


class LaunchedBefore(Exception):
    """Raised if the attempt was already launched or abandoned."""


def claim_launch(deployment_id: str, job_id: str, attempt: int, supervisor: str) -> None:
    """Claim the right to launch the attempt in the actor with the name `supervisor`. Raises
    LaunchedBefore if the launch is no longer allowed."""
    if _has_value(deployment_id, job_id, attempt, supervisor):
        raise LaunchedBefore(f"attempt {attempt} of {job_id} was already launched or abandoned")


def give_up(deployment_id: str, job_id: str, attempt: int) -> None:
    """Prevent any later launch of the attempt."""
    _has_value(deployment_id, job_id, attempt, "given up")


def shared_supervisor_of(deployment_id: str, job_id: str, attempt: int) -> str | None:
    """Return the name of the shared supervisor in which the attempt was launched; None if it was
    launched in a supervisor of its own, or not launched."""
    key = supervisor_name(job_id, attempt)
    value = compat_ray.get_once(key, namespace(deployment_id)) or ""
    return value if value.startswith(SHARED_PREFIX) else None


def _has_value(deployment_id: str, job_id: str, attempt: int, value: str) -> bool:
    """Set the attempt's value unless the attempt already has a value. Returns whether the attempt
    already had a value."""
    key = supervisor_name(job_id, attempt)
    return compat_ray.put_once(key, value, namespace(deployment_id))
