"""Checkpoints of a prepared script. The state is copied between two batches, and written while
training continues. Rank 0 writes the state, except that each rank writes its part of a divided
state (`DividedCheckpoints`).

Once a state has been handed over to a new process, each exchange verifies that the ranks' weights
are equal, and a copy is written only after an exchange has verified this. Therefore no checkpoint
contains a state that differs between ranks.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dray.train import reporting
from dray.train.prepared.copies import changed
from dray.train.prepared.group import Group, LoopPhase
from dray.train.prepared.session import TrainingSession
from dray.train.storage_faults import log

FILE = "prepared.pt"
DIVIDED_FILE = "state.json"
"""A file that only the checkpoints of divided states have."""


@dataclass(frozen=True)
class _Copy:
    state: dict[str, Any]
    step: int
    num_ops: int
    """Number of operations completed before the copy."""


class Saver:
    """Saves the state of a session, one save at a time."""

    def __init__(
        self, session: TrainingSession, *, every_steps: int | None, every_s: float | None, keep: int
    ) -> None:
        """every_steps, every_s: number of steps or seconds after which a save is due; None for no
        limit."""
        self._session = session
        self._every_steps = every_steps
        self._every_s = every_s
        self._keep = keep
        self._is_asked = False
        self._is_leaving = False
        self._writer = ThreadPoolExecutor(1, "dray-checkpoint")
        self._writing: Future[None] | None = None
        self._held: _Copy | None = None
        """A copy that no exchange has verified yet."""
        self._saved_step = session.steps
        self._saved_at = time.monotonic()

    def ask(self) -> None:
        """Make the next call of `at_batch` save the state."""
        self._is_asked = True

    def at_batch(self) -> None:
        """Save the state of the next batch if a save is due."""
        session = self._session
        self._write_if(session.num_ops)
        is_due, self._is_asked = self._is_asked or self._is_due(), False
        is_due, is_leaving = session.agreed(is_due, session.group.is_asked_to_leave)
        if not session.takes_part_in_saves:
            return
        if is_leaving:
            if not self._is_leaving:
                self._is_leaving = True
                self.save()
            if self._held is None:  # otherwise leave after the exchange that verifies it
                self.wait()
                session.agreed(False, True)  # the other ranks leave once rank 0 has saved
                session.group.leave()
        elif is_due:
            self.save()

    def _is_due(self) -> bool:
        steps = self._session.steps - self._saved_step
        if not steps:
            return False
        if self._saved_step == self._session.incomplete_step:
            return True
        if self._every_steps is not None and steps >= self._every_steps:
            return True
        waited_s = time.monotonic() - self._saved_at
        return self._every_s is not None and waited_s >= self._every_s and not self._is_writing

    @property
    def _is_writing(self) -> bool:
        if (checkpoints := self._session.checkpoints) is not None:
            return checkpoints.is_saving
        return self._writing is not None and not self._writing.done()

    def save(self) -> None:
        """Copy the state and start writing it. Waits for the previous save if it is still
        running."""
        session = self._session
        if session.steps == self._saved_step:
            return
        self.wait()
        session.group.enter(LoopPhase.SAVE, session.steps)
        self._saved_step, self._saved_at = session.steps, time.monotonic()
        if session.checkpoints is not None:
            session.checkpoints.save(session.steps, session.own_state())
            return
        copy = _Copy(on_host(session.state()), session.steps, session.num_ops)
        if session.group.rank == 0:
            self._held = copy
            if not session.verifies:
                self._write_if(session.num_ops + 1)

    def _write_if(self, num_ops: int) -> None:
        """Start writing the held copy if it was made before operation `num_ops`."""
        held = self._held
        if held is not None and held.num_ops < num_ops:
            self._held = None
            self._writing = self._writer.submit(self._write, held.state, held.step)

    def _write(self, state: dict[str, Any], step: int) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="dray-prepared-") as folder:
                torch.save(state, Path(folder, FILE))
                reporting.save_checkpoint(folder, step, keep=self._keep)
        except Exception as error:  # storage can raise anything, and the job continues
            log(f"the checkpoint of step {step} could not be saved: {error}. Training continues")

    def end(self) -> None:
        """Wait until the last copy is written. Call this after the ranks have compared their
        weights."""
        self._write_if(self._session.num_ops + 1)
        self.wait()

    def wait(self) -> None:
        """Wait until no save is in progress."""
        if self._session.checkpoints is not None:
            self._session.checkpoints.wait()
        if self._writing is not None:
            self._writing.result()


def load(group: Group) -> Mapping[str, Any] | None:
    """Return the state of the newest intact checkpoint of an earlier attempt, or None.

    Raises ValueError for a checkpoint that the script has saved with `save_checkpoint`.
    """
    found = reporting.load_checkpoint()
    if found is None:
        return None
    if (found.path / DIVIDED_FILE).is_file():
        return group.read_divided(found.path)
    return read_whole(found.path, found.step)


def read_whole(folder: Path, step: int) -> dict[str, Any]:
    """Return the state that rank 0 has saved to a folder, mapped from its file. Raises ValueError
    if a script has saved the files with `save_checkpoint`."""
    path = folder / FILE
    if not path.is_file():
        raise ValueError(
            f"the checkpoint of step {step} was saved by save_checkpoint(), and prepare() "
            "can't read it: in a prepared script, use train.checkpoint() instead"
        )
    state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    return state


def on_host(value: Any) -> Any:
    """Copy a state to the host's memory."""

    def copy_of(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        copied = one.detach().to("cpu")
        return copied.clone() if copied.data_ptr() == one.data_ptr() else copied

    return changed(value, copy_of)
