"""The rounds of a rank's rendezvous: how a rank moves from a broken group to the next one.

The supervisor, which sees all ranks, decides which ranks join the next round, and announces it. In
this module, a rank reads its assignment, cuts its connections to the old group, and meets the other
ranks at the store. All changes to a group work in this way, whether a peer died, a peer was killed
because it hung, or the world size changed. The term rendezvous is also used by torchelastic; the
number of a round is called `generation` in the protocol.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dray.spec import JobSpec
from dray.spec.checks.recovery import recovers_on_gpus
from dray.train.spool import EVERYTHING, begin_count, known
from ray_workers.shared import heartbeat
from ray_workers.shared.contracts import AWAITING, Cause, RankTask
from ray_workers.shared.heartbeat import HeartbeatPage, RankAssignment, RankPhase, TimeCategory
from ray_workers.shared.spool_reader import spool_key
from ray_workers.training import devices
from ray_workers.training.core import device_faults
from ray_workers.training.core.compat_torch import PrefixStore, Store, TCPStore
from ray_workers.training.core.errors import PartsLostError, cause_of
from ray_workers.training.core.faultpoints import FaultPoint, faultpoint
from ray_workers.training.elastic import process_group
from ray_workers.training.elastic.connections import Connections
from ray_workers.training.elastic.state_transfer import everyones
from ray_workers.training.elastic.waiting_thread import (
    LOOKS_BEFORE_CUT,
    LOOKS_BEFORE_HANDOVER,
    WATCH_S,
    WaitingThread,
)

# Only the supervisor decides whether a round takes too long, because only the supervisor knows how
# fast the machines are, and which ranks have died or are suspended. Therefore, the limits below
# exceed the supervisor's limits even on overloaded machines, where the values in
# `supervision.rules.timings.Timings` are multiplied by up to `machine_speed.MAX_SLOWNESS`.
ASSIGNMENT_LIMIT_S = 9000.0
"""Maximum number of seconds that a rank waits for its assignment in the next round, including the
time to find slots and to read data again (`replace_limit_s`, `standby_limit_s`, `grow_limit_s`,
and `ready_limit_s`)."""
MEETING_LIMIT_S = 5400.0
"""Maximum number of seconds to wait for the other ranks to arrive at the store. They might have to
read their data first (`whole_limit_s`)."""
FORMING_LIMIT_S = 5400.0
"""Maximum number of seconds for connecting to the other ranks once they have arrived at the store
(`whole_limit_s`). Connecting usually takes less than a second."""
LOOK_S = 0.002
SPARE_LOOK_S = 0.01
"""Seconds between two polls of a spare, which can wait for hours and must not use up a CPU."""
FINISH_LOOK_S = 0.1
"""Maximum number of seconds between two polls while a rank of a script waits for the other ranks to
end."""
LOOKS_TO_LEAVE_TOGETHER = 40
"""Like `LOOKS_BEFORE_CUT`, if the ranks agree after which step they leave (`check_together`). If
connections were cut during a step, the ranks could differ by this step."""
NCCL_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Environment variables that a group on GPUs needs to recover in place. Only dray may abort NCCL's
operations. torch's watchdog must neither abort them, because their undefined results would look
like valid ones, nor end the process, which holds the state."""


class GroupChanged(Exception):
    """The rank must leave its group, because it has an assignment in the next group."""


class Spool:
    """The spool for the reports of this process. When the process becomes another rank, it uses
    another spool, because the name of a spool contains the rank to which its frames belong."""

    def __init__(self, path: Path, rank: int | None) -> None:
        self._path = path
        self._rank = rank

    def take(self, assignment: RankAssignment) -> None:
        """Write all further frames to the spool of the assigned rank. Two processes never have the
        same rank in the same round."""
        if assignment.rank != self._rank:
            self._rank = assignment.rank
            key = spool_key(assignment.rank, assignment.generation, "metrics")
            directory = self._path.with_name(key)
            if known(self._path) != EVERYTHING:  # the service records its cursors
                begin_count(directory)
            os.environ["DRAY_SPOOL_DIR"] = str(directory)


