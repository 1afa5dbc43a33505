"""Named points in training at which a test can make a rank fail, or inspect the rank.

`faultpoint` does nothing unless a point is armed in this process. Only tests arm points, and
only in ranks that are already forked. The idea and the name come from libfiu and Go's failpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

Act = Callable[[], None]
ActWith = Callable[[Any], None]
"""An action that receives the object passed by the fault point."""


class FaultPoint(StrEnum):
    """The points. Each point passes the `Trainer` to its action unless documented otherwise."""

    PEERS_ARE_THERE = "peers_are_there"
    """All ranks of the group have registered in the store, but none are connected to each other.
    Passes the `RendezvousHandler`."""
    BEFORE_MESH = "before_mesh"
    """Before the groups along the axes of a mesh are formed. Passes nothing."""
    GROUP_JOINED = "group_joined"
    """The process group has been formed; the rank might not have a state yet."""
    RESTORED = "restored"
    """The rank has the state from which all ranks start."""
    STEP_BEGINS = "step_begins"
    """Before a step's samples are loaded."""
    DATA_LOADED = "data_loaded"
    """Passes the step's `Batch`."""
    SHARE_BEGINS = "share_begins"
    """Before the first forward pass of a share. Passes the step's `Batch`."""
    BEFORE_EXCHANGE = "before_exchange"
    """The last forward pass of the step is done, but its backward pass, in which the ranks exchange
    gradients, has not begun."""
    BACKWARD_DONE = "backward_done"
    """The gradients have been computed, but the step's loss and the gradient norm have not been
    read."""
    BEFORE_OPTIMIZER = "before_optimizer"
    """The gradients have been averaged over the global batch."""
    AFTER_OPTIMIZER = "after_optimizer"
    """The weights have been updated, but the step is not committed."""
    STEP_ENDS = "step_ends"
    """The step's metrics have been read, but the step is not committed."""
    BEFORE_EVALUATION = "before_evaluation"
    AFTER_EVALUATION = "after_evaluation"
    SAVE_BEGUN = "save_begun"
    """The state has been copied, and another thread is writing it."""
    BEFORE_WRITE = "before_write"
    """Before the first file of a checkpoint is written. Passes nothing."""
    SHARE_WRITTEN = "share_written"
    """The rank has written its part of a checkpoint, but has not reported it to rank 0. Passes
    nothing."""
    BEFORE_MANIFEST = "before_manifest"
    """All files of a checkpoint except its manifest have been written; without a manifest, the
    checkpoint is invalid. Passes nothing."""
    CHECKPOINT_COMMITTED = "checkpoint_committed"
    """The manifest has been written, but the checkpoint has not been reported. Passes nothing."""
    BEFORE_PEER_COPY = "before_peer_copy"
    """The rank's share of the state has been copied in its own memory, but is not sent to another
    rank. Passes nothing. Reached in the thread that sends it."""
    PEER_COPY_SENT = "peer_copy_sent"
    """The rank has sent its share and received the shares that it keeps. Passes nothing."""
    BEFORE_RESULT = "before_result"
    """The last step has been committed."""
    WEIGHTS_STORED = "weights_stored"
    """The rank has stored its file with weights of a divided model, if it has one, but the result
    is not complete. Passes nothing."""
    RESULT_WRITTEN = "result_written"
    """The result has been stored, but the ranks have not synchronised again."""


_armed: dict[FaultPoint, list[tuple[ActWith, int | None]]] = {}


def faultpoint(point: FaultPoint, step: int | None = None, given: Any = None) -> None:
    """Call the actions that are armed at `point`.

    step: the rank's current step, or the number of completed steps.
    """
    if not _armed:
        return
    armed = _armed.pop(point, [])
    now = [act for act, at_step in armed if at_step in (None, step)]
    _armed[point] = [one for one in armed if one[1] != step or step is None]
    for act in now:
        act(given)


def arm(point: FaultPoint, act: Act, *, at_step: int | None = None) -> None:
    """Call `act` whenever this process reaches `point`, or only once, in step `at_step`."""
    arm_with(point, lambda _: act(), at_step=at_step)


def arm_with(point: FaultPoint, act: ActWith, *, at_step: int | None = None) -> None:
    """Like `arm`, but for an action that receives the object passed by the fault point."""
    _armed.setdefault(point, []).append((act, at_step))


def disarm() -> None:
    """Disarm all points in this process."""
    _armed.clear()
