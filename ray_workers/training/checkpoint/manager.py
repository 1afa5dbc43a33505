"""The checkpoints of a rank, which are saved during training, reported, and deleted when
superseded. If the state is divided, every rank saves its part, and rank 0 does the rest."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from torch import Tensor

from dray import train
from dray.train.checkpoints import CheckpointRef, await_known, staying
from dray.train.spool import EVERYTHING, Known
from ray_workers.shared.frames import CheckpointReport
from ray_workers.shared.job_log import log
from ray_workers.training.checkpoint import checkpoint_files, manifests
from ray_workers.training.checkpoint.manifests import CheckpointMetadata, CommittedCheckpoint
from ray_workers.training.checkpoint.save_group import (
    NotFiniteError,
    RankReport,
    SaveGroup,
    SharedSave,
)
from ray_workers.training.checkpoint.staging import StagedState, Stager, hold_for
from ray_workers.training.core.errors import BrokenCheckpointError
from ray_workers.training.core.schedule import sign_of

LOOK_S = 1.0
"""Seconds between two checks of whether a save that is waited for makes progress."""
NICENESS = 10
"""Niceness of the thread that hashes and writes. If one training thread uses the same processor,
the writer gets 10% of it. With a niceness of 19, it would get 1.5%, so that hashing 30 GB could
take 20 minutes."""


class CheckpointManager:
    """Saves checkpoints, one at a time. The state is copied while the next step runs (`hold` is
    called before the state changes). A thread then hashes, writes, and commits the copy, and
    reports the committed checkpoint. A failed save is logged, and never ends the job."""

    def __init__(
        self,
        base_url: str,
        *,
        keep: int,
        best: str | None,
        progressed: Callable[[], None] = lambda: None,
        saves_any_number: bool = False,
    ) -> None:
        """progressed: called while training waits for a save in which a rank is writing.
        saves_any_number: whether to save states with NaN or infinity, which can be intended in a
        user's own model."""
        self._base_url = base_url
        self._progressed = progressed
        self._saves_any_number = saves_any_number
        self._num_chunks = 0
        """Number of chunks that are known to be written."""
        self._keep = keep
        self._best = best
        self._saved: list[CommittedCheckpoint] = []
        self._reported: dict[str, float] = {}
        """For each checkpoint of this attempt, keyed by URL, the position in the spool at which the
        checkpoint's report ends. The service already has the reports of earlier attempts."""
        self._adopted: set[str] = set()
        """URLs of the checkpoints of this attempt that a previous process of rank 0 committed. This
        process does not know whether the service has stored the reports of these checkpoints."""
        self._stager = Stager()
        self._writer = ThreadPoolExecutor(1, "dray-checkpoint", initializer=_lower_priority)
        self._step = -1
        self._snapshot: StagedState | None = None
        self._writing: Future[float] | None = None
        self.checked_step: int | None = None
        """Last step after which the replicas of the model are known to have been equal."""
        self.group: SaveGroup | None = None
        """The ranks that save together; None if rank 0 saves alone."""

    def agreed_at(self, step: int) -> None:
        """Record that the replicas of the model were equal after this step."""
        self.checked_step = step

    @property
    def commits(self) -> bool:
        """Whether this rank commits checkpoints, instead of only writing a part of them."""
        return self.group is None or self.group.rank == 0

    @property
    def is_saving(self) -> bool:
        """Whether a save has begun and has not ended."""
        return self._writing is not None and not self._writing.done()

    @property
    def write_s(self) -> float:
        """Duration of the last save in seconds; 0 if there was none."""
        return self._writing.result() if self._writing is not None and not self.is_saving else 0.0

    def adopt(self, refs: Sequence[CheckpointRef]) -> None:
        """Include checkpoints of earlier attempts, so that they are deleted like the checkpoints of
        this attempt. Unfinished checkpoints of earlier attempts are deleted immediately."""
        self._writer.submit(_sweep, {ref.url.rpartition("/")[0] for ref in refs})
        for ref in refs:
            try:
                self._saved.append(manifests.read_manifest(ref)[0])
            except BrokenCheckpointError as error:
                log(
                    f"ignoring an earlier checkpoint when counting the checkpoints to keep: {error}"
                )

    def adopt_own(self) -> None:
        """Include the checkpoints that a previous process of rank 0 committed in this attempt, and
        delete unfinished checkpoints. The latest checkpoint is reported again, because the process
        may have died between the commit and the report."""
        self._writer.submit(_sweep, [self._base_url])
        known = {one.url for one in self._saved}
        found = checkpoint_files.committed(self._base_url)
        self._saved += [one for one in found if one.url not in known]
        self._adopted = {one.url for one in found}
        self._reported.clear()  # this process may write to another spool
        for newest in found[-1:]:
            self._reported = dict.fromkeys(self._adopted, _report_saved(newest))

    def save(
        self,
        about: CheckpointMetadata,
        state: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        *,
        volatile: Iterable[Tensor] | None = (),
    ) -> None:
        """Begin to save the current state. Does nothing if this rank saves alone and the current
        step is already saved. Waits for the previous save if it is still in progress.

        state: the state, or a function that returns it; its errors are handled like errors from
            copying the state.
        volatile: tensors of the state that change before `hold` is called; None for all tensors.
        """
        if self.group is None and self.has(about.step):
            return
        self.wait_for(about.step)
        began = time.perf_counter()
        save = None if self.group is None else self.group.next_save(self._wrote)
        self._step = about.step
        taken: StagedState | Exception
        try:
            taken = self._snapshot = self._stager.take(
                state() if callable(state) else state, volatile
            )
        except Exception as error:  # other ranks may wait for this rank
            taken = error
        self._writing = self._writer.submit(self._write, about, taken, began, save)

    def has(self, step: int) -> bool:
        """Whether the step is saved in this attempt, or is being saved."""
        if self.is_saving and self._step == step:
            return True
        url = manifests.url_of(self._base_url, step)
        return any(one.url == url for one in self._saved)

    def hold(self) -> None:
        """Wait for the copy. Must be called before the state that was passed to `save` changes."""
        if self._snapshot is not None:
            hold_for(self._snapshot)
            self._snapshot = None

    def wait_for(self, step: int) -> None:
        """Wait for the previous save before saving this step, and log the wait."""
        if self.is_saving:
            log(
                f"the checkpoint of step {step} is due, but must wait until the checkpoint of "
                f"step {self._step} is written"
            )
        self.wait()

    def wait(self) -> None:
        """Wait until no save is in progress. If several ranks save together, also wait until
        nothing is being deleted."""
        self.hold()
        if self._writing is not None:
            num_chunks = -1
            while wait([self._writing], LOOK_S).not_done:
                if self._num_chunks > num_chunks:
                    num_chunks = self._num_chunks
                    self._progressed()
            self._writing.result()
        if self.group is not None:
            self._writer.submit(int).result()

    def _wrote(self) -> None:
        """Record, in the writer thread, that a chunk has been written."""
        self._num_chunks += 1

    def disband(self) -> None:
        """Leave the group of ranks that save together. A save in progress is completed only if the
        other ranks report soon."""
        self.hold()
        if self.group is not None:
            self.group.disband()
            self.group = None

    def _write(
        self,
        about: CheckpointMetadata,
        taken: StagedState | Exception,
        began: float,
        save: SharedSave | None,
    ) -> float:
        """Write the state in the writer thread; return the number of seconds since `began`."""
        saved = None
        try:
            saved = self._committed(about, taken, save)
            if saved is not None:
                self._reported[saved.url] = _report_saved(saved)
                self._saved.append(saved)
        except NotFiniteError as error:
            log(f"the checkpoint of step {about.step} is not saved because {error}")
        except Exception as error:  # storage can raise any error, and the job must continue
            _log_failed(about.step, error)
        if saved is not None:
            self._drop_superseded()
        return time.perf_counter() - began

    def _committed(
        self,
        about: CheckpointMetadata,
        taken: StagedState | Exception,
        save: SharedSave | None,
    ) -> CommittedCheckpoint | None:
        """Write this rank's part of the state, and return the checkpoint; None on ranks that do not
        commit it."""
        if save is None:
            return checkpoint_files.commit(self._base_url, about, self._usable(taken), self._wrote)
        try:
            snapshot = self._usable(taken)
            report = checkpoint_files.write_share(self._base_url, about.step, snapshot, save)
        except NotFiniteError:
            report = RankReport(is_finite=False)
        except Exception as error:  # rank 0 logs it
            report = RankReport(problem=f"rank {save.rank}: {error!r}")
        save.send(report)
        if save.rank != 0:
            save.await_conclusion()
            return None
        try:
            return checkpoint_files.commit_shares(self._base_url, about, save)
        finally:
            save.conclude()

    def _usable(self, taken: StagedState | Exception) -> StagedState:
        """Return a snapshot from which training could resume. Raises NotFiniteError if there are
        non-finite values. If the state could not be copied, raises the error of the copy."""
        if isinstance(taken, Exception):
            raise taken
        if not self._saves_any_number and not taken.is_finite():
            raise NotFiniteError
        return taken

    def tidy(self) -> None:
        """Delete superseded checkpoints at the end, when no save is in progress. Waits briefly for
        the service if older checkpoints are kept only until the service has stored the report of
        the latest checkpoint."""
        if self._superseded(EVERYTHING):
            await_known(self._reported.values(), train.known)
            self._drop_superseded()

    def _superseded(self, known: Known) -> list[CommittedCheckpoint]:
        return superseded(
            self._saved,
            keep=self._keep,
            best=self._best,
            checked_step=self.checked_step,
            reported=self._reported,
            known=known,
        )

    def _drop_superseded(self) -> None:
        known = train.known()
        for old in self._superseded(known):
            if old.url in self._adopted and self._reported[old.url] > known.stored:
                continue  # the service may have only this report until a newer one is stored
            try:
                checkpoint_files.drop(old)
            except OSError as error:
                log(f"the checkpoint of step {old.step} could not be deleted: {error}")
            self._saved.remove(old)


