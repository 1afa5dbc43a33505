"""Rank 0's checkpoints: saved beside the training, reported, and dropped when superseded."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from dray import train
from dray.train.checkpoints import CheckpointRef, await_known
from ray_workers.shared.frames import CheckpointReport
from ray_workers.shared.job_log import log
from ray_workers.training.checkpoint import checkpoint_files
from ray_workers.training.checkpoint.checkpoint_files import CheckpointMetadata, CommittedCheckpoint
from ray_workers.training.checkpoint.staging import StagedState, Stager, hold_for
from ray_workers.training.core.errors import BrokenCheckpointError

NICENESS = 19
"""Of the thread that hashes and writes: it takes what the ranks leave of the processors. While
the loop waits for it, at the end or before it leaves, the ranks leave it theirs."""


class CheckpointManager:
    """One save is in flight at most. It is copied while the next step goes on (`hold` is called
    before the state changes), then hashed, written and committed by a thread of its own, and
    told once it is committed. A save that fails is a line in the log, never the job's end."""

    def __init__(self, base_url: str, *, keep: int, best: str | None) -> None:
        self._base_url = base_url
        self._keep = keep
        self._best = best
        self._saved: list[CommittedCheckpoint] = []
        self._told: dict[str, float] = {}
        """Up to where on the spool the word of each lies, by its URL; of earlier attempts' the
        service knows."""
        self._adopted: set[str] = set()
        """A predecessor's of this attempt, of which nobody here can say which the service knows."""
        self._camera = Stager()
        self._writer = ThreadPoolExecutor(1, "dray-checkpoint", initializer=_stand_back)
        self._step = -1
        self._snapshot: StagedState | None = None
        self._writing: Future[float] | None = None

    @property
    def is_saving(self) -> bool:
        """A save was begun and is not committed yet, nor given up."""
        return self._writing is not None and not self._writing.done()

    @property
    def write_s(self) -> float:
        """How long the last save took from its begin to its end; 0 if there was none."""
        return self._writing.result() if self._writing is not None and not self.is_saving else 0.0

    def adopt(self, refs: Sequence[CheckpointRef]) -> None:
        """Count these checkpoints of earlier attempts in: they are dropped like our own. What
        those attempts were writing when they died is deleted."""
        self._writer.submit(_sweep, {ref.url.rpartition("/")[0] for ref in refs})
        for ref in refs:
            try:
                self._saved.append(checkpoint_files.read_manifest(ref)[0])
            except BrokenCheckpointError as error:
                log(f"a checkpoint is left out of the count of those kept: {error}")

    def adopt_own(self) -> None:
        """Count in what a predecessor of this process, which is dead, has committed in this
        attempt, and delete what it was writing. The newest is told again: it may have died
        between committing and telling."""
        self._writer.submit(_sweep, [self._base_url])
        known = {one.url for one in self._saved}
        found = checkpoint_files.committed(self._base_url)
        self._saved += [one for one in found if one.url not in known]
        self._adopted = {one.url for one in found}
        self._told.clear()  # it may have been another spool
        for newest in found[-1:]:
            self._told = dict.fromkeys(self._adopted, _tell_saved(newest))

    def save(
        self,
        about: CheckpointMetadata,
        state: Mapping[str, Any],
        *,
        volatile: Iterable[Tensor] = (),
    ) -> None:
        """Begin to save the state as it is now, unless that step is saved; waits for the save
        before, if that still runs.

        volatile: tensors of the state that change before `hold` is called.
        """
        if self.has(about.step):
            return
        self.wait_for(about.step)
        began = time.perf_counter()
        try:
            snapshot = self._camera.take(state, volatile)
        except (OSError, MemoryError, RuntimeError, ValueError) as error:
            _tell_failed(about.step, error)
            return
        self._step, self._snapshot = about.step, snapshot
        self._writing = self._writer.submit(self._write, about, snapshot, began)

    def has(self, step: int) -> bool:
        """Whether the step is saved in this attempt, or being saved."""
        if self.is_saving and self._step == step:
            return True
        url = checkpoint_files.url_of(self._base_url, step)
        return any(one.url == url for one in self._saved)

    def hold(self) -> None:
        """Call it before the state that was given to `save` changes: it waits for the copy."""
        if self._snapshot is not None:
            hold_for(self._snapshot)
            self._snapshot = None

    def wait_for(self, step: int) -> None:
        """Make way for a save of this step: it waits for the one before, and says so."""
        if self.is_saving:
            log(
                f"the checkpoint of step {step} is due, and waits until that of step "
                f"{self._step} is written"
            )
        self.wait()

    def wait(self) -> None:
        """Return once no save is in flight."""
        self.hold()
        if self._writing is not None:
            self._writing.result()

    def _write(self, about: CheckpointMetadata, snapshot: StagedState, began: float) -> float:
        """Runs beside the training; seconds from `began` to the end."""
        try:
            if not snapshot.is_finite():
                log(
                    f"the checkpoint of step {about.step} is not saved: its state is not finite, "
                    "so nothing could go on from it"
                )
                return time.perf_counter() - began
            saved = checkpoint_files.commit(self._base_url, about, snapshot)
            self._told[saved.url] = _tell_saved(saved)
            self._saved.append(saved)
        except Exception as error:  # whatever a storage may raise: the job goes on
            _tell_failed(about.step, error)
        else:
            self._drop_superseded()
        return time.perf_counter() - began

    def tidy(self) -> None:
        """Drop what is superseded, at the end, when no save is in flight: once the service knows of
        the newest, if that does not take long."""
        await_known(self._told.values(), train.known)
        self._drop_superseded()

    def _drop_superseded(self) -> None:
        known = train.known()
        for old in checkpoint_files.superseded(
            self._saved, keep=self._keep, best=self._best, told=self._told, known=known
        ):
            if old.url in self._adopted and self._told[old.url] > known.stored:
                continue  # until what was told anew of them is stored, any may be the one it knows
            try:
                checkpoint_files.drop(old)
            except OSError as error:
                log(f"the checkpoint of step {old.step} could not be deleted: {error}")
            self._saved.remove(old)


def _sweep(base_urls: Iterable[str]) -> None:
    for base_url in base_urls:
        try:
            checkpoint_files.drop_unfinished(base_url)
        except OSError as error:
            log(f"an unfinished checkpoint below {base_url} could not be deleted: {error}")


def _tell_saved(saved: CommittedCheckpoint) -> float:
    """As `train.tell`."""
    report = CheckpointReport(
        step=saved.step,
        url=saved.url,
        size_bytes=saved.size_bytes,
        manifest_sha256=saved.manifest_sha256,
        metrics=saved.metrics,
    )
    return train.tell(report.KIND, report.body())


def _tell_failed(step: int, error: BaseException) -> None:
    reason = str(error) or type(error).__name__
    log(
        f"the checkpoint of step {step} could not be saved: {reason}. Training goes on; the next "
        "one is tried when it is due"
    )


def _stand_back() -> None:
    """Give the calling thread, and it alone, the least claim on the processors (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
