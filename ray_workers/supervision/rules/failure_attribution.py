"""Attribution of a worker group's end to one rank: pure, without ray or torch."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dray.ranks import role_of
from ray_workers.shared.contracts import STORAGE_EXIT_CODE, Cause, Frame, Outcome
from ray_workers.shared.heartbeat import RankStatus
from ray_workers.shared.processes.machine_pace import OVERLOADED, overload_note


@dataclass(frozen=True)
class RankExit:
    """How a training process ended; `exit_code` is None if that was not seen."""

    rank: int
    exit_code: int | None
    lost_forkserver: bool
    """The forkserver of its node ended, which another job or the machine may have done."""
    is_stuck: bool
    """It was killed, and not gone within the forkserver's limit, which does not know the pace of
    the machine."""
    memory_kills: int
    """Processes that its node's kernel ended for want of memory while it ran; it may be one of
    them."""
    log_lines_lost: int
    """Lines at the end of its output for which its node's disk had no room."""
    ended_at: float
    """Unix seconds at which its end was seen; infinite if that was not seen."""
    last_status: RankStatus | None
    """The last status in its heartbeat page; None if the page was not read."""

    @classmethod
    def of(cls, rank: int, exit_code: int | None) -> RankExit:
        """An end of which nothing else is known."""
        return cls(
            rank,
            exit_code,
            lost_forkserver=False,
            is_stuck=False,
            memory_kills=0,
            log_lines_lost=0,
            ended_at=math.inf,
            last_status=None,
        )

    @property
    def why_killed(self) -> str:
        """An explanation of a SIGKILL where memory was short; else an empty string."""
        if self.exit_code != -signal.SIGKILL or not self.memory_kills:
            return ""
        return (
            " (meanwhile the kernel of its node ended "
            f"{self.memory_kills} process{'' if self.memory_kills == 1 else 'es'} for want of "
            "memory)"
        )


SEEN_LATE_S = 0.25
"""A rank without an error is seen gone so much later than it died, at the most; its peers may have
reported the loss by then."""


def judge(
    ended: Sequence[RankExit],
    errors: Mapping[int, Frame],
    *,
    under_nccl: bool = False,
    is_script: bool = False,
) -> Outcome:
    """Which rank is to blame for the end of a group, and why it ended.

    ended: the ranks that ended by themselves, without those that were then stopped.
    errors: the ERROR frames that ranks left.
    under_nccl: the ranks exchanged by NCCL, whose watchdog aborts a process that lost its peers
    before it can report an error.
    is_script: a rank that ends with 0 before the others may be why they fail.

    When a rank dies, its peers fail too, in the collective that it left. They report `worker_lost`,
    so a rank that failed for a reason of its own is the culprit; of several, the one that failed
    first, since the program of the others may hide the loss of their peer behind another error.
    """
    failed = [rank for rank in ended if rank.exit_code != 0]
    if not failed:
        return Outcome.of(Cause.SUCCEEDED, "every rank ended with code 0")
    vanished = [rank for rank in failed if rank.exit_code is None]
    if vanished:
        rank = vanished[0].rank
        if any(each.lost_forkserver for each in vanished):
            message = f"the forkserver of rank {rank}'s node ended, and the node's ranks with it"
            return Outcome.of(Cause.NODE_LOST, message, rank)
        return Outcome.of(Cause.WORKER_LOST, f"the worker of rank {rank} vanished", rank)
    causes = {rank: Cause(frame.body["cause"]) for rank, frame in errors.items()}
    if under_nccl:
        causes |= {each.rank: Cause.WORKER_LOST for each in failed if _is_echo(each, causes)}
    own = [rank for rank in failed if causes.get(rank.rank) is not Cause.WORKER_LOST]
    culprit = min(own or failed, key=lambda rank: _failed_at(rank, errors.get(rank.rank)))
    if not own and is_script and (left := _left_before(ended, culprit, errors)):
        message = (
            f"rank {left.rank} ended with code 0 while the others went on, and rank "
            f"{culprit.rank} lost it: {errors[culprit.rank].body['message']}"
        )
        return Outcome.of(Cause.USER_ERROR, message, left.rank, left.exit_code)
    if culprit.rank in errors:
        cause, message = causes[culprit.rank], str(errors[culprit.rank].body["message"])
    else:
        cause, message = _unexplained(culprit, is_echo=culprit.rank in causes)
    return Outcome.of(cause, message, culprit.rank, culprit.exit_code)


