"""Telling whose fault it was when training raised."""

from __future__ import annotations

import re

import torch.distributed as dist

from ray_workers.contracts import Cause


class DataError(Exception):
    """The data set is missing or broken: another attempt would end the same way."""


class SourceUnavailableError(Exception):
    """A source did not answer, or broke off, however often it was asked; later it may."""


class BrokenCheckpointError(Exception):
    """A checkpoint is absent, unfinished or not what its manifest says."""


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
    """USER_ERROR, BAD_DATA, DATA_UNREACHABLE, or WORKER_LOST where it only echoes a peer's death.

    An error that was raised from another is judged by what it was raised from as well.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, DataError):
            return Cause.BAD_DATA
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
    return Cause.USER_ERROR
