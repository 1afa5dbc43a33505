"""Drills, for the SDK, the service and the workers alike."""

from __future__ import annotations

from enum import StrEnum


class DrillKind(StrEnum):
    """Which fault to inject into a job of one's own."""

    KILL = "kill"
    """SIGKILL to the training process of a rank."""
    STALL = "stall"
    """SIGSTOP to it: it hangs."""
    PREEMPT = "preempt"
    """The whole job is asked to leave its slots."""


class DrillState(StrEnum):
    """How far a drill is. The last two stay."""

    WAITING = "waiting"
    """For its step."""
    STRUCK = "struck"
    """The fault was injected, and the group recovers."""
    PASSED = "passed"
    """The job trains again."""
    FAILED = "failed"
    """The fault could not be injected, or the group did not recover in place."""

    @property
    def is_over(self) -> bool:
        return self in (DrillState.PASSED, DrillState.FAILED)
