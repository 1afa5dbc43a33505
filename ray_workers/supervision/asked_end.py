"""Ends a group when the service requests it, because the job is cancelled or must release its
slots."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ray_workers.shared.contracts import LEFT_EXIT_CODE, Cause, Outcome
from ray_workers.supervision.member import Member
from ray_workers.supervision.worker_group import WorkerGroup


class AskedEnd:
    """Receives the service's requests to end the group, and determines the resulting outcomes."""

    def __init__(self, group: WorkerGroup, *, is_script: bool) -> None:
        self._group = group
        self._is_script = is_script
        self._grace_s = 0.0
        self._stop = asyncio.Event()
        self._leave = asyncio.Event()

    def stop(self) -> None:
        """End the group, because its job is being cancelled."""
        self._stop.set()

    def leave(self, grace_s: float) -> None:
        """Ask the group to save a checkpoint and end within `grace_s` seconds."""
        self._grace_s = grace_s
        self._leave.set()

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    @property
    def is_leaving(self) -> bool:
        return self._leave.is_set()

    async def before_training(self) -> Outcome:
        """Wait until the group is asked to stop or to leave. Return the outcome of a group that has
        not started to train."""
        stop = asyncio.ensure_future(self._stop.wait())
        leave = asyncio.ensure_future(self._leave.wait())
        try:
            await asyncio.wait({stop, leave}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            leave.cancel()
        if self.is_stopping:
            return Outcome.of(Cause.STOPPED, "stopped before it started")
        return Outcome.of(Cause.PREEMPTED, "released its slots before it started")

    async def stopped(self) -> Outcome:
        await self._stop.wait()
        return Outcome.of(Cause.STOPPED, "stopped as requested")

    async def left(self) -> Outcome:
        """Wait for the service's request, and then ask the group to leave. Returns when the
        grace period is over."""
        await self._leave.wait()
        await self._group.ask_to_leave()
        await asyncio.sleep(self._grace_s)  # earlier exits are handled like any exit
        return Outcome.of(
            Cause.PREEMPTED,
            f"was asked to release its slots, but did not finish within {self._grace_s:g} s",
        )

    def of(self, lost: Sequence[Member]) -> Outcome | None:
        """Return the outcome if these ranks ended because the group was asked to leave; otherwise,
        None."""
        if not self.is_leaving:
            return None
        if self._is_script:
            return Outcome.of(Cause.PREEMPTED, "released its slots as requested")
        if any(member.end.exit_code == LEFT_EXIT_CODE for member in lost):
            return Outcome.of(
                Cause.PREEMPTED, "saved a checkpoint and released its slots as requested"
            )
        return None