def errors_of(frames: Iterable[Frame], ranks: Mapping[tuple[int, int], int]) -> dict[int, Frame]:
    """The ERROR frames that these processes left, by their ranks.

    ranks: by seat and incarnation. The name of a spool does not tell the rank: that of a process
    which never had a place is named by its seat, and an older one by a rank that another process
    has now.
    """
    found: dict[int, Frame] = {}
    for frame in frames:
        rank = ranks.get((frame.body.get("seat", -1), frame.body.get("incarnation", -1)))
        if rank is not None:
            found[rank] = frame
    return found


def failed_by_echo(failed: Sequence[RankExit], errors: Mapping[int, Frame]) -> bool:
    """Whether all of these ranks failed because they lost a peer."""
    own = [errors.get(rank.rank) for rank in failed]
    return all(error and error.body["cause"] == Cause.WORKER_LOST for error in own)


def _failed_at(ended: RankExit, error: Frame | None) -> tuple[float, bool]:
    """When it failed, by the clock of its node, and whether it left no error. A rank says itself
    when it raised its error; another may claim a time, but none after its report."""
    if error is None:
        return ended.ended_at - SEEN_LATE_S, True
    claimed = error.body.get("raised_at")
    if isinstance(claimed, float) and 0.0 < claimed <= error.time:
        return claimed, False
    return error.time, False


def _left_before(
    ended: Sequence[RankExit], failed: RankExit, errors: Mapping[int, Frame]
) -> RankExit | None:
    """The first rank that ended well, if that was before this one failed."""
    well = [rank for rank in ended if rank.exit_code == 0]
    first = min(well, key=lambda rank: rank.ended_at, default=None)
    if first is None or failed.rank not in errors:
        return None
    is_before = first.ended_at - SEEN_LATE_S <= _failed_at(failed, errors[failed.rank])[0]
    return first if is_before else None


def _is_echo(ended: RankExit, causes: Mapping[int, Cause]) -> bool:
    """Whether it was aborted without an error, as NCCL's watchdog does to a rank whose peers
    died."""
    return ended.exit_code == -signal.SIGABRT and ended.rank not in causes


def excused(outcome: Outcome, slowness: float) -> Outcome:
    """The same end; where overloaded machines are the reason, the outcome says so.

    slowness: how many times slower than usual the machines were when its start or its recovery last
    took too long, 1 if neither did.
    """
    may_be = outcome.cause in (Cause.WORKER_LOST, Cause.INFRASTRUCTURE)
    if not may_be or slowness < OVERLOADED:
        return outcome
    return replace(outcome, message=outcome.message + overload_note(slowness), slowness=slowness)


def with_role(outcome: Outcome, names: Sequence[str]) -> Outcome:
    """The same end; where the rank at fault has a role, the outcome says so. names: as of
    `dray.ranks.role_names`."""
    role = "" if outcome.rank is None else role_of(outcome.rank, names)
    said = f" (rank {outcome.rank} is {role})" if role else ""
    return replace(outcome, message=outcome.message + said)


SENT_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
"""Signals that come from outside: an out-of-memory killer, a node shutting down, an operator."""


def _unexplained(ended: RankExit, *, is_echo: bool) -> tuple[Cause, str]:
    code = ended.exit_code
    assert code is not None
    if code == STORAGE_EXIT_CODE:
        message = f"rank {ended.rank} met a full or failing disk, and could not say more"
        return Cause.INFRASTRUCTURE, message
    if code == -signal.SIGBUS:
        message = f"the process of rank {ended.rank} was killed by SIGBUS: memory that is mapped"
        return Cause.INFRASTRUCTURE, f"{message} from a file, such as in /dev/shm, was not there"
    if code >= 0:
        return Cause.USER_ERROR, f"rank {ended.rank} exited with code {code}"
    message = f"the process of rank {ended.rank} was killed by signal {-code}{ended.why_killed}"
    if is_echo:
        return Cause.WORKER_LOST, f"{message}, as NCCL's watchdog does"
    return (Cause.WORKER_LOST if -code in SENT_SIGNALS else Cause.USER_ERROR), message
