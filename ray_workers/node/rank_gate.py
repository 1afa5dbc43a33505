"""The gate of a rank that starts on a node: its task as the node allows it, and what may leave.

An open rank gets and passes on everything; a silo's data stay on their node (`silo_gate`).
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ray_workers.node import silo_gate
from ray_workers.node.forkserver.client import ForkFailed
from ray_workers.node.silo_gate import Opening
from ray_workers.shared.contracts import RankTask


@dataclass(frozen=True)
class RankGate:
    """The gate of one rank."""

    task: RankTask
    """As the node's owner allows it."""
    passes_output: bool
    """Whether its output may leave the node; else it is kept there."""
    passes_progress: bool
    """Whether its step, loss and speed may be shown elsewhere by its actor."""


def admit(task: RankTask, environ: Mapping[str, str]) -> RankGate:
    """Make the gate of a rank that is about to start, and note a silo for the node's agent.
    RuntimeError on a node that takes no such rank."""
    if silo_gate.silo_of(task) is None:
        if silo_gate.has_source(environ):  # the scheduler places none here
            raise RuntimeError(silo_gate.FOR_SILOS_ALONE)
        return RankGate(task, passes_output=True, passes_progress=True)
    task = silo_gate.at_home(task, environ)
    silo_gate.note_silo(task)
    passes_output = Opening.LOGS in silo_gate.owner_opens(environ)
    return RankGate(task, passes_output, passes_progress=False)


@contextlib.contextmanager
def keeping_errors(task: RankTask) -> Iterator[None]:
    """Raise errors of a start. The error of a silo loses its message, which may describe the
    node."""
    try:
        yield
    except Exception as error:
        if silo_gate.silo_of(task) is None:
            raise
        silo_gate.keep(task, traceback.format_exc())
        kind = ForkFailed if isinstance(error, ForkFailed) else RuntimeError
        raise kind("a silo could not be started: the reason is in its folder on its node") from None
