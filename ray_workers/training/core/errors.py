"""The errors of a training, and the cause that each is attributed to."""

from __future__ import annotations

import re

import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException

from dray.train.storage_room import StorageError, is_storage_fault
from ray_workers.shared.contracts import Cause
from ray_workers.training.core.divergence import DivergedError
from ray_workers.training.core.error_chain import (
    NO_SUCH_NAME,
    PEER_IS_GONE,
    chain_of,
    is_deterministic,
)


class DataError(Exception):
    """The data set is missing or broken: another attempt would fail in the same way."""


class DifferentDataError(DataError):
    """Processes of one job, possibly on several nodes, have read different data."""

    def __init__(self, who: str, fingerprint: str) -> None:
        super().__init__(
            f"the {who} have read different data from the same source; its content here hashes to "
            f"{fingerprint}. Don't change a source while a job starts"
        )


class ModelError(Exception):
    """The model that `model.import` names can't be made, or does not fit the data."""


class RoundsError(Exception):
    """This rank can't play the rounds of a federated job, whatever its data."""


class LeaveRequested(Exception):
    """The rank was asked to leave while it waited in the middle of a step; the step is lost."""


class Preempted(Exception):
    """The rank was asked to leave, and left with a checkpoint of its last step."""


class SourceUnavailableError(Exception):
    """A source did not answer, or broke off, in every try; it may answer later."""


class BrokenCheckpointError(Exception):
    """A checkpoint is missing, unfinished, or does not match its manifest."""


class UnreachableCheckpointError(BrokenCheckpointError, StorageError):
    """The storage failed to return a checkpoint, which may be intact."""


class PartsLostError(Exception):
    """No remaining rank has some part of the model as it was after the last step."""

    def __init__(self) -> None:
        super().__init__(
            "no rank is left that holds some part of the model as it is after the last step; the "
            "newest checkpoint has it"
        )


class CopiesDifferError(PartsLostError):
    """Ranks that should have equal copies of the model have different copies."""

    def __init__(self) -> None:
        Exception.__init__(
            self,
            "after the group of ranks was formed again, the ranks had different copies of the "
            "weights or of the optimizer's state; the job goes back to its newest checkpoint",
        )


def cause_of(error: BaseException) -> Cause:
    """The cause of an attempt's end with this error: INFRASTRUCTURE if a disk or a store failed,
    WORKER_LOST if the error only follows from a peer's death.

    The cause depends also on the error that this one was raised from, and for a group of errors on
    the first of them.
    """
    if is_storage_fault(error):
        return Cause.INFRASTRUCTURE
    for seen in chain_of(error, has_context=False):
        if isinstance(seen, DataError):
            return Cause.BAD_DATA
        if isinstance(seen, DivergedError):
            return Cause.DIVERGED
        if isinstance(seen, SourceUnavailableError):
            return Cause.DATA_UNREACHABLE
        if isinstance(seen, dist.DistNetworkError | dist.DistStoreError | PartsLostError):
            return Cause.WORKER_LOST
        # Exactly RuntimeError: a ConnectionResetError is the script's own.
        if type(seen) in (RuntimeError, dist.DistError, dist.DistBackendError) and (
            PEER_IS_GONE.search(str(seen))
        ):
            return Cause.WORKER_LOST
    for seen in chain_of(error):
        if _is_deterministic(seen):
            return Cause.CANNOT_RUN
        if isinstance(seen, OSError) and seen.__cause__ is None:
            break  # may not occur again; the error that was being handled did not end the run
    return Cause.USER_ERROR


_IN_A_CHILD = re.compile(
    rf"^(ModuleNotFoundError|SyntaxError|IndentationError|TabError|ImportError: {NO_SUCH_NAME})\b",
    re.MULTILINE,
)


def _is_deterministic(error: BaseException) -> bool:
    """Whether the same code ends with this error in every run. A shared object that can't be loaded
    may be missing on one node only."""
    if isinstance(error, ProcessRaisedException):  # has the traceback of a child as text
        return _IN_A_CHILD.search(str(error)) is not None
    return isinstance(error, ModelError | RoundsError) or is_deterministic(error)
