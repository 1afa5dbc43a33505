"""The ranks that train together, as a prepared script sees them.

`Group` is the protocol that a session needs. `SoloGroup` is for `python train.py`, and
`TorchrunGroup` for a run under torchrun. Under dray, the workers provide a group that is formed
again after the loss of a rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dray.train.prepared.trained import Trained


class LoopPhase(Enum):
    """The part of a step that a prepared script is in."""

    DATA = "data"
    COMPUTE = "compute"
    """Forward and backward passes."""
    EXCHANGE = "exchange"
    OWN_CODE = "own code"
    """From the exchange to the next batch, such as the update, reports and evaluations."""
    SAVE = "save"
    FINISH = "finish"


class DividedCheckpoints(Protocol):
    """Checkpoints of a divided state, to which each rank writes its part. In a state, divided
    tensors are DTensors; all other values are the values of rank 0."""

    def load(self) -> Mapping[str, Any] | None:
        """Return the state of the newest checkpoint that all ranks found intact, or None. Tensors
        are whole, and are read when they are copied. A collective."""

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the state has a value that can't be saved. A collective."""

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Copy this rank's part of the state, and write the copy while training continues. Every
        rank must call this after the same step. Waits for the previous save."""

    @property
    def is_saving(self) -> bool:
        """Whether a save has begun and has not ended."""

    def wait(self) -> None:
        """Wait until no save is in progress."""


class Group(Protocol):
    """The ranks that currently train together."""

    @property
    def rank(self) -> int:
        """The rank of this process, once it has joined."""

    @property
    def world_size(self) -> int:
        """The number of ranks, once this process has joined."""

    @property
    def may_grow(self) -> bool:
        """Whether other ranks can join a group that has only one rank."""

    def join(self) -> None:
        """Form the group or, after `follow`, the next group."""

    def check(self, step: int, trained: Trained) -> None:
        """If another group must be formed, raise an error for which `may_follow` is true. After
        some steps, also compare the ranks' copies of `trained`, and raise an error if they differ.
        A collective, called between two batches. step: number of completed steps."""

    def may_follow(self, error: BaseException) -> bool:
        """Whether an error only means that the group is broken, in which case another group can be
        formed."""

    def follow(self, error: BaseException) -> None:
        """Leave the broken group and get a rank in the next group. Raises `error` if no group
        follows."""

    def state_lost(self) -> Exception:
        """Return the error to raise if no rank holds a state from which a new process can
        continue."""

    def copies_differ(self) -> Exception:
        """Return the error to raise if copies that should be equal differ between ranks."""

    def operating(self) -> AbstractContextManager[None]:
        """Return a context in which the session communicates with other ranks. Entering the context
        waits for the script's own operations on a GPU."""

    def wait_for_results(self) -> None:
        """Wait until the results of the operations in `operating` have arrived. If the operations
        were aborted, their results are undefined, and this method raises an error for which
        `may_follow` is true."""

    def hand_over(
        self, state: Callable[[], Mapping[str, Any]], source: int
    ) -> dict[str, Any] | None:
        """Send the state of the rank `source` to every other rank. Returns the state on the other
        ranks, and None on `source`. A collective."""

    def checkpoints(self, keep: int) -> DividedCheckpoints | None:
        """Return the checkpoints of a divided state, of which the `keep` newest are kept. None if
        rank 0 must save the whole state."""

    def read_divided(self, folder: Path) -> Mapping[str, Any]:
        """Return the state that the ranks of a group have written to a folder."""

    def enter(self, phase: LoopPhase, step: int) -> None:
        """Record that this rank has entered a phase of the step."""

    def began(self, step: int, *, is_verified: bool) -> None:
        """Record that the group continues after this step. If `is_verified` is False, the ranks
        still have to compare their copies of the state."""

    def verified(self) -> None:
        """Record that the ranks have compared their copies of the state, and that they are
        equal."""

    def committed(self, step: int) -> None:
        """Record that the optimizer has taken this step."""

    @property
    def is_asked_to_leave(self) -> bool:
        """Whether the job was asked to save a checkpoint and release its slots."""

    def leave(self) -> None:
        """End this process. Called after a checkpoint of the last step has been saved."""

    def finish(self, step: int, trained: Trained) -> None:
        """Wait until the scripts of all ranks have finished successfully, and compare the ranks'
        copies as in `check`. If the group breaks first, raises an error for which `may_follow` is
        true."""


class SoloGroup:
    """A group of one process, which has nothing to record or to wait for."""

    rank = 0
    world_size = 1
    may_grow = False
    is_asked_to_leave = False

    def join(self) -> None:
        pass

    def check(self, step: int, trained: Trained) -> None:
        pass

    def may_follow(self, error: BaseException) -> bool:
        return False

    def follow(self, error: BaseException) -> None:
        raise error

    def state_lost(self) -> Exception:
        return RuntimeError("no rank has the training state")

    def copies_differ(self) -> Exception:
        return RuntimeError("the ranks have different copies of the model")

    def operating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wait_for_results(self) -> None:
        pass

    def hand_over(
        self, state: Callable[[], Mapping[str, Any]], source: int
    ) -> dict[str, Any] | None:
        return None

    def checkpoints(self, keep: int) -> DividedCheckpoints | None:
        return None

    def read_divided(self, folder: Path) -> Mapping[str, Any]:
        raise ValueError(
            "the checkpoint contains a state that several ranks have written. Such a state can be "
            "read only in a job that uses the version of torch that dray supports"
        )

    def enter(self, phase: LoopPhase, step: int) -> None:
        pass

    def began(self, step: int, *, is_verified: bool) -> None:
        pass

    def verified(self) -> None:
        pass

    def committed(self, step: int) -> None:
        pass

    def leave(self) -> None:
        pass

    def finish(self, step: int, trained: Trained) -> None:
        pass


class TorchrunGroup(SoloGroup):
    """The processes started by torchrun, or by another launcher that sets torchrun's variables."""

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

    def finish(self, step: int, trained: Trained) -> None:
        dist.barrier()


def group_of_environment() -> Group:
    """Return torchrun's group if torchrun's variables are set, otherwise a group that consists only
    of this process."""
    return TorchrunGroup() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else SoloGroup()


def everyones(group: Group, mine: Sequence[int], device: torch.device) -> list[list[int]]:
    """Gather the numbers of all ranks, ordered by rank. A collective."""
    if group.world_size == 1:
        return [list(mine)]
    own = torch.tensor(mine, dtype=torch.int64, device=device)
    all_of_them = [torch.empty_like(own) for _ in range(group.world_size)]
    dist.all_gather(all_of_them, own)
    found = [[int(number) for number in one.tolist()] for one in all_of_them]
    group.wait_for_results()
    return found
