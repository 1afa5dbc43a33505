"""Kinds and states of drills, used by the SDK, the service and the workers."""

from __future__ import annotations

from enum import StrEnum


class DrillKind(StrEnum):
    """The fault that a drill injects."""

    KILL = "kill"
    """Sends SIGKILL to the training process of a rank."""
    STALL = "stall"
    """Sends SIGSTOP to the training process of a rank, so that the rank hangs."""
    CORRUPT = "corrupt"
    """Flips one bit of a parameter of a rank, which the job's `check` must find."""
    PREEMPT = "preempt"
    """Asks the job to release its slots."""


class DrillState(StrEnum):
    """State of a drill. PASSED and FAILED are final."""

    WAITING = "waiting"
    """Waiting for the step at which the fault is injected."""
    STRUCK = "struck"
    """The fault was injected, and the group is recovering."""
    PASSED = "passed"
    """The job is training again."""
    FAILED = "failed"
    """The fault could not be injected, or the group did not recover in place."""

    @property
    def is_over(self) -> bool:
        return self in (DrillState.PASSED, DrillState.FAILED)
