"""Named points of the training at which a test lets a rank fail, or looks at it.

`faultpoint` does nothing unless something is armed in this process, which only tests do: a rank of
theirs arms a point after it was forked. The idea and the name are those of libfiu and of Go's
failpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

Act = Callable[[], None]


class FaultPoint(StrEnum):
    PEERS_ARE_THERE = "peers_are_there"
    """All ranks of the group have come to the store, and none is connected to another."""
    BEFORE_MESH = "before_mesh"
    """Before the groups along the axes of a mesh are formed."""
    GROUP_JOINED = "group_joined"
    """The process group is formed; the rank may not have a state yet."""
    RESTORED = "restored"
    """The rank has the state that all ranks start from."""
    STEP_BEGINS = "step_begins"
    """Before a step's samples are loaded."""
    DATA_LOADED = "data_loaded"
    BEFORE_EXCHANGE = "before_exchange"
    """The last forward pass of the step is done, and its backward pass, in which the ranks exchange
    gradients, has not begun."""
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
    """Before the first file of a checkpoint is written."""
    BEFORE_MANIFEST = "before_manifest"
    """All files of a checkpoint are written but its manifest, without which there is none."""
    CHECKPOINT_COMMITTED = "checkpoint_committed"
    """The manifest is written, and nobody was told of the checkpoint."""
    BEFORE_RESULT = "before_result"
    """The last step is committed."""
    RESULT_WRITTEN = "result_written"
    """The result is stored, and the ranks have not met again."""


_armed: dict[FaultPoint, list[tuple[Act, int | None]]] = {}


def faultpoint(point: FaultPoint, step: int | None = None) -> None:
    """Let what is armed at `point` happen. `step` is the one that the rank is in, or the number of
    steps it has done."""
    if not _armed:
        return
    armed = _armed.pop(point, [])
    now = [act for act, at_step in armed if at_step in (None, step)]
    _armed[point] = [one for one in armed if one[1] != step or step is None]
    for act in now:
        act()


def arm(point: FaultPoint, act: Act, *, at_step: int | None = None) -> None:
    """Call `act` whenever this process comes by `point`, or once, in the step `at_step`."""
    _armed.setdefault(point, []).append((act, at_step))
