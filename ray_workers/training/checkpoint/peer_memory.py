"""Keeps the newest state of a divided model in the memory of the ranks.

Periodically, each rank copies its share of the state, and sends the copy to other ranks. The copy
is staged like a checkpoint's, and a thread sends it over a separate process group while training
continues. When a rank is lost, its replacement gets the lost rank's share from a rank that keeps
it, and all other ranks go back to the same step with their own copies.

There are two slots. A rank overwrites one slot only after all ranks have received everything for
the other slot, so that one complete generation of copies remains if a rank is lost at any time.
"""

from __future__ import annotations

import math
import platform
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dray import train
from dray.spec import JobSpec
from dray.train.prepared.copies import leaves
from ray_workers.shared.frames import MemoryCopiesReport, NoMemoryCopiesReport
from ray_workers.shared.job_log import log
from ray_workers.shared.memory_limit import COPIES_SHARE, available_memory, human
from ray_workers.training.checkpoint.interval import NUM_COSTS, StallMeter
from ray_workers.training.checkpoint.share_exchange import (
    Holding,
    PeerShare,
    exchange,
    gathered,
    keepers,
    newest_whole,
    senders,
)
from ray_workers.training.checkpoint.staging import StagedState, Stager, hold_for, pages
from ray_workers.training.core.errors import HostMemoryError, KeeperLostError
from ray_workers.training.core.faultpoints import FaultPoint, faultpoint
from ray_workers.training.core.progress import Progress
from ray_workers.training.elastic import process_group
from ray_workers.training.elastic.state_transfer import everyones

MAX_SHARE = 0.01
"""With `auto`, copies take at most this share of the time."""
FIRST_EVERY = 16
"""With `auto`, number of steps after which the second copy is made. Its cost determines the
interval."""
REPORT_S = 1.0
"""Minimum number of seconds between two reports of complete copies."""
RETRY_SHARE = 0.25
"""A copy that must wait for the previous one is tried again after this share of the steps that it
has waited, so that the ranks do not communicate in every step."""
WORTH_LOGGING = 1.5
"""Factor by which the interval must change before it is logged again."""
NUM_SLOTS = 2
SENDING_END_S = 0.5
"""Number of seconds in which an operation of a broken group usually ends."""
FINISH_LOOK_S = 0.01
BUSY, FAILED, NO_MEMORY = 0, -1, -2
"""Numbers that a rank that can't begin a copy sends to the other ranks instead of its interval."""


class CompleteCopy(NamedTuple):
    """A copy that is complete on all ranks."""

    seconds: float
    """How long the copy took."""
    report: MemoryCopiesReport


