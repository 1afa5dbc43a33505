"""Named points of the training at which a test makes a rank fail, or inspects it.

`faultpoint` does nothing unless a point is armed in this process, and only tests arm points: a rank
of a test does so after it was forked. The idea and the name are from libfiu and Go's failpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

Act = Callable[[], None]
ActWith = Callable[[Any], None]
"""An act that receives the object that the point passes."""


class FaultPoint(StrEnum):
    """The points. Each passes the `Trainer` to its act unless its comment names something else."""

    PEERS_ARE_THERE = "peers_are_there"
    """All ranks of the group have come to the store, and none is connected to another. Passes the
    `RendezvousHandler`."""
    BEFORE_MESH = "before_mesh"
    """Before the groups along the axes of a mesh are formed. Passes nothing."""
    GROUP_JOINED = "group_joined"
    """The process group is formed; the rank may not have a state yet."""
    RESTORED = "restored"
    """The rank has the state that all ranks start from."""
    STEP_BEGINS = "step_begins"
    """Before a step's samples are loaded."""
    DATA_LOADED = "data_loaded"
    """Passes the step's `Batch`."""
    SHARE_BEGINS = "share_begins"
    """Before the first forward pass of a share. Passes the step's `Batch`."""
    BEFORE_EXCHANGE = "before_exchange"
    """The last forward pass of the step is done, and its backward pass, in which the ranks exchange
    gradients, has not begun."""
    BACKWARD_DONE = "backward_done"
    """The gradients are computed; the step's loss and the gradient norm are not read yet."""
    BEFORE_OPTIMIZER = "before_optimizer"
    """The gradients are averaged over the global batch."""
    AFTER_OPTIMIZER = "after_optimizer"
    """The weights are those after the step, and the step is not committed."""
    STEP_ENDS = "step_ends"
    """The step's figures are read, and the step is not committed."""
    BEFORE_EVALUATION = "before_evaluation"
    AFTER_EVALUATION = "after_evaluation"
    SAVE_BEGUN = "save_begun"
    """The state is copied, and another thread writes it."""
    BEFORE_WRITE = "before_write"
    """Before the first file of a checkpoint is written. Passes nothing."""
    BEFORE_MANIFEST = "before_manifest"
    """All files of a checkpoint but its manifest are written; without a manifest there is no
    checkpoint. Passes nothing."""
    CHECKPOINT_COMMITTED = "checkpoint_committed"
    """The manifest is written, and the checkpoint is not reported. Passes nothing."""
    BEFORE_RESULT = "before_result"
    """The last step is committed."""
    RESULT_WRITTEN = "result_written"
    """The result is stored, and the ranks have not met again."""


_armed: dict[FaultPoint, list[tuple[ActWith, int | None]]] = {}


def faultpoint(point: FaultPoint, step: int | None = None, given: Any = None) -> None:
    """Call the acts that are armed at `point`.

    step: the step that the rank is in, or the number of steps that are done.
    """
    if not _armed:
        return
    armed = _armed.pop(point, [])
    now = [act for act, at_step in armed if at_step in (None, step)]
    _armed[point] = [one for one in armed if one[1] != step or step is None]
    for act in now:
        act(given)


def arm(point: FaultPoint, act: Act, *, at_step: int | None = None) -> None:
    """Call `act` whenever this process reaches `point`, or once, in the step `at_step`."""
    arm_with(point, lambda _: act(), at_step=at_step)


def arm_with(point: FaultPoint, act: ActWith, *, at_step: int | None = None) -> None:
    """Do the same as `arm`, for an act that receives the object that the point passes."""
    _armed.setdefault(point, []).append((act, at_step))


def disarm() -> None:
    """Forget everything that is armed in this process."""
    _armed.clear()
