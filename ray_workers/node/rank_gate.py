"""Restricts a rank that starts on a node: which task the rank may run, and which data may leave the
node.

An ordinary rank receives and reports everything. A silo's data stays on its node (`silo_gate`).
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
    """The gate of a rank."""

    task: RankTask
    """The task, to the extent that the node's owner allows it."""
    passes_output: bool
    """Whether the rank's output is allowed to leave the node. Otherwise, the output is kept on the
    node."""
    passes_progress: bool
    """Whether the rank's step, loss and speed are allowed to leave the node through its actor."""


def admit(task: RankTask, environ: Mapping[str, str]) -> RankGate:
    """Return the gate of a rank that is about to start. If the rank belongs to a silo, record the
    silo for the node's agent. Raises RuntimeError if the node does not accept the rank."""
    if silo_gate.silo_of(task) is None:
        if silo_gate.has_source(environ):  # the scheduler does not assign such a rank to this node
            raise RuntimeError(silo_gate.FOR_SILOS_ALONE)
        return RankGate(task, passes_output=True, passes_progress=True)
    task = silo_gate.restricted(task, environ)
    silo_gate.note_silo(task)
    passes_output = Opening.LOGS in silo_gate.owner_opens(environ)
    return RankGate(task, passes_output, passes_progress=False)


@contextlib.contextmanager
def keeping_errors(task: RankTask) -> Iterator[None]:
    """Reraise errors that occur at the start of a rank. A silo's error is replaced by another
    error, and its message is kept on the node, since the message can contain information about the
    node."""
    try:
        yield
    except Exception as error:
        if silo_gate.silo_of(task) is None:
            raise
        silo_gate.keep(task, traceback.format_exc())
        kind = ForkFailed if isinstance(error, ForkFailed) else RuntimeError
        raise kind(
            "a silo could not be started; see the reason in the silo's folder on its node"
        ) from None