class PeerMemory:
    """The copies of the state in the memory of this rank: of its own share, and of the shares of
    other ranks. Does nothing unless the job document or its defaults enable these copies."""

    def __init__(self, spec: JobSpec, state: Callable[[], Mapping[str, Any]]) -> None:
        """state: returns this rank's share of the state."""
        self._state = state
        rule = spec.checkpoint.in_memory
        self._is_auto = isinstance(rule, str)
        self._copies = 1 if isinstance(rule, str) else rule.copies
        self._every = FIRST_EVERY if isinstance(rule, str) else rule.every_steps
        """The interval in steps, which is the same on all ranks."""
        self._wanted = self._every
        """The interval that this rank has measured. All ranks use rank 0's."""
        self._logged_every: int | None = None
        self._applies = spec.keeps_state_in_memory
        self._is_on = False
        """Whether the ranks of this group begin copies."""
        self._lacks_memory = False
        self._stagers = [Stager() for _ in range(NUM_SLOTS)]
        self._slots: list[dict[int, PeerShare]] = [{} for _ in range(NUM_SLOTS)]
        """The shares in each slot, by rank."""
        self._kept_memory: list[dict[int, Tensor]] = [{} for _ in range(NUM_SLOTS)]
        """Memory for the shares of other ranks, in each slot, by number of the copy."""
        self._next = 0
        """The slot that is overwritten next."""
        self._sending: Future[CompleteCopy] | None = None
        """The last copy."""
        self._is_reported = True
        """Whether the duration of the last copy is reported."""
        self._staged: StagedState | None = None
        self._group: dist.ProcessGroup | None = None
        self._device = torch.device("cpu")
        self._rank = self._world_size = 0
        self._keepers: list[list[int]] = []
        self._held: list[list[Holding]] = []
        """The shares that each rank held when the group was formed."""
        self._num_on_node = 1
        self._whole: int | None = None
        """The step to which the ranks can go back, when the group was formed."""
        self._due: int | None = None
        """The step after which a copy is due; None if it is due at once."""
        self._next_try = 0
        self._is_asked = False
        """Whether a copy is due before the interval has passed."""
        self._num_bytes = 0
        """Size of the largest share so far."""
        self._needed = self._available = 0
        """Memory in bytes that the copies need on this node, and that is available to them."""
        self._unreported: MemoryCopiesReport | None = None
        self._reported_at = -math.inf
        self._meter = StallMeter()
        self._costs: deque[float] = deque(maxlen=NUM_COSTS)

    def join(self, rank: int, world_size: int, device: torch.device) -> None:
        """Join a group that was just formed. A collective operation."""
        if not self._applies:
            return
        if self._sending is not None:
            self._await_end_of(self._sending)
            self._sending = None
        self._rank, self._world_size, self._device = rank, world_size, device
        self._group = dist.new_group(backend="gloo", timeout=process_group.OPERATION_LIMIT)
        self._due, self._next_try, self._is_asked = None, 0, False

    def _await_end_of(self, sending: Future[CompleteCopy]) -> None:
        """Wait until nothing is being sent. If gloo does not end an operation of the broken group
        (see `waiting_thread`), don't reuse the memory that this operation uses."""
        try:
            sending.exception(SENDING_END_S)
        except TimeoutError:
            slot = 1 - self._next
            self._slots[slot] = dict(self._slots[slot])
            self._stagers[slot], self._kept_memory[slot] = Stager(), {}

    def agree(self) -> None:
        """Find the newest step to which all ranks can go back. A collective operation. All older
        copies are dropped, and so are newer copies that are missing on some ranks."""
        if not self._applies:
            return
        mine = [share.holding for slot in self._slots for share in slot.values()]
        own = (platform.node(), self._lacks_memory, mine)
        everyone = process_group.gathered(own, self._world_size)
        nodes, self._held = [node for node, _, _ in everyone], [held for _, _, held in everyone]
        self._is_on = not any(lacks for _, lacks, _ in everyone)
        self._num_on_node = nodes.count(platform.node())
        self._keepers = keepers(nodes, self._copies)
        self._whole = newest_whole(self._held)
        for number, slot in enumerate(self._slots):
            kept = {rank: each for rank, each in slot.items() if each.step == self._whole}
            self._slots[number] = kept
        sizes = [len(slot) for slot in self._slots]
        self._next = sizes.index(min(sizes))

    @property
    def is_empty(self) -> bool:
        """Whether no rank of the group holds any share of the state."""
        return not any(self._held)

    def restored(self) -> tuple[int, Any]:
        """Return (the step to which all ranks go back, this rank's state after this step). A
        collective operation. Raises KeeperLostError if there is no such step."""
        if self._whole is None:
            raise KeeperLostError
        held = {rank: share for slot in self._slots for rank, share in slot.items()}
        by_receiver = senders(self._held, self._whole)
        sent = {to: held[to] for to, source in by_receiver.items() if source == self._rank}
        sources = [by_receiver[self._rank]] if self._rank in by_receiver else []
        assert self._group is not None
        for share in exchange(self._group, sent, sources, lambda _, size: pages(size)):
            self._slots[1 - self._next][self._rank] = held[self._rank] = share
        return self._whole, held[self._rank].state()

    def begin_copy(self, progress: Progress, volatile: Iterable[Tensor]) -> None:
        """Begin a copy of the state after the last step, if a copy is due on all ranks. This is a
        collective operation if a copy is due. Does nothing before all tasks after the step are
        done.

        volatile: tensors of the state that change before `hold` is called.
        """
        step = progress.step
        if not self._is_on or not progress.is_settled or step < self._next_try:
            return
        began = time.perf_counter()
        answer, taken = self._answer()
        answers = everyones(answer, self._device, self._world_size)
        worst = min(answers)
        if worst == BUSY:
            waited = step - (step if self._due is None else self._due)
            self._next_try = step + max(1, int(RETRY_SHARE * waited))
        elif worst == NO_MEMORY:
            numbers = (self._needed, self._available)
            self._give_up(*(everyones(each, self._device, self._world_size) for each in numbers))
        elif worst == FAILED:
            self._is_on = False
            if self._rank == 0:
                log(
                    "the state is no longer copied to the memory of other ranks, because the copy "
                    f"of rank {answers.index(worst)} could not be sent"
                )
        if worst <= BUSY:
            return
        more = answers[0] - self._every
        self._take_interval(answers[0])
        if self._due is not None and not self._is_asked and step < self._due + more:
            self._due = self._next_try = self._due + more
            return
        self._due = self._next_try = step + self._every
        slot = self._next
        self._next = 1 - slot
        self._slots[slot] = {}
        sending: Future[CompleteCopy] = Future()
        self._sending, self._is_reported = sending, False
        self._staged = staged = self._stagers[slot].take(taken, volatile)
        if not self._is_asked:  # otherwise the steps also wait for the checkpoint
            self._meter.began(time.perf_counter() - began)
        self._is_asked = False
        arguments = (sending, slot, step, staged)
        threading.Thread(target=self._send, args=arguments, daemon=True, name="dray-peers").start()

    def ask(self, step: int) -> None:
        """Schedule a copy after this step, on all ranks. Called when a checkpoint is begun: if the
        checkpoint were newer than the copies, a recovery from memory would lose more steps than a
        restart."""
        self._is_asked, self._next_try = True, step
        self._due = step if self._due is None else min(self._due, step)

    def _take_interval(self, every: int) -> None:
        if every != self._every and self._rank == 0:
            logged = self._logged_every
            if logged is None or not logged / WORTH_LOGGING < every < logged * WORTH_LOGGING:
                self._logged_every = every
                log(f"copying the state to the memory of other workers every {every} steps")
        self._every = every

    def _answer(self) -> tuple[int, Mapping[str, Any]]:
        """Return (this rank's interval, its share of the state) or, if this rank can't begin a
        copy, the reason."""
        if self._sending is not None and not self._sending.done():
            return BUSY, {}
        if self._sending is not None and self._sending.exception() is not None:
            return FAILED, {}
        state = self._state()
        num_bytes = sum(each.nbytes for each in leaves(state) if isinstance(each, Tensor))
        if num_bytes > self._num_bytes:
            used = sum(share.data.nbytes for slot in self._slots for share in slot.values())
            self._needed = NUM_SLOTS * (1 + self._copies) * num_bytes * self._num_on_node
            self._available = available_memory() + used * self._num_on_node
            if self._needed > COPIES_SHARE * self._available:
                return NO_MEMORY, {}
            self._num_bytes = num_bytes
        return self._wanted, state

    def _give_up(self, needed: Sequence[int], available: Sequence[int]) -> None:
        """Stop copying, because a rank lacks memory. Raises HostMemoryError unless the setting is
        `auto`.

        needed, available: memory in bytes on the node of each rank.
        """
        self._is_on, self._lacks_memory, self._unreported = False, True, None
        self._slots = [{} for _ in range(NUM_SLOTS)]
        pairs = zip(needed, available, strict=True)
        shares = [COPIES_SHARE * has / max(needs, 1) for needs, has in pairs]
        rank = shares.index(min(shares))
        what = (
            "the copies of the state in memory (checkpoint.in_memory) need "
            f"{human(needed[rank])} on the node of rank {rank}, more than {COPIES_SHARE:.0%} of "
            f"the {human(available[rank])} that are available there"
        )
        if not self._is_auto:
            fitting = int(shares[rank] * (1 + self._copies)) - 1
            fix = f"in_memory.copies to {fitting}" if fitting > 0 else "in_memory to off"
            raise HostMemoryError(f"{what}: set checkpoint.{fix}")
        if self._rank == 0:
            report = NoMemoryCopiesReport(
                f"{what}. No copies are kept, so the job restarts from its checkpoint if a worker "
                "is lost"
            )
            log(report.message)
            train.emit(report.KIND, report.body())

    def _send(
        self, sending: Future[CompleteCopy], slot: int, step: int, staged: StagedState
    ) -> None:
        began = time.perf_counter()
        try:
            assert self._group is not None
            self._exchange(self._group, slot, step, staged)
            # This collective operation ends when the copy is complete on all ranks.
            shares = self._slots[slot]
            used = NUM_SLOTS * sum(share.data.nbytes for share in shares.values())
            sizes = gathered(self._group, [shares[self._rank].data.nbytes, used])
        except BaseException as error:
            sending.set_exception(error)
        else:
            of_state, of_workers = zip(*sizes, strict=True)
            report = MemoryCopiesReport(step, sum(of_state), max(of_workers))
            sending.set_result(CompleteCopy(time.perf_counter() - began, report))

    def _exchange(
        self, group: dist.ProcessGroup, slot: int, step: int, staged: StagedState
    ) -> None:
        shares, memory = self._slots[slot], self._kept_memory[slot]
        staged.wait()
        own = PeerShare(
            self._rank, step, staged.tree, torch.frombuffer(staged.data, dtype=torch.uint8)
        )
        shares[self._rank] = own
        faultpoint(FaultPoint.BEFORE_PEER_COPY, step)
        sources = [rank for rank, each in enumerate(self._keepers) if self._rank in each]

        def memory_for(source: int, num_bytes: int) -> Tensor:
            number = sources.index(source)
            if number not in memory or memory[number].numel() != num_bytes:
                memory.pop(number, None)  # free it first
                memory[number] = pages(num_bytes)
            return memory[number]

        sent = dict.fromkeys(self._keepers[self._rank], own)
        for share in exchange(group, sent, sources, memory_for):
            shares[share.rank] = share
        faultpoint(FaultPoint.PEER_COPY_SENT, step)

    def step_took(self, step: int, seconds: float) -> None:
        """Count a step. With `auto`, the cost of the last copies determines the interval. Rank 0
        reports each copy in the step in which it ended."""
        if not self._is_on:
            return
        is_sending = self._sending is not None and not self._sending.done()
        if not is_sending and not self._is_reported:
            self._is_reported = True
            self._report(step)
        self._report_complete()
        cost_s = self._meter.step_took(seconds, is_saving=is_sending)
        if cost_s is None or not self._is_auto or not self._meter.step_s > 0:
            return
        self._costs.append(cost_s)
        self._wanted = every_steps(list(self._costs), self._meter.step_s)

    def _report(self, step: int) -> None:
        assert self._sending is not None
        if self._rank == 0 and self._sending.exception() is None:
            copy = self._sending.result()
            self._unreported = copy.report
            copied = {"perf/copy_time_s": copy.seconds, "perf/copy_bytes": self._num_bytes}
            train.report(step, copied)

    def _report_complete(self) -> None:
        """Report the newest complete copy, unless another one was reported just before."""
        now = time.monotonic()
        if self._unreported is not None and now - self._reported_at >= REPORT_S:
            train.emit(self._unreported.KIND, self._unreported.body())
            self._unreported, self._reported_at = None, now

    def hold(self) -> None:
        """Wait for the copy. Must be called before the state changes."""
        if self._staged is not None:
            hold_for(self._staged)
            self._staged = None

    def finish(self, waiting: Callable[[], None]) -> None:
        """Wait until nothing is being sent, for as long as all ranks exist. A collective operation.

        waiting: called repeatedly while this rank waits.
        """
        self.hold()
        while self._is_on and self._sending is not None:
            is_failed = self._sending.done() and self._sending.exception() is not None
            own = FAILED if is_failed else int(self._sending.done())
            if min(everyones(own, self._device, self._world_size)) != BUSY:
                return
            waiting()
            time.sleep(FINISH_LOOK_S)

    def leave(self) -> None:
        """Leave a broken group."""
        self.hold()
        self._group = None


def every_steps(costs_s: Sequence[float], step_s: float) -> int:
    """Return the smallest interval, in steps, with which copies take at most MAX_SHARE of the
    time. costs_s: the time that each of the last copies added."""
    return max(1, math.ceil(statistics.median(costs_s) / (MAX_SHARE * step_s)))
