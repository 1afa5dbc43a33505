"""The rules for assigning batches to workers, as a state machine without I/O.

A worker requests a batch, and has completed the batch when all servers have received its gradient.
One server assigns all batches.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

CHIEF = 0
"""The worker that evaluates, saves checkpoints and stores the result."""


class Word(Enum):
    """The reply to a worker that isn't assigned a batch."""

    WAIT = "wait"
    OVER = "over"


Dispatch = int | Word
Dispatches = list[tuple[int, int | None]]
"""(worker, batch number) for each waiting worker that now gets a reply. The batch number is None if
no batches are left."""


class BatchDispatcher(ABC):
    """The rules that all modes share. When no batches are left, only the chief is notified
    immediately. The other workers are notified after the chief has stored the result, because one
    of them might have to replace the chief."""

    def __init__(self, last_batch: int) -> None:
        self._last_batch = last_batch
        self._waiting: list[int] = []
        self._is_stopped = False
        self._is_finished = False

    def take(self, worker: int, done: int | None) -> Dispatches:
        """Request a batch for a worker. done: the worker's previous batch, if all servers have
        received its gradient."""
        if done is not None:
            self._is_done(worker, done)
        self.forget(worker)
        self._waiting.append(worker)
        return self._dispatched()

    def join(self, worker: int) -> Dispatches:
        """Add a worker that is new or replaces a lost worker."""
        return self.lost(worker)

    def lost(self, worker: int) -> Dispatches:
        """Remove a lost worker."""
        self.forget(worker)
        return self._dispatched()

    def stop(self) -> Dispatches:
        """End the training early at the chief's request."""
        self._is_stopped = True
        return self._dispatched()

    def finish(self) -> Dispatches:
        """End the training after the chief has stored the result."""
        self._is_finished = self._is_stopped = True
        return self._dispatched()

    def snapshot(self) -> dict[str, Any]:
        """Return all state on which later assignments depend, as JSON-serialisable values."""
        ends = {"is_stopped": self._is_stopped, "is_finished": self._is_finished}
        return {"last": self._last_batch, "waiting": list(self._waiting), **ends}

    def restore(self, about: Mapping[str, Any]) -> None:
        """Continue from a snapshot of another dispatcher."""
        self._last_batch, self._waiting = about["last"], list(about["waiting"])
        self._is_stopped, self._is_finished = about["is_stopped"], about["is_finished"]

    def forget(self, worker: int) -> None:
        """Don't assign a batch to the worker until its next request."""
        if worker in self._waiting:
            self._waiting.remove(worker)

    def _dispatched(self) -> Dispatches:
        dispatches: Dispatches = []
        for worker in list(self._waiting):
            dispatch = Word.OVER if self._is_stopped else self._dispatch(worker)
            if dispatch is Word.OVER and worker != CHIEF and not self._is_finished:
                dispatch = Word.WAIT
            if dispatch is not Word.WAIT:
                self._waiting.remove(worker)
                dispatches.append((worker, None if dispatch is Word.OVER else dispatch))
        return dispatches

    @abstractmethod
    def _is_done(self, worker: int, batch: int) -> None:
        """Record that all servers have received the worker's gradient of the batch."""

    @abstractmethod
    def _dispatch(self, worker: int) -> Dispatch: ...


class SynchronousBatchDispatcher(BatchDispatcher):
    """All workers compute their shares of a batch before any worker gets the next batch."""

    def __init__(self, num_workers: int, last_batch: int, first_done: int) -> None:
        """first_done: number of batches that are already complete."""
        super().__init__(last_batch)
        self._done = [first_done] * num_workers

    def snapshot(self) -> dict[str, Any]:
        return {**super().snapshot(), "done": list(self._done)}

    def restore(self, about: Mapping[str, Any]) -> None:
        super().restore(about)
        self._done = list(about["done"])

    def _is_done(self, worker: int, batch: int) -> None:
        self._done[worker] = batch

    def _dispatch(self, worker: int) -> Dispatch:
        own = self._done[worker]
        if min(self._done) < own:
            return Word.WAIT
        return Word.OVER if own >= self._last_batch else own + 1


class SharedBatchDispatcher(BatchDispatcher):
    """Each batch is computed by a single worker: the first idle worker gets the next batch.

    A worker's clock is the number of batches that it has computed. If a worker's clock is ahead of
    the slowest worker's clock by more than `max_staleness`, the worker waits for the slowest worker
    (the read condition of stale synchronous parallel, Ho et al. 2013). The fastest worker can
    therefore be ahead by `max_staleness` + 1 batches. A worker that joins later starts with the
    clock of the slowest worker.
    """

    def __init__(
        self, last_batch: int, next_batch: int, again: Iterable[int], max_staleness: int | None
    ) -> None:
        """again: batches below `next_batch` that still have to be computed, and are assigned
        first."""
        super().__init__(last_batch)
        self._next = next_batch
        self._again = sorted(again)
        self._held: dict[int, int] = {}
        self._max_staleness = max_staleness
        self.clocks: dict[int, int] = {}

    def snapshot(self) -> dict[str, Any]:
        own = {"next": self._next, "again": list(self._again)}
        held, clocks = list(self._held.items()), list(self.clocks.items())
        return {**super().snapshot(), **own, "held": held, "clocks": clocks}

    def restore(self, about: Mapping[str, Any]) -> None:
        super().restore(about)
        self._next, self._again = about["next"], list(about["again"])
        self._held, self.clocks = dict(about["held"]), dict(about["clocks"])

    def join(self, worker: int) -> Dispatches:
        dispatches = super().join(worker)
        self.clocks[worker] = min(self.clocks.values(), default=0)
        return dispatches

    def lost(self, worker: int) -> Dispatches:
        self.forget(worker)
        self.clocks.pop(worker, None)
        batch = self._held.pop(worker, None)
        if batch is not None:
            bisect.insort(self._again, batch)
        return self._dispatched()

    def _is_done(self, worker: int, batch: int) -> None:
        if self._held.get(worker) == batch:
            del self._held[worker]
            self.clocks[worker] += 1

    def _dispatch(self, worker: int) -> Dispatch:
        if worker in self._held:  # the reply to the last request was lost with a server
            return self._held[worker]
        if not self._again and self._next > self._last_batch:
            return Word.WAIT if self._held else Word.OVER
        ahead = self.clocks[worker] - min(self.clocks.values())
        if self._max_staleness is not None and ahead > self._max_staleness:
            return Word.WAIT
        if self._again:
            batch = self._again.pop(0)
        else:
            batch, self._next = self._next, self._next + 1
        self._held[worker] = batch
        return batch
