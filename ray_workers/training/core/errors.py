"""Telling whose fault it was when training raised."""

from __future__ import annotations

import re

import torch.distributed as dist

from dray.train.storage_room import StorageError, is_storage_fault
from ray_workers.shared.contracts import Cause
from ray_workers.training.core.divergence import DivergedError


class DataError(Exception):
    """The data set is missing or broken: another attempt would end the same way."""


class EntrypointError(Exception):
    """The script is not where `script.entrypoint` says."""


class SourceUnavailableError(Exception):
    """A source did not answer, or broke off, however often it was asked; later it may."""


class BrokenCheckpointError(Exception):
    """A checkpoint is absent, unfinished or not what its manifest says."""


class UnreachableCheckpointError(BrokenCheckpointError, StorageError):
    """The storage did not give a checkpoint, which may be whole."""


class PartsLostError(Exception):
    """Nobody is left who holds some part of the model as it was after the last step."""

    def __init__(self) -> None:
        super().__init__(
            "no rank is left that holds some part of the model as it is after the last step; the "
            "newest checkpoint has it"
        )


# What gloo, NCCL and the store say when the other end is gone. Gloo raises a bare RuntimeError,
# so its words are all there is to go by.
_PEER_IS_GONE = re.compile(
    r"connection (was )?(closed|reset|refused)|connection .*closed by peer|socket closed"
    r"|broken pipe|remote process exited|timed out waiting|nccl communicator was aborted"
    r"|watchdog caught collective operation timeout"
    r"|application timeout caused pair closure",
    re.IGNORECASE,
)


def cause_of(error: BaseException) -> Cause:
    """Why an attempt ended that raised this error: INFRASTRUCTURE where a disk or a store is at
    fault, WORKER_LOST where it only echoes a peer's death.

    An error that was raised from another is judged by what it was raised from as well.
    """
    if is_storage_fault(error):
        return Cause.INFRASTRUCTURE
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, DataError):
            return Cause.BAD_DATA
        if isinstance(seen, DivergedError):
            return Cause.DIVERGED
        if isinstance(seen, SourceUnavailableError):
            return Cause.DATA_UNREACHABLE
        if isinstance(seen, dist.DistNetworkError | dist.DistStoreError | PartsLostError):
            return Cause.WORKER_LOST
        # Exactly RuntimeError: a ConnectionResetError of the script's own is the script's.
        if type(seen) in (RuntimeError, dist.DistError, dist.DistBackendError) and (
            _PEER_IS_GONE.search(str(seen))
        ):
            return Cause.WORKER_LOST
        seen = seen.__cause__
    return Cause.CANNOT_RUN if isinstance(error, _DETERMINISTIC) else Cause.USER_ERROR


_DETERMINISTIC = (EntrypointError, SyntaxError, ModuleNotFoundError)
"""The same code ends in these whenever it runs."""
