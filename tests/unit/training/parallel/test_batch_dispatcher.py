"""The dealer of batches: each batch is computed once, and no worker gets too far ahead, even after
deaths."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_workers.training.parallel.parameter_server.batch_dispatcher import (
    CHIEF,
    Dispatches,
    SharedBatchDispatcher,
    SynchronousBatchDispatcher,
)


class Play(ABC):
    """Workers of a dispatcher that finish, are lost, and join in a random order."""

    def __init__(self, dispatcher: Any, num_workers: int) -> None:
        self.dispatcher = dispatcher
        self.computing: dict[int, int] = {}
        self.waiting: set[int] = set()
        self.gone: set[int] = set(range(num_workers))
        self.over: set[int] = set()
        self.done: Counter[int] = Counter()
        for worker in range(num_workers):
            self.come(worker)

    def take(self, dispatches: Dispatches) -> None:
        for worker, batch in dispatches:
            assert worker in self.waiting
            self.waiting.remove(worker)
            if batch is None:
                self.over.add(worker)
            else:
                self.check(worker, batch)
                self.computing[worker] = batch

    @abstractmethod
    def check(self, worker: int, batch: int) -> None:
        """Check that the worker is allowed to begin the batch."""

    def come(self, worker: int) -> None:
        self.gone.remove(worker)
        self.take(self.dispatcher.join(worker))
        self.waiting.add(worker)
        self.take(self.dispatcher.take(worker, None))

    def finish(self, worker: int) -> None:
        batch = self.computing.pop(worker)
        self.done[batch] += 1
        self.waiting.add(worker)
        self.take(self.dispatcher.take(worker, batch))

    def lose(self, worker: int) -> None:
        self.computing.pop(worker, None)
        self.waiting.discard(worker)
        self.over.discard(worker)
        self.gone.add(worker)
        self.take(self.dispatcher.lost(worker))

    def to_the_end(self) -> None:
        for worker in sorted(self.gone):
            self.come(worker)
        while self.computing:
            self.finish(max(self.computing, key=lambda worker: (self.computing[worker], worker)))


class SharedPlay(Play):
    def __init__(self, dispatcher: Any, num_workers: int, max_staleness: int | None = None) -> None:
        self._max_staleness = max_staleness
        super().__init__(dispatcher, num_workers)

    def check(self, worker: int, batch: int) -> None:
        assert batch not in self.computing.values()
        clocks = self.dispatcher.clocks
        if self._max_staleness is not None:
            assert clocks[worker] - min(clocks.values()) <= self._max_staleness


class SynchronousPlay(Play):
    def check(self, worker: int, batch: int) -> None:
        assert set(self.computing.values()) <= {batch}


class ClockPlay(SharedPlay):
    """Counts the updates between a worker's pull and its push, and tracks how far ahead the fastest
    worker is."""

    pulled: dict[int, int]
    version = ahead = stalest = 0

    def check(self, worker: int, batch: int) -> None:
        super().check(worker, batch)
        self.__dict__.setdefault("pulled", {})[worker] = self.version

    def finish(self, worker: int) -> None:
        self.stalest = max(self.stalest, self.version - self.pulled[worker])
        self.version += 1
        super().finish(worker)
        clocks = self.dispatcher.clocks.values()
        self.ahead = max(self.ahead, max(clocks) - min(clocks))


@pytest.mark.parametrize(("num_workers", "bound"), [(2, 0), (2, 1), (2, 4), (3, 0), (3, 2), (5, 1)])
def test_the_bound_is_of_clocks_and_staleness_may_exceed_it(num_workers: int, bound: int) -> None:
    """Ho et al. 2013: a worker may read while it is `bound` ahead of the slowest one, and can
    therefore get to bound + 1. Each other worker can complete 2 bound + 1 steps, from `bound`
    behind a worker to bound + 1 ahead of it."""
    worst = (num_workers - 1) * (2 * bound + 1)
    found = ClockPlay(
        SharedBatchDispatcher(10_000, 1, again=[], max_staleness=bound), num_workers, bound
    )
    for _ in range(bound + 1):  # worker 0 goes one step beyond the bound
        if 0 in found.computing:
            found.finish(0)
    others = range(1, num_workers)
    while any(worker in found.computing for worker in others):
        if 0 in found.computing:  # it has started again, and all others pass it
            break
        found.finish(min(others, key=lambda worker: found.dispatcher.clocks[worker]))
    while able := [worker for worker in others if worker in found.computing]:
        found.finish(able[0])
    found.finish(0)
    assert found.ahead == bound + 1
    assert found.stalest == worst
    rng = random.Random(bound)
    for _ in range(2000):
        found.finish(rng.choice(sorted(found.computing)))
    assert found.ahead == bound + 1
    assert found.stalest == worst


MOVES = st.lists(st.tuples(st.sampled_from(["finish", "lose", "come"]), st.integers(0, 3)))


@settings(max_examples=200, deadline=None)
@given(moves=MOVES, max_staleness=st.one_of(st.none(), st.integers(0, 3)))
def test_every_batch_is_computed_once_and_nobody_runs_ahead_of_the_bound(
    moves: list[tuple[str, int]], max_staleness: int | None
) -> None:
    dispatcher = SharedBatchDispatcher(12, 5, again=[2, 3], max_staleness=max_staleness)
    play = SharedPlay(dispatcher, 4, max_staleness)
    _play(play, moves)
    assert play.done == Counter([2, 3, *range(5, 13)])
    assert play.over == {CHIEF}
    assert play.waiting == {1, 2, 3}, "the others wait for the result"
    play.take(dispatcher.finish())
    assert play.over == {0, 1, 2, 3}


@settings(max_examples=100, deadline=None)
@given(moves=MOVES)
def test_synchronous_workers_compute_their_shares_of_one_batch(
    moves: list[tuple[str, int]],
) -> None:
    dispatcher = SynchronousBatchDispatcher(4, 12, first_done=6)
    play = SynchronousPlay(dispatcher, 4)
    _play(play, moves)
    assert play.done == Counter(dict.fromkeys(range(7, 13), 4))
    assert play.over == {CHIEF}
    assert play.waiting == {1, 2, 3}


def _play(play: Play, moves: list[tuple[str, int]]) -> None:
    for move, worker in moves:
        if move == "finish" and worker in play.computing:
            play.finish(worker)
        elif move == "lose" and worker not in play.gone:
            play.lose(worker)
        elif move == "come" and worker in play.gone:
            play.come(worker)
    play.to_the_end()


@pytest.mark.parametrize("is_synchronous", [True, False])
def test_a_chief_that_stops_the_training_ends_it_for_all(is_synchronous: bool) -> None:
    dispatcher: Any = SharedBatchDispatcher(100, 1, again=[], max_staleness=None)
    if is_synchronous:
        dispatcher = SynchronousBatchDispatcher(2, 100, first_done=0)
    play = (SynchronousPlay if is_synchronous else SharedPlay)(dispatcher, 2)
    play.finish(1)
    play.take(dispatcher.stop())
    for worker in sorted(play.computing):
        play.finish(worker)
    assert play.over == {CHIEF}
    assert play.waiting == {1}
    play.take(dispatcher.finish())
    assert play.over == {0, 1}
