"""AD-PSGD (Lian et al. 2018, arXiv:1710.06952): ranks average in pairs, and no rank waits for all
others.

Each rank has a copy of the weights, which is modified by two threads: the training thread adds the
changes made by its optimizer, and another thread averages the copy with the copies of neighbours.
The gradient is computed for weights that are read from the copy at the beginning of the step. By
the end of the step, averaging might have changed the copy.

The graph is bipartite: each rank is either active or passive. After each of its steps, an active
rank starts averaging by sending its copy to a passive neighbour. Passive ranks respond with their
own copies, in the order of the requests. No rank sends a request to an active rank, so a deadlock
is impossible. A slow rank responds as quickly as other ranks, but computes fewer shares of the
batch.

Each rank of the pair subtracts the copy that it sent from the copy that it received, and adds half
of the difference to its own copy. The sum of all copies thus stays the same, even if a gradient was
added in the meantime.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.training.core import compat_torch
from ray_workers.training.core.errors import UnendingOperationError
from ray_workers.training.data.prefetcher import Feed, Share
from ray_workers.training.data.sampler import derive_seed
from ray_workers.training.elastic import process_group
from ray_workers.training.elastic.waiting_thread import (
    LOOKS_BEFORE_CUT,
    LOOKS_BEFORE_HANDOVER,
    WATCH_S,
    WaitingThread,
)
from ray_workers.training.parallel.data_parallel.local_sgd import LocalGradientEngine
from ray_workers.training.parallel.dynamic_shares import DynamicShares
from ray_workers.training.parallel.gossip.copies import GossipReplicas, weights_of
from ray_workers.training.parallel.gossip.graphs import sides_of
from ray_workers.training.parallel.gossip.mixing import FlatCopy
from ray_workers.training.parallel.optim.optimizer_step import OptimizerStep
from ray_workers.training.parallel.staleness_metrics import staleness_metrics
from ray_workers.training.parallel.strategy import StrategyContext

ASK_TAG, COPY_TAG, ANSWER_TAG = 1, 2, 3
"""Tags of the messages between two ranks."""
MEET_LOOK_S = 0.001
"""Pause in seconds between two checks of whether all ranks have arrived and whether the thread has
failed."""
MOST_STALE = 255
"""Higher staleness is counted as this value."""
AVERAGE, END = 1, 0
"""The requests that an active rank can send to a passive rank."""


class SharedCopy:
    """This rank's copy of the weights, which both training and averaging modify."""

    def __init__(self, weights: FlatCopy) -> None:
        self._weights = weights
        self.lock = threading.RLock()
        self.rows = weights.empty()
        self._read = weights.empty()
        """The state of the copy when training last read the copy."""
        self._averaged = 0
        """Number of averaging operations that have modified the copy since it was last read."""
        self.staleness = torch.zeros(MOST_STALE + 1, dtype=torch.float64)
        """Number of updates, keyed by staleness. The staleness of an update is the number of
        averaging operations since its weights were read."""

    def begin(self) -> None:
        """Copy the model's weights."""
        with self.lock:
            self._weights.read(self.rows)
            self._weights.read(self._read)

    @torch.no_grad()
    def advance(self) -> None:
        """Add the optimizer's changes to the copy, and load the copy into the model."""
        with self.lock:
            self.staleness[min(self._averaged, MOST_STALE)] += 1
            changed = self._weights.read()
            torch._foreach_sub_(changed, self._read)
            torch._foreach_add_(self.rows, changed)
            self._load()

    def refresh(self) -> None:
        """Load the copy into the model."""
        with self.lock:
            self._load()

    def _load(self) -> None:
        self._averaged = 0
        torch._foreach_copy_(self._read, self.rows)
        self._weights.write(self.rows)

    def offer(self) -> list[Tensor]:
        """Return the current copy, which an active rank sends."""
        with self.lock:
            return [row.clone() for row in self.rows]

    def meet(self, theirs: Sequence[Tensor]) -> list[Tensor]:
        """Average the copy with a copy that an active rank has sent. Returns the previous copy,
        which is the response."""
        with self.lock:
            answer = [row.clone() for row in self.rows]
            self._move(answer, theirs)
            return answer

    def close(self, offered: Sequence[Tensor], answer: Sequence[Tensor]) -> None:
        """Complete the averaging that began with `offer`."""
        with self.lock:
            self._move(offered, answer)

    def _move(self, own: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
        self._averaged += 1
        for row, before, other in zip(self.rows, own, theirs, strict=True):
            row.add_(other - before, alpha=0.5)


class Averaging:
    """The thread that averages a rank's copy in one group."""

    def __init__(
        self,
        copy: SharedCopy,
        rank: int,
        sides: tuple[list[int], list[int]],
        page: HeartbeatPage,
    ) -> None:
        """sides: (the neighbours to which this rank sends requests, the neighbours that send
        requests to this rank)."""
        self._copy = copy
        self._page = page
        self._asked, self._asking = sides
        # Pass the group to each operation explicitly, so that a delayed thread can't send to the
        # group of a later round.
        self._group = dist.group.WORLD
        self._changed = threading.Condition()
        self._wanted = self._busy = self._is_ending = self._is_abandoned = self._has_ended = False
        self._pauses = 0
        self._draw = random.Random(derive_seed("gossip", rank))
        work = self._ask if self._asked else self._answer
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.name = "dray-averaging"
        self._error: BaseException | None = None
        self._thread.start()

    def want(self) -> None:
        """Make an active rank average its copy again during the next step. Like `pause`,
        `meet` and `end`, this method raises the error that ended the thread, if any. `pause` and
        `end` raise UnendingOperationError if the group is broken and the thread does not notice."""
        with self._changed:
            self._check()
            self._wanted = True
            self._changed.notify()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """Don't start averaging until `resume` is called. Returns once any averaging that this rank
        has started is complete."""
        with self._changed:
            self._pauses += 1
            self._wait_for(lambda: not self._busy)
            self._check()

    def _wait_for(self, is_so: Callable[[], bool]) -> None:
        """Wait, holding `_changed`, for the thread. If the thread never ends an operation of a
        broken group, only the calling thread can leave the group."""
        thread, looks = WaitingThread(self._thread.ident, self._thread.native_id), 0
        while not self._changed.wait_for(is_so, WATCH_S):
            still = thread.num_looks_without_progress() if self._page.must_leave_group else 0
            looks = looks + 1 if still else 0
            if looks >= LOOKS_BEFORE_CUT + LOOKS_BEFORE_HANDOVER:
                raise UnendingOperationError

    def meet(self) -> None:
        """Wait until every rank has called this method. An active rank must not call this method
        while the rank is waiting for a response, because the response never arrives if the passive
        rank's thread has failed."""
        came = dist.all_reduce(torch.ones(()), group=self._group, async_op=True)
        while not came.is_completed():
            self._check()
            time.sleep(MEET_LOOK_S)
        came.wait()

    def resume(self) -> None:
        with self._changed:
            self._pauses -= 1
            self._changed.notify_all()

    def end(self) -> None:
        """End the averaging after the training has ended on all ranks. This is a collective
        operation, so that a passive rank doesn't wait forever for a message from a rank that has
        exited."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
            if self._asked:
                self._wait_for(lambda: self._has_ended)
                self._check()
        self.meet()
        with self._changed:
            self._wait_for(lambda: self._has_ended)

    def abandon(self) -> None:
        """End the averaging in a broken group whose connections are about to be cut. After this
        call, the copy no longer changes. The thread ends when the connections are cut."""
        with self._copy.lock, self._changed:
            self._is_abandoned = True
            self._changed.notify_all()

    def _run(self, work: Callable[[], None]) -> None:
        error: Exception | None = None
        try:
            work()
        except Exception as raised:
            error = raised
        with self._changed:
            self._error, self._busy, self._has_ended = error, False, True
            self._changed.notify_all()

    def _ask(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._is_abandoned:
                    return
                if self._is_ending:
                    break
                self._wanted, self._busy = False, True
            self._average_with(self._draw.choice(self._asked))
            with self._changed:
                self._busy = False
                self._changed.notify_all()
        for other in self._asked:
            self._send(torch.tensor([END]), other, ASK_TAG)

    def _has_work(self) -> bool:
        is_over = self._is_ending or self._is_abandoned
        return is_over or (self._wanted and not self._pauses)

    def _average_with(self, other: int) -> None:
        self._send(torch.tensor([AVERAGE]), other, ASK_TAG)
        offered = self._copy.offer()
        for row in offered:
            self._send(row, other, COPY_TAG)
        answer = [torch.empty_like(row) for row in offered]
        for row in answer:
            self._receive(row, other, ANSWER_TAG)
        with self._copy.lock:
            if not self._is_abandoned:
                self._copy.close(offered, answer)

    def _answer(self) -> None:
        asking = set(self._asking)
        theirs = [torch.empty_like(row) for row in self._copy.rows]
        while asking:
            kind = torch.zeros(1, dtype=torch.int64)
            other = dist.recv(kind, group=self._group, tag=ASK_TAG)  # from any rank
            if kind.item() == END:
                asking.discard(other)
                continue
            for row in theirs:
                self._receive(row, other, COPY_TAG)
            with self._copy.lock:
                if self._is_abandoned:
                    return
                answer = self._copy.meet(theirs)
            for row in answer:
                self._send(row, other, ANSWER_TAG)

    def _send(self, message: Tensor, other: int, tag: int) -> None:
        for piece in process_group.pieces(message):
            dist.send(piece, other, self._group, tag)

    def _receive(self, message: Tensor, other: int, tag: int) -> None:
        for piece in process_group.pieces(message):
            dist.recv(piece, other, self._group, tag=tag)


class AveragedStep(OptimizerStep):
    """An optimizer step on weights that were read from a shared copy. After the step, its changes
    are added to the shared copy."""

    def __init__(
        self, given: StrategyContext, gradients: LocalGradientEngine, copy: SharedCopy
    ) -> None:
        super().__init__(given.workload.model, gradients, given.spec.train, given.device)
        self._copy = copy

    def step(self, lr: float) -> Tensor:
        norm = super().step(lr)
        if self._gradients.has_samples:
            self._copy.advance()
        else:
            self._copy.refresh()
        return norm


class AsynchronousGossip(GossipReplicas):
    """AD-PSGD: gossip among ranks that train at their own speeds."""

    is_on_demand = True

    def __init__(self, given: StrategyContext) -> None:
        gradients = LocalGradientEngine(given.engine_parts())
        self._copy = SharedCopy(weights_of(given.workload.model))
        super().__init__(given, gradients, AveragedStep(given, gradients, self._copy))
        self._averaging: Averaging | None = None
        self._dynamic_shares: DynamicShares | None = None
        self._staleness = torch.zeros(0)
        """Sum of `SharedCopy.staleness` over all ranks at the last evaluation."""
        self._step = 0

    @property
    def preemption_requested(self) -> bool:
        if self._dynamic_shares is None:
            return super().preemption_requested
        return self._dynamic_shares.leaves_after == self._step

    def prepare(self, feed: Feed, step: int) -> None:
        super().prepare(feed, step)
        self._copy.begin()
        self._averaging = self._dynamic_shares = None
        if self.world_size > 1:
            store = compat_torch.store_of_group()
            self._dynamic_shares = DynamicShares(store, self.rank, self.world_size, last_step=step)
            sides = sides_of(self.graph_options, self.rank, self.world_size)
            self._averaging = Averaging(self._copy, self.rank, sides, self.given.page)

    def optimizer_steps(self, step: int, shares: Sequence[Share]) -> Iterator[Sequence[Share]]:
        self._step = step
        if self._dynamic_shares is None:
            yield shares
            return
        if self.given.page.is_asked_to_leave:
            self._dynamic_shares.leave()
        yield from self._dynamic_shares.of_step(step, shares)

    def after_step(self, step: int) -> None:
        if self._averaging is not None:
            self._averaging.want()

    def leave_group(self) -> None:
        # `_averaging` is None if `prepare` has not been called or this rank is the only rank.
        if self._averaging is not None:
            self._averaging.abandon()
            self._averaging = None
            self._copy.refresh()
        super().leave_group()

    def trained(self) -> nn.Module | None:
        trained = super().trained()
        if self._averaging is not None:
            self._averaging.end()
        return trained

    @contextmanager
    def still(self) -> Iterator[None]:
        """Context manager in which no averaging is in progress. A collective."""
        if self._averaging is None:
            yield
            return
        self._averaging.pause()
        try:
            self._averaging.meet()
            self._copy.refresh()
            yield
        finally:
            self._averaging.resume()

    def _take_mean(self, weights: list[Tensor], buffers: list[Tensor]) -> None:
        super()._take_mean(weights, buffers)
        self._staleness = self._copy.staleness.clone()
        process_group.add_up(self._staleness, self.world_size)

    def evaluation_metrics(self) -> dict[str, float]:
        counts = {stale: int(number) for stale, number in enumerate(self._staleness.tolist())}
        return super().evaluation_metrics() | staleness_metrics(counts)
