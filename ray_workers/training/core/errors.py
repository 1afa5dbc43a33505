"""The errors of training, and the cause to which each is attributed."""

from __future__ import annotations

import re

import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException

from dray.train.storage_faults import StorageError, is_storage_fault
from ray_workers.shared.contracts import Cause
from ray_workers.training.core.device_faults import DeviceLostError
from ray_workers.training.core.divergence import DivergedError
from ray_workers.training.core.error_chain import (
    NO_SUCH_NAME,
    PEER_IS_GONE,
    chain_of,
    is_deterministic,
)


class DataError(Exception):
    """The data set is missing or invalid, so another attempt would fail in the same way."""


class DifferentDataError(DataError):
    """Processes of the same job, possibly on different nodes, have read different data."""

    def __init__(self, who: str, fingerprint: str) -> None:
        super().__init__(
            f"the {who} have read different data from the same source; this process has read "
            f"content with the hash {fingerprint}. Don't change a source while a job is starting"
        )


class ModelError(Exception):
    """The model given by `model.import` can't be created, or does not fit the data."""


class RoundsError(Exception):
    """This rank can't run the rounds of a federated job, regardless of its data."""


class LeaveRequested(Exception):
    """The rank was asked to leave while it was waiting in the middle of a step; the step is
    lost."""


class Preempted(Exception):
    """The rank was asked to leave, and saved a checkpoint of its last step before leaving."""


class SourceUnavailableError(Exception):
    """A source repeatedly did not respond or closed the connection, but might respond later."""


class BrokenCheckpointError(Exception):
    """A checkpoint is missing or unfinished, or does not match its manifest."""


class UnreachableCheckpointError(BrokenCheckpointError, StorageError):
    """The storage could not return a checkpoint, which may be intact."""


RESUMES = "the job resumes from its latest checkpoint, or starts over if it has none"


class PartsLostError(Exception):
    """Part of the model's state after the last step is not on any remaining rank."""

    def __init__(self) -> None:
        super().__init__(
            f"the lost ranks held the only copy of part of the model's latest state; {RESUMES}"
        )


class UnendingOperationError(Exception):
    """Gloo does not end an operation of a broken group (see `elastic.waiting_thread`)."""

    def __init__(self) -> None:
        super().__init__("gloo did not end the operation in which the rank waited for a lost rank")


class KeeperLostError(PartsLostError):
    """A rank's share of the state is lost, because no remaining rank has it in memory."""

    def __init__(self) -> None:
        Exception.__init__(
            self,
            "a rank was lost together with the ranks that kept copies of its share of the state, "
            f"or before its first copy was complete; {RESUMES}",
        )


class HostMemoryError(ModelError):
    """The copies of the state that the document asks for do not fit into host memory."""


class CopiesDifferError(PartsLostError):
    """Ranks that should have equal copies of the model have different copies."""

    def __init__(self) -> None:
        Exception.__init__(
            self,
            "after the group was re-formed, the ranks had different copies of the weights or of "
            f"the optimizer state; {RESUMES}",
        )


class ReplicasDifferError(PartsLostError):
    """A comparison has shown that replicas of the model differ, although no rank reported an
    error."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)


class CorruptedReplicaError(ReplicasDifferError):
    """Like `ReplicasDifferError`, but raised on a rank whose replica differs from a majority."""


_LOSSES = (
    *(dist.DistNetworkError, dist.DistStoreError),
    *(PartsLostError, UnendingOperationError, DeviceLostError),
)


def cause_of(error: BaseException) -> Cause:
    """Return the failure cause of an attempt that ended with this error: INFRASTRUCTURE if a disk
    or a store failed, WORKER_LOST if the error is only a consequence of a peer's death.

    The cause also depends on the error from which the given error was raised and, for an exception
    group, on the group's first exception."""
    if is_storage_fault(error):
        return Cause.INFRASTRUCTURE
    for seen in chain_of(error, has_context=False):
        if isinstance(seen, DataError):
            return Cause.BAD_DATA
        if isinstance(seen, ReplicasDifferError):
            return Cause.CORRUPTED
        if isinstance(seen, DivergedError):
            return Cause.DIVERGED
        if isinstance(seen, SourceUnavailableError):
            return Cause.DATA_UNREACHABLE
        if isinstance(seen, _LOSSES):
            return Cause.WORKER_LOST
        # Compare the exact types, because other errors, such as ConnectionResetError, come from the
        # script itself.
        if type(seen) in (RuntimeError, dist.DistError, dist.DistBackendError) and (
            PEER_IS_GONE.search(str(seen))
        ):
            return Cause.WORKER_LOST
    for seen in chain_of(error):
        if _is_deterministic(seen):
            return Cause.CANNOT_RUN
        if isinstance(seen, OSError) and seen.__cause__ is None:
            break  # might not occur again; the error that was being handled did not end the run
    return Cause.USER_ERROR


_IN_A_CHILD = re.compile(
    rf"^(ModuleNotFoundError|SyntaxError|IndentationError|TabError|ImportError: {NO_SUCH_NAME})\b",
    re.MULTILINE,
)


def _is_deterministic(error: BaseException) -> bool:
    """Whether the same code fails with this error in every run. A shared library that can't be
    loaded may be missing only on one node."""
    if isinstance(error, ProcessRaisedException):  # contains a child's traceback as text
        return _IN_A_CHILD.search(str(error)) is not None
    return isinstance(error, ModelError | RoundsError) or is_deterministic(error)