def superseded(
    saved: Sequence[CommittedCheckpoint],
    *,
    keep: int,
    best: str | None,
    checked_step: int | None = None,
    reported: Mapping[str, float] | None = None,
    known: Known = EVERYTHING,
) -> list[CommittedCheckpoint]:
    """Return the checkpoints to delete: all except the best checkpoint and the checkpoints that
    `dray.train.checkpoints.staying` returns. A pure function.

    The best checkpoint has the lowest loss or error, or the highest value of any other metric; if
    several checkpoints have this value, the earliest of them is the best.
    """
    steps = {one.url: one.step for one in sorted(saved, key=lambda one: one.step)}
    kept = staying(
        steps, keep=keep, reported=reported or {}, known=known, checked_step=checked_step
    )
    if best is not None:
        sign = sign_of(best)
        measured = [
            (sign * one.metrics[best], one.step, one.url)
            for one in saved
            if not math.isnan(one.metrics.get(best, math.nan))
        ]
        if measured:
            kept.add(min(measured)[2])
    return [one for one in saved if one.url not in kept]


def _sweep(base_urls: Iterable[str]) -> None:
    for base_url in base_urls:
        try:
            checkpoint_files.drop_unfinished(base_url)
        except OSError as error:
            log(f"an unfinished checkpoint in {base_url} could not be deleted: {error}")


def _report_saved(saved: CommittedCheckpoint) -> float:
    """Report a checkpoint; return the position of the report in the spool."""
    report = CheckpointReport(
        step=saved.step,
        url=saved.url,
        size_bytes=saved.size_bytes,
        manifest_sha256=saved.manifest_sha256,
        metrics=saved.metrics,
    )
    return train.append(report.KIND, report.body())


def _log_failed(step: int, error: BaseException) -> None:
    reason = str(error) or type(error).__name__
    log(
        f"the checkpoint of step {step} could not be saved: {reason}. Training continues, and "
        "the next checkpoint will be saved when it is due"
    )


def _lower_priority() -> None:
    """Set a low priority for the calling thread only (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
