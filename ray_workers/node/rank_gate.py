"""The gate of a rank that starts on a node: the task that the node allows, and what may leave.

An ordinary rank gets and reports everything; a silo's data stay on their node (`silo_gate`).
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
    """The task, as the node's owner allows it."""
    passes_output: bool
    """Whether the rank's output may leave the node; otherwise the output is kept there."""
    passes_progress: bool
    """Whether the rank's actor may show its step, loss and speed elsewhere."""


def admit(task: RankTask, environ: Mapping[str, str]) -> RankGate:
    """Return the gate of a rank that is about to start, and note a silo for the node's agent.
    Raises RuntimeError if the node accepts no such rank."""
    if silo_gate.silo_of(task) is None:
        if silo_gate.has_source(environ):  # the scheduler assigns no such rank to this node
            raise RuntimeError(silo_gate.FOR_SILOS_ALONE)
        return RankGate(task, passes_output=True, passes_progress=True)
    task = silo_gate.at_home(task, environ)
    silo_gate.note_silo(task)
    passes_output = Opening.LOGS in silo_gate.owner_opens(environ)
    return RankGate(task, passes_output, passes_progress=False)


@contextlib.contextmanager
def keeping_errors(task: RankTask) -> Iterator[None]:
    """Raise errors of a start. The message of a silo's error is kept on the node, since it may
    describe the node."""
    try:
        yield
    except Exception as error:
        if silo_gate.silo_of(task) is None:
            raise
        silo_gate.keep(task, traceback.format_exc())
        kind = ForkFailed if isinstance(error, ForkFailed) else RuntimeError
        raise kind("a silo could not be started: the reason is in its folder on its node") from None
