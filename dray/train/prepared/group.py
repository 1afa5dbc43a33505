"""The ranks that train together, as a prepared script sees them.

`Group` is the protocol that a session needs. `SoloGroup` is for `python train.py`, `TorchrunGroup`
for a run under torchrun; under dray the workers pass a group that forms again after a loss.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

import torch
import torch.distributed as dist


class LoopPhase(Enum):
    """The part of a step that a prepared script is in."""

    DATA = "data"
    COMPUTE = "compute"
    """Forward and backward passes."""
    EXCHANGE = "exchange"
    OWN_CODE = "own code"
    """The time from the exchange to the next batch: the update, a report, an evaluation."""
    SAVE = "save"
    FINISH = "finish"


class Group(Protocol):
    """The ranks that train together now."""

    @property
    def rank(self) -> int:
        """The rank of this process, once it has joined."""

    @property
    def world_size(self) -> int:
        """The number of ranks, once this process has joined."""

    @property
    def may_grow(self) -> bool:
        """Whether ranks may join a group of one."""

    def join(self) -> None:
        """Form the group, or the next one after `follow`."""

    def check(self) -> None:
        """Raises an error that may be followed if another group is wanted."""

    def may_follow(self, error: BaseException) -> bool:
        """Whether an error only means that the group is broken, and another group may follow."""

    def follow(self, error: BaseException) -> None:
        """Leave the broken group and get a rank in the next; raises `error` if there is none."""

    def state_lost(self) -> Exception:
        """The error to raise where no rank holds a state from which a newcomer could go on."""

    def copies_differ(self) -> Exception:
        """The error to raise where ranks that should have equal copies have different ones."""

    def hand_over(
        self, state: Callable[[], Mapping[str, Any]], source: int
    ) -> dict[str, Any] | None:
        """The state of the rank `source` on every other rank; None on `source`. A collective."""

    def enter(self, phase: LoopPhase, step: int) -> None:
        """Note that this rank is in a phase of the step."""

    def began(self, step: int) -> None:
        """Note that the group goes on after this step."""

    def committed(self, step: int) -> None:
        """Note that the optimizer has taken this step."""

    @property
    def is_asked_to_leave(self) -> bool:
        """Whether the job is to save and leave."""

    def leave(self) -> None:
        """End this process: a checkpoint of its last step is saved."""

    def finish(self) -> None:
        """Return once every rank's script has ended well; raises an error that may be followed if
        the group breaks first."""


class SoloGroup:
    """A group of one process, in which nothing has to be noted or awaited."""

    rank = 0
    world_size = 1
    may_grow = False
    is_asked_to_leave = False

    def join(self) -> None:
        pass

    def check(self) -> None:
        pass

    def may_follow(self, error: BaseException) -> bool:
        return False

    def follow(self, error: BaseException) -> None:
        raise error

    def state_lost(self) -> Exception:
        return RuntimeError("no rank holds the state of the training")

    def copies_differ(self) -> Exception:
        return RuntimeError("the ranks have different copies of the model")

    def hand_over(
        self, state: Callable[[], Mapping[str, Any]], source: int
    ) -> dict[str, Any] | None:
        return None

    def enter(self, phase: LoopPhase, step: int) -> None:
        pass

    def began(self, step: int) -> None:
        pass

    def committed(self, step: int) -> None:
        pass

    def leave(self) -> None:
        pass

    def finish(self) -> None:
        pass


class TorchrunGroup(SoloGroup):
    """The processes that torchrun, or another launcher that sets its variables, has started."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])

    def join(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")

    def hand_over(
        self, state: Callable[[], Mapping[str, Any]], source: int
    ) -> dict[str, Any] | None:
        carried: list[Any] = [dict(state()) if self.rank == source else None]
        dist.broadcast_object_list(carried, src=source)
        return None if self.rank == source else carried[0]

    def finish(self) -> None:
        dist.barrier()


def group_of_environment() -> Group:
    """Torchrun's group if its variables are set, else this process alone."""
    return TorchrunGroup() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else SoloGroup()


def everyones(group: Group, mine: Sequence[int], device: torch.device) -> list[list[int]]:
    """The numbers of each rank, in the ranks' order. A collective."""
    if group.world_size == 1:
        return [list(mine)]
    own = torch.tensor(mine, dtype=torch.int64, device=device)
    all_of_them = [torch.empty_like(own) for _ in range(group.world_size)]
    dist.all_gather(all_of_them, own)
    return [[int(number) for number in one.tolist()] for one in all_of_them]
