"""The things that the loops of one term share; loops of different terms share nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from service.cluster.port import Cluster
from service.config.settings import Settings
from service.costs.prices_file import PricesFile
from service.db.notifications import Signals
from service.loops.shared.fencing import LoopDatabase
from service.loops.shared.timings import LoopTimings


class Launches:
    """Written by the scheduler, and asked by the reconciler before it takes an attempt for lost."""

    def __init__(self) -> None:
        self._under_way: set[tuple[str, int]] = set()
        self._ours: set[tuple[str, int]] = set()
        self._all_answered = asyncio.Event()
        self._all_answered.set()

    def begin(self, job_id: str, attempt: int) -> None:
        """The attempt is about to be claimed and launched."""
        self._under_way.add((job_id, attempt))
        self._all_answered.clear()

    def claimed(self, job_id: str, attempt: int) -> None:
        """The claim succeeded: no other process launches this attempt."""
        self._ours.add((job_id, attempt))

    def answered(self, job_id: str, attempt: int) -> None:
        """The launch was answered, or the claim failed."""
        self._under_way.discard((job_id, attempt))
        if not self._under_way:
            self._all_answered.set()

    async def until_all_answered(self) -> None:
        """Wait until no launch is under way."""
        await self._all_answered.wait()

    def ended(self, job_id: str, attempt: int) -> None:
        """The end of the attempt is stored."""
        self._ours.discard((job_id, attempt))

    def is_under_way(self, job_id: str, attempt: int) -> bool:
        """Whether the attempt is not to be polled yet, since a supervisor that does not exist yet
        looks like one that died."""
        return (job_id, attempt) in self._under_way

    def is_ours(self, job_id: str, attempt: int) -> bool:
        """Whether this process claimed the attempt, so that it knows when the launch is over."""
        return (job_id, attempt) in self._ours


@dataclass(frozen=True)
class LoopContext:
    """The things that loops are built from; each loop takes those that it needs."""

    database: LoopDatabase
    cluster: Cluster
    signals: Signals
    settings: Settings
    timings: LoopTimings
    prices: PricesFile
    deployment_id: str
    halted: asyncio.Event
    """Set once nothing is to be started any more."""
    launches: Launches = field(default_factory=Launches)
