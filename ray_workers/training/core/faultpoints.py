"""Named points of the training at which a test lets a rank fail, or inspects it.

`faultpoint` does nothing unless something is armed in this process, and only tests arm points: a
rank of theirs does so after it was forked. The idea and the name are those of libfiu and of Go's
failpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

Act = Callable[[], None]
ActWith = Callable[[Any], None]
"""Takes the object that the point gives."""


class FaultPoint(StrEnum):
    """The points; each gives the `Trainer` unless its line says otherwise."""

    PEERS_ARE_THERE = "peers_are_there"
    """All ranks of the group have come to the store, and none is connected to another. Gives the
    `RendezvousHandler`."""
    BEFORE_MESH = "before_mesh"
    """Before the groups along the axes of a mesh are formed. Gives nothing."""
    GROUP_JOINED = "group_joined"
    """The process group is formed; the rank may not have a state yet."""
    RESTORED = "restored"
    """The rank has the state that all ranks start from."""
    STEP_BEGINS = "step_begins"
    """Before a step's samples are loaded."""
    DATA_LOADED = "data_loaded"
    """Gives the step's `Batch`."""
    SHARE_BEGINS = "share_begins"
    """Before the first forward pass of a share. Gives the step's `Batch`."""
    BEFORE_EXCHANGE = "before_exchange"
    """The last forward pass of the step is done, and its backward pass, in which the ranks exchange
    gradients, has not begun."""
    BACKWARD_DONE = "backward_done"
    """The gradients are computed, and the step's loss and their norm are not taken yet."""
    BEFORE_OPTIMIZER = "before_optimizer"
    """The gradients are those of the global batch."""
    AFTER_OPTIMIZER = "after_optimizer"
    """The weights are those after the step, and the step is not committed."""
    STEP_ENDS = "step_ends"
    """The step's figures are taken, and the step is not committed."""
    BEFORE_EVALUATION = "before_evaluation"
    AFTER_EVALUATION = "after_evaluation"
    SAVE_BEGUN = "save_begun"
    """The state is copied, and another thread writes it."""
    BEFORE_WRITE = "before_write"
    """Before the first file of a checkpoint is written. Gives nothing."""
    BEFORE_MANIFEST = "before_manifest"
    """All files of a checkpoint are written but its manifest, without which there is none. Gives
    nothing."""
    CHECKPOINT_COMMITTED = "checkpoint_committed"
    """The manifest is written, and the checkpoint is not reported. Gives nothing."""
    BEFORE_RESULT = "before_result"
    """The last step is committed."""
    RESULT_WRITTEN = "result_written"
    """The result is stored, and the ranks have not met again."""


_armed: dict[FaultPoint, list[tuple[ActWith, int | None]]] = {}


def faultpoint(point: FaultPoint, step: int | None = None, given: Any = None) -> None:
    """Call what is armed at `point`.

    step: the step that the rank is in, or the number of steps it has done.
    """
    if not _armed:
        return
    armed = _armed.pop(point, [])
    now = [act for act, at_step in armed if at_step in (None, step)]
    _armed[point] = [one for one in armed if one[1] != step or step is None]
    for act in now:
        act(given)


def arm(point: FaultPoint, act: Act, *, at_step: int | None = None) -> None:
    """Call `act` whenever this process comes by `point`, or once, in the step `at_step`."""
    arm_with(point, lambda _: act(), at_step=at_step)


def arm_with(point: FaultPoint, act: ActWith, *, at_step: int | None = None) -> None:
    """As `arm`, for an act that takes the object that the point gives."""
    _armed.setdefault(point, []).append((act, at_step))


def disarm() -> None:
    """Forget everything that is armed in this process."""
    _armed.clear()
