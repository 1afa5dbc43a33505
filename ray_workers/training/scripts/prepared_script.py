"""The process group of a user's script that has called `train.prepare`. Like a recipe's group, this
group continues when a lost rank is replaced."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dray import train
from dray.train import reporting
from dray.train.prepared.group import LoopPhase
from dray.train.prepared.trained import Trained
from ray_workers.shared.contracts import SCRIPT_DIFFERS, RankTask
from ray_workers.shared.heartbeat import (
    HeartbeatPage,
    RankAssignment,
    RankPhase,
    TimeCategory,
)
from ray_workers.training import devices
from ray_workers.training.core.errors import (
    RESUMES,
    CopiesDifferError,
    PartsLostError,
    UnendingOperationError,
)
from ray_workers.training.core.exits import Left
from ray_workers.training.core.faultpoints import FaultPoint, faultpoint
from ray_workers.training.elastic import process_group, state_transfer
from ray_workers.training.elastic.rendezvous import RendezvousHandler
from ray_workers.training.loop.replica_check import ReplicaCheck
from ray_workers.training.parallel.replicas import ReplicaComparison, ReplicaGroup, Replicated
from ray_workers.training.scripts.rank_checkpoints import RankCheckpoints, read_divided

_PHASES = {
    LoopPhase.DATA: RankPhase.DATA,
    LoopPhase.COMPUTE: RankPhase.COMPUTE,
    # After the update, the script's own code may take as long as an evaluation.
    LoopPhase.OWN_CODE: RankPhase.EVALUATE,
    LoopPhase.SAVE: RankPhase.SAVE,
    LoopPhase.FINISH: RankPhase.FINISH,
}


class BatchLostError(PartsLostError):
    """Raised if no rank is at a batch from which a new rank could continue."""

    def __init__(self) -> None:
        Exception.__init__(
            self,
            "no rank holds a state from which a new rank could continue. Either the ranks waited "
            "for each other between an optimizer step and the loader's next batch, or the script "
            "changed weights without an optimizer. Or the script did one of these for the first "
            "time: it exchanged gradients after an optimizer step of the same batch, or it "
            f"accumulated the gradients of several batches. Therefore, {RESUMES}",
        )


class ScriptDiffersError(CopiesDifferError):
    """Raised if a replacement rank ran the script and got different weights."""

    def __init__(self) -> None:
        Exception.__init__(
            self,
            "after the group was re-formed, the ranks had different weights or optimizer states, "
            f"or were at different batches: {SCRIPT_DIFFERS}, such as an untracked object or the "
            f"script's own batch counter (use train.progress() instead); {RESUMES}",
        )


class RankGroup:
    """One rank's membership in the group of its job, created by `train.prepare`. After
    `train.prepare`, the rank joins each new group in later rounds, and leaves on SIGTERM unless the
    script handles this signal."""

    def __init__(
        self, task: RankTask, page: HeartbeatPage, report: Callable[[BaseException], int]
    ) -> None:
        """report: reports the error of the script, and returns the exit code of the process."""
        self._page = page
        self._task = task
        self._checkpoints: RankCheckpoints | None = None
        self._furthest_step = task.furthest_step
        self._device = torch.device(task.device)
        self._rendezvous = RendezvousHandler(task, page)
        # Only this thread could continue the script, so the rank counts as lost itself.
        self._rendezvous.hand_over_to(lambda: os._exit(report(UnendingOperationError())))
        self._must_wait = devices.is_gpu(self._device) and self._rendezvous.recovers
        """Whether operations might be aborted, so that their results are undefined."""
        self._may_abort(not devices.is_gpu(self._device))
        check = task.spec.get("check")
        every = None if check is None else int(check["replicas_every"])
        self._replica_check = ReplicaCheck(every, self._device, reporting.replicas_agreed)
        self._has_begun = False
        """Whether the script has reached a batch in this process."""
        self._replicas: ScriptReplicas | None = None
        self._is_elastic = bool(task.spec.get("elastic"))
        self._is_asked_to_leave = False
        page.show_prepared()
        train.observe(_Unobserved())
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):
            signal.signal(signal.SIGTERM, self._asked)

    @property
    def rank(self) -> int:
        return self._rendezvous.assignment.rank

    @property
    def world_size(self) -> int:
        return self._rendezvous.assignment.world_size

    @property
    def may_grow(self) -> bool:
        return self._is_elastic

    def join(self) -> None:
        if dist.is_initialized():
            raise RuntimeError(
                "prepare() creates the process group: remove init_process_group() from the script"
            )
        self._rendezvous.join(self._take_assignment)
        faultpoint(FaultPoint.GROUP_JOINED, given=self)

    def _take_assignment(self) -> None:
        os.environ["RANK"] = os.environ["ROLE_RANK"] = str(self.rank)
        os.environ["WORLD_SIZE"] = os.environ["ROLE_WORLD_SIZE"] = str(self.world_size)

    def check(self, step: int, trained: Trained) -> None:
        if not self._has_begun:  # the other ranks might already have compared after this step
            self._has_begun = True
            self._replica_check.begins_at(step)
        is_due = self._replica_check.is_due(step)
        if self._must_wait and self._rendezvous.is_announced:
            devices.synchronize(self._device)
        self._rendezvous.check()
        replicas = self._replicas_of(trained)
        self._replica_check.after_step(step, replicas, is_saved=is_due)

    def _replicas_of(self, trained: Trained) -> ScriptReplicas:
        """Return the replicas in the current group."""
        assignment = self._rendezvous.assignment
        if self._replicas is None or self._replicas.assignment != assignment:
            self._replicas = ScriptReplicas(trained, self._device, assignment, self.operating)
        return self._replicas

    @contextmanager
    def operating(self) -> Iterator[None]:
        """Return a context in which operations on a GPU may be aborted. The script's own operations
        are never aborted, because the script would use their undefined results."""
        if not self._must_wait:
            yield
            return
        devices.synchronize(self._device)  # waits for operations on all streams
        self._may_abort(True)
        try:
            yield
            self.wait_for_results()
        finally:
            self._may_abort(False)
        process_group.check_unbroken()

    def wait_for_results(self) -> None:
        if self._must_wait:
            process_group.wait_for_results(self._device)

    def _may_abort(self, may: bool) -> None:
        with process_group.one_at_a_time:
            self._rendezvous.may_abort = may

    def may_follow(self, error: BaseException) -> bool:
        return self._rendezvous.may_follow(error)

    def follow(self, error: BaseException) -> None:
        if self.is_asked_to_leave:  # rank 0 has saved and left
            raise Left from error
        self._rendezvous.break_group()
        self._rendezvous.follow(error)

    def state_lost(self) -> Exception:
        return BatchLostError()

    def copies_differ(self) -> Exception:
        return ScriptDiffersError()

    def hand_over(
        self, state: Callable[[], Mapping[str, Any]], source: int
    ) -> dict[str, Any] | None:
        return state_transfer.broadcast(state, source, self.rank, self._device)

    def checkpoints(self, keep: int) -> RankCheckpoints:
        self._checkpoints = RankCheckpoints(
            self._task, self._page, self._rendezvous.assignment, keep
        )
        return self._checkpoints

    def read_divided(self, folder: Path) -> Mapping[str, Any]:
        return read_divided(folder)

    def enter(self, phase: LoopPhase, step: int) -> None:
        if phase is LoopPhase.EXCHANGE:
            faultpoint(FaultPoint.BEFORE_EXCHANGE, step, self)
            self._page.exchange()
            return
        use = TimeCategory.RECOMPUTED if step <= self._furthest_step else TimeCategory.USEFUL
        if phase is LoopPhase.DATA:
            use = TimeCategory.DATA_WAIT
        elif phase is LoopPhase.SAVE:
            use = TimeCategory.CHECKPOINTING
        elif phase is LoopPhase.OWN_CODE:
            faultpoint(FaultPoint.BACKWARD_DONE, step, self)
        self._page.enter(_PHASES[phase], use)

    def began(self, step: int, *, is_verified: bool) -> None:
        generation = self._rendezvous.assignment.generation
        self._page.begin(generation, step, is_verified=is_verified)
        faultpoint(FaultPoint.RESTORED, step, self)

    def verified(self) -> None:
        self._page.verify()

    def committed(self, step: int) -> None:
        self._page.commit(step)
        faultpoint(FaultPoint.STEP_ENDS, step, self)

    @property
    def is_asked_to_leave(self) -> bool:
        return self._is_asked_to_leave or self._page.is_asked_to_leave

    def leave(self) -> None:
        raise Left

    def close(self) -> None:
        """Commit the checkpoint that is being saved, at the end of the script or after an error."""
        if self._checkpoints is not None:
            self._checkpoints.close()

    def finish(self, step: int, trained: Trained) -> None:
        self._replica_check.compare(step, self._replicas_of(trained), again=True)
        self._rendezvous.finish()
        self._rendezvous.leave()

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self._is_asked_to_leave:
            raise Left
        self._is_asked_to_leave = True


class ScriptReplicas(ReplicaGroup):
    """The models and optimizers of a script, of which each rank has a copy."""

    def __init__(
        self,
        trained: Trained,
        device: torch.device,
        assignment: RankAssignment,
        operating: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """operating: see `RankGroup.operating`."""
        self.device, self.assignment = device, assignment
        self.rank, self.world_size = assignment.rank, assignment.world_size
        self._trained, self._operating = trained, operating

    def compare_copies(self, left_out: Collection[int] = ()) -> ReplicaComparison:
        with self._operating():
            return super().compare_copies(left_out)

    def replicated(self) -> Sequence[Replicated]:
        return [Replicated(self._trained.replicated(), lambda _: 0)]

    def updated_parameters(self) -> Iterable[Tensor]:
        return self._trained.parameters


class _Unobserved:
    """Ignores the script's calls, because the group's phases already record the script's time."""

    def stepped(self, step: int) -> None:
        """Do nothing, because the optimizer records its own steps."""

    def storing(self) -> AbstractContextManager[None]:
        return nullcontext()