class RendezvousHandler:
    """Moves a rank from each rendezvous round to the next."""

    def __init__(self, task: RankTask, page: HeartbeatPage) -> None:
        self.assignment = RankAssignment(task.generation, task.rank, task.world_size, None)
        self._spool = Spool(Path(task.spool_dir), task.rank if task.generation >= 0 else None)
        self._prefix = task.page_prefix
        self._page = page
        self._device = torch.device(task.device)
        self.recovers = self._device.type == "cpu" or recovers_on_gpus(
            JobSpec.model_validate(task.spec)
        )
        """Whether the group recovers in place."""
        self.may_abort = True
        """Whether operations may be aborted when another round is announced. Changed only by the
        holder of `process_group.one_at_a_time`."""
        elastic = task.spec.get("elastic") or {}
        self._has_spares = bool(elastic.get("spares"))
        self._leaves_together = elastic.get("min_workers") is not None and (
            JobSpec.model_validate(task.spec).is_divided
        )
        self._connections = Connections()
        self._watcher: threading.Thread | None = None
        self._training = WaitingThread(threading.get_ident(), threading.get_native_id())
        self._continued: Callable[[], None] | None = None
        self._handover = threading.Lock()
        """Held while another thread is started to continue the training."""
        self._store: Store | None = None
        """The store of this round."""
        self._is_without_group = False
        self._address = (task.master_addr, task.master_port)

    @property
    def is_alone(self) -> bool:
        return self.assignment.world_size == 1

    def join(self, enter: Callable[[], None]) -> None:
        """Form the group of this round. Raises GroupChanged if a later round is announced first.

        enter: forms the smaller groups within this group. The connections of the smaller groups are
        cut together with the connections of this group.
        """
        if self.assignment.generation == AWAITING:
            self._await_first_assignment()
        if self.is_alone:
            enter()
            return
        self._watch()
        with self._connections.being_formed():
            self._form()
            enter()

    def meet_without_group(self) -> Store:
        """Get an assignment without forming a process group, for ranks that connect in another way.
        Returns the attempt's store, through which these ranks find each other. A later round
        affects only the ranks that join in that round."""
        if self.assignment.generation == AWAITING:
            self._await_first_assignment()
        self._is_without_group = True
        self.assignment = replace(self.assignment, world_size=1)
        return TCPStore(*self._address, wait_for_workers=False)

    def _await_first_assignment(self) -> None:
        """Wait for a rank, without a limit: a spare might wait until the job ends. The page shows
        that the process is not hanging."""
        use = TimeCategory.SPARE if self._has_spares else TimeCategory.STARTING
        pause_s = SPARE_LOOK_S if self._has_spares else LOOK_S
        self._page.enter(RankPhase.STANDBY, use)
        while self._page.wanted <= 0:
            time.sleep(pause_s)
            self._page.enter(RankPhase.STANDBY, use)
        self._take_assignment(ASSIGNMENT_LIMIT_S)

    def _form(self) -> None:
        """Meet the other ranks and connect to them. Errors in this method never come from the
        training code, so an error that would count as a user error is raised as a DistStoreError.
        GroupChanged and all other errors are raised unchanged."""
        try:
            store = self._meet()
            use = TimeCategory.RECOVERING if self.assignment.generation else TimeCategory.STARTING
            self._page.enter(RankPhase.FORMING, use)
            faultpoint(FaultPoint.PEERS_ARE_THERE, given=self)
            if devices.is_gpu(self._device) and self.recovers:
                os.environ.update(NCCL_VARIABLES)
            process_group.join(
                self._device,
                store,
                self.assignment.rank,
                self.assignment.world_size,
                timedelta(seconds=FORMING_LIMIT_S),
            )
        except Exception as error:
            if isinstance(error, GroupChanged) or cause_of(error) is not Cause.USER_ERROR:
                raise
            raise dist.DistStoreError(f"the group could not be formed: {error}") from error

    def hand_over_to(self, continued: Callable[[], None]) -> None:
        """Set a function that is called in another thread if the training thread waits for an
        operation of a broken group, and this operation never ends. The function does not return."""
        self._continued = continued

    def park_if_replaced(self) -> None:
        """Block forever if another thread has taken over training from the calling thread."""
        with self._handover:
            is_replaced = not self._training.is_current()
        if is_replaced:
            threading.Event().wait()

    def _hand_over_if_stuck(self) -> None:
        stood_still = self._training.num_looks_without_progress()
        if self._continued is None or stood_still < LOOKS_BEFORE_HANDOVER:
            return
        with self._handover:  # if the thread wakes from now on, it waits in `park_if_replaced`
            if not self._training.num_looks_without_progress():
                return
            thread = threading.Thread(target=self._continued, name="dray-training", daemon=True)
            thread.start()
            self._training = WaitingThread(thread.ident, thread.native_id)
            self._page.trains_in(thread.native_id or 0)

    def _watch(self) -> None:
        """Cut this rank's connections when another round is announced, even while this rank waits
        for an unresponsive peer whose connections are intact, or for a peer that died before
        connecting."""
        if not self._prefix or self._watcher is not None:
            return

        def is_wanted() -> bool:
            return self.is_announced and self.assignment.generation >= 0

        def watch() -> None:
            late = 0
            most = LOOKS_TO_LEAVE_TOGETHER if self._leaves_together else LOOKS_BEFORE_CUT
            while True:
                time.sleep(WATCH_S)
                late = late + 1 if is_wanted() else 0
                if late > most:
                    process_group.abort(lambda: self.may_abort and is_wanted())
                    if self.may_abort:
                        self._connections.cut(is_wanted)
                    if self._device.type == "cpu":
                        self._hand_over_if_stuck()

        self._watcher = threading.Thread(target=watch, name="dray-cutting", daemon=True)
        self._watcher.start()

    def _meet(self) -> Store:
        """Wait at the store until all ranks of this round have arrived."""
        # Each round has its own connection to the store, because cutting this connection wakes a
        # rank that is waiting for the store.
        whole = TCPStore(*self._address, wait_for_workers=False)
        generation, rank, world_size = (
            self.assignment.generation,
            self.assignment.rank,
            self.assignment.world_size,
        )
        self._store = store = PrefixStore(f"generation-{generation}", whole)
        store.set(f"here-{rank}", "1")
        keys = [f"here-{other}" for other in range(world_size)]
        self._wait(lambda: store.check(keys), MEETING_LIMIT_S, "the other ranks to arrive")
        return store

    @property
    def is_announced(self) -> bool:
        """Whether another round has been announced."""
        return self._page.wanted > self.assignment.generation

    def check(self) -> None:
        """Raise GroupChanged if another round has been announced. Must be called between two
        steps."""
        if not self._is_without_group and self.is_announced:
            raise GroupChanged

    def check_together(self) -> None:
        """Like `check`. If an elastic group divides a model, this is a collective operation, and
        all ranks leave after the same step. If ranks left after different steps, a rank could leave
        while another rank still needs it to complete the step, and possibly no other rank would
        have the state of the leaving rank's part."""
        if not self._leaves_together:
            self.check()
            return
        self._page.exchange()
        is_announced = int(self._page.wanted > self.assignment.generation)
        if any(everyones(is_announced, self._device, self.assignment.world_size)):
            raise GroupChanged

    def may_follow(self, error: BaseException) -> bool:
        """Whether an error only means that the group is broken, so that another round may
        follow."""
        if isinstance(error, GroupChanged):
            return True
        if isinstance(error, PartsLostError) or device_faults.has_fault(error):
            return False
        if not self.recovers or not self._prefix or self.is_alone:
            return False
        # Results of aborted operations can cause any error.
        return process_group.is_broken() or cause_of(error) is Cause.WORKER_LOST

    def break_group(self) -> None:
        """Abort the operations of a broken group on GPUs, and wait until they have ended, so that
        their memory can be used again."""
        process_group.abort()
        devices.synchronize(self._device)

    def follow(self, error: BaseException) -> None:
        """Leave the broken group, and join the next round.

        Reraises `error` if no assignment arrives in time.
        """
        self._page.enter(RankPhase.STANDBY, TimeCategory.RECOVERING)
        self._connections.cut()
        process_group.abandon()
        try:
            self._take_assignment(ASSIGNMENT_LIMIT_S)
        except TimeoutError:
            raise error from None

    def _take_assignment(self, limit_s: float) -> None:
        """Wait for the next assignment. The process can remain without a rank for a long time, and
        the page shows that it is not hanging."""
        known = max(self.assignment.generation, 0)

        def is_announced() -> bool:
            self._page.enter(RankPhase.STANDBY, TimeCategory.RECOVERING)
            return self._page.wanted > known

        self._until(is_announced, limit_s)
        with process_group.one_at_a_time:
            self.assignment = heartbeat.announced(self._prefix)
        self._spool.take(self.assignment)
        self._page.enter(RankPhase.JOINING, TimeCategory.RECOVERING)

    def sent_bytes(self) -> int | None:
        """Return the number of bytes that this rank has sent to other ranks in this round; None on
        GPUs, where the kernel sees little or no NCCL traffic."""
        if self.is_alone or self._device.type != "cpu":
            return None
        return self._connections.sent_bytes()

    def finish(self) -> None:
        """Wait until all ranks of this round have called this method. This is not a collective
        operation, so a rank that calls the method too early does not interfere with operations of
        other ranks. Raises GroupChanged if another round is announced first."""
        if self.is_alone:
            return
        assert self._store is not None
        self._store.set(f"finished-{self.assignment.rank}", "1")
        keys = [f"finished-{rank}" for rank in range(self.assignment.world_size)]
        pause_s = LOOK_S
        while not self._store.check(keys):
            self.check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, FINISH_LOOK_S)

    def leave(self) -> None:
        """Destroy the group after training has ended on all ranks."""
        process_group.leave()

    def _wait(self, is_so: Callable[[], bool], limit_s: float, what: str) -> None:
        def is_over() -> bool:
            self.check()
            return is_so()

        try:
            self._until(is_over, limit_s)
        except TimeoutError:
            raise dist.DistStoreError(f"timed out waiting for {what} after {limit_s:g} s") from None

    def _until(self, is_so: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not is_so():
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(LOOK_S)
