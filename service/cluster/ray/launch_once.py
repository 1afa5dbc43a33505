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
from ray_workers.shared.names import namespace, supervisor_name


class LaunchedBefore(Exception):
    """Raised if the attempt was already launched or abandoned."""


def claim_launch(deployment_id: str, job_id: str, attempt: int) -> None:
    """Claim the right to launch the attempt. Raises LaunchedBefore if the launch is no longer
    allowed."""
    if _has_value(deployment_id, job_id, attempt, "launched"):
        raise LaunchedBefore(f"attempt {attempt} of {job_id} was already launched or abandoned")


def give_up(deployment_id: str, job_id: str, attempt: int) -> None:
    """Prevent any later launch of the attempt."""
    _has_value(deployment_id, job_id, attempt, "given up")


def _has_value(deployment_id: str, job_id: str, attempt: int, value: str) -> bool:
    """Set the attempt's value unless the attempt already has a value. Returns whether the attempt
    already had a value."""
    key = supervisor_name(job_id, attempt)
    return compat_ray.put_once(key, value, namespace(deployment_id))
