"""Objects shared by the loops of one term. Loops of different terms share nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from service.cluster.port import Cluster
from service.config.models_file import ModelsFile
from service.config.settings import Settings
from service.costs.prices_file import PricesFile
from service.db.notifications import Signals
from service.loops.shared.fencing import LoopDatabase
from service.loops.shared.timings import LoopTimings


class Launches:
    """The launches of this process. The scheduler records launches, and the reconciler checks the
    records before it considers an attempt lost."""

    def __init__(self) -> None:
        self._under_way: set[tuple[str, int]] = set()
        self._ours: set[tuple[str, int]] = set()
        self._all_answered = asyncio.Event()
        self._all_answered.set()

    def begin(self, job_id: str, attempt: int) -> None:
        """Record that the attempt is about to be claimed and launched."""
        self._under_way.add((job_id, attempt))
        self._all_answered.clear()

    def claimed(self, job_id: str, attempt: int) -> None:
        """Record that the claim succeeded, so that no other process launches this attempt."""
        self._ours.add((job_id, attempt))

    def answered(self, job_id: str, attempt: int) -> None:
        """Record that the launch call has returned, or that the claim failed."""
        self._under_way.discard((job_id, attempt))
        if not self._under_way:
            self._all_answered.set()

    async def until_all_answered(self) -> None:
        """Wait until no launch is under way."""
        await self._all_answered.wait()

    def ended(self, job_id: str, attempt: int) -> None:
        """Record that the end of the attempt is stored."""
        self._ours.discard((job_id, attempt))

    def is_under_way(self, job_id: str, attempt: int) -> bool:
        """Whether a launch of the attempt is in progress. An attempt must not be polled during its
        launch, because a supervisor that doesn't exist yet can't be distinguished from a dead
        supervisor."""
        return (job_id, attempt) in self._under_way

    def is_ours(self, job_id: str, attempt: int) -> bool:
        """Whether this process has claimed the attempt, and therefore records the end of its
        launch."""
        return (job_id, attempt) in self._ours


@dataclass(frozen=True)
class LoopContext:
    """The objects from which the loops are built."""

    database: LoopDatabase
    cluster: Cluster
    signals: Signals
    settings: Settings
    timings: LoopTimings
    prices: PricesFile
    models: ModelsFile
    deployment_id: str
    halted: asyncio.Event
    """Set when no more jobs may be started."""
    launches: Launches = field(default_factory=Launches)
