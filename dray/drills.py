"""Drills, as the SDK, the service and the workers share them."""

from __future__ import annotations

from enum import StrEnum


class DrillKind(StrEnum):
    """The fault that a drill injects."""

    KILL = "kill"
    """The training process of a rank gets SIGKILL."""
    STALL = "stall"
    """The training process of a rank gets SIGSTOP, so that the rank hangs."""
    PREEMPT = "preempt"
    """The whole job is asked to leave its slots."""


class DrillState(StrEnum):
    """State of a drill. PASSED and FAILED are final."""

    WAITING = "waiting"
    """The drill waits for its step."""
    STRUCK = "struck"
    """The fault was injected, and the group recovers."""
    PASSED = "passed"
    """The job trains again."""
    FAILED = "failed"
    """The fault could not be injected, or the group did not recover in place."""

    @property
    def is_over(self) -> bool:
        return self in (DrillState.PASSED, DrillState.FAILED)
