"""Determines which rank caused the end of a worker group. The module is pure, and imports neither
Ray nor torch."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dray.ranks import role_of
from ray_workers.shared.contracts import STORAGE_EXIT_CODE, Cause, Frame, Outcome
from ray_workers.shared.heartbeat import RankStatus
from ray_workers.shared.processes.machine_speed import OVERLOADED, overload_note


@dataclass(frozen=True)
class RankExit:
    """The exit of a training process. `exit_code` is None if the exit was not observed."""

    rank: int
    exit_code: int | None
    lost_forkserver: bool
    """Whether the forkserver on the process's node ended, possibly because of another job or the
    machine."""
    is_stuck: bool
    """Whether the process was killed but still existed after the forkserver's time limit. This
    limit does not depend on the speed of the machine."""
    memory_kills: int
    """Number of processes that the node's kernel killed because of low memory while the process
    ran. The number can include the process itself."""
    log_lines_lost: int
    """Number of lines at the end of the process's output that were lost because the node's disk was
    full."""
    ended_at: float
    """Unix time at which the exit was observed; infinite if it was not observed."""
    last_status: RankStatus | None
    """The last status on the process's heartbeat page; None if the page was not read."""

    @classmethod
    def of(cls, rank: int, exit_code: int | None) -> RankExit:
        """Return an exit for which only the exit code is known."""
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
        """An explanation of a SIGKILL if memory was low; otherwise, an empty string."""
        if self.exit_code != -signal.SIGKILL or not self.memory_kills:
            return ""
        return (
            " (while it ran, the kernel of its node killed "
            f"{self.memory_kills} process{'' if self.memory_kills == 1 else 'es'} because of low "
            "memory)"
        )


SEEN_LATE_S = 0.25
"""Maximum delay in seconds in observing the exit of a rank that wrote no error. The rank's peers
might report the loss earlier."""


def judge(
    ended: Sequence[RankExit],
    errors: Mapping[int, Frame],
    *,
    under_nccl: bool = False,
    is_script: bool = False,
) -> Outcome:
    """Return the outcome of a group: the rank that caused its end, and the cause.

    `ended` contains the exits of the ranks that ended on their own, before the other ranks were
    stopped. `errors` contains the ERROR frames that ranks wrote. `under_nccl` is true if the ranks
    communicated through NCCL: when a process has lost its peers, NCCL's watchdog aborts it before
    it can report an error. `is_script` is true if ranks can fail because another rank has exited
    with code 0 before them.

    When a rank dies, its peers fail too, because the dead rank is missing from their collective.
    The peers report `worker_lost`, so the root cause is a rank that failed for a different reason.
    If several ranks failed for a different reason, the root cause is the rank that failed first,
    because the programs of the other ranks might report the loss of a peer as a different error.

    Raises ValueError if no rank has ended.
    """
    if not ended:
        raise ValueError("no rank has ended, so the group has no outcome")
    failed = [rank for rank in ended if rank.exit_code != 0]
    if not failed:
        return Outcome.of(Cause.SUCCEEDED, "every rank exited with code 0")
    vanished = [rank for rank in failed if rank.exit_code is None]
    if vanished:
        rank = vanished[0].rank
        if any(each.lost_forkserver for each in vanished):
            message = (
                f"the forkserver on the node of rank {rank} exited, which terminated all ranks on "
                "this node"
            )
            return Outcome.of(Cause.NODE_LOST, message, rank)
        return Outcome.of(Cause.WORKER_LOST, f"the worker of rank {rank} vanished", rank)
    causes = {rank: Cause(frame.body["cause"]) for rank, frame in errors.items()}
    if under_nccl:
        causes |= {
            each.rank: Cause.WORKER_LOST for each in failed if _is_secondary_failure(each, causes)
        }
    own = [rank for rank in failed if causes.get(rank.rank) is not Cause.WORKER_LOST]
    root_cause = min(own or failed, key=lambda rank: _failed_at(rank, errors.get(rank.rank)))
    if not own and is_script and (left := _left_before(ended, root_cause, errors)):
        message = (
            f"rank {left.rank} exited with code 0 while other ranks were running, and rank "
            f"{root_cause.rank} lost its connection: {errors[root_cause.rank].body['message']}"
        )
        return Outcome.of(Cause.USER_ERROR, message, left.rank, left.exit_code)
    if root_cause.rank in errors:
        cause, message = causes[root_cause.rank], str(errors[root_cause.rank].body["message"])
    else:
        cause, message = _unexplained(root_cause, is_secondary_failure=root_cause.rank in causes)
    return Outcome.of(cause, message, root_cause.rank, root_cause.exit_code)


def errors_of(frames: Iterable[Frame], ranks: Mapping[tuple[int, int], int]) -> dict[int, Frame]:
    """Return the ERROR frames that these processes wrote, keyed by rank.

    `ranks` maps worker index and incarnation to the rank. The rank can't be derived from the name
    of a spool: the spool of a process that never got a rank is named after its worker index, and
    the name of an older spool can contain a rank that now belongs to another process.
    """
    found: dict[int, Frame] = {}
    for frame in frames:
        rank = ranks.get((frame.body.get("seat", -1), frame.body.get("incarnation", -1)))
        if rank is not None:
            found[rank] = frame
    return found


def all_lost_a_peer(failed: Sequence[RankExit], errors: Mapping[int, Frame]) -> bool:
    """Whether all of these ranks failed only because they lost a peer."""
    own = [errors.get(rank.rank) for rank in failed]
    return all(error and error.body["cause"] == Cause.WORKER_LOST for error in own)


def _failed_at(ended: RankExit, error: Frame | None) -> tuple[float, bool]:
    """Return the time of the failure, on the clock of the rank's node, and whether the rank wrote
    no error. An error contains the time at which it was raised; this time is ignored if it is later
    than the time of the report."""
    if error is None:
        return ended.ended_at - SEEN_LATE_S, True
    claimed = error.body.get("raised_at")
    if isinstance(claimed, float) and 0.0 < claimed <= error.time:
        return claimed, False
    return error.time, False


def _left_before(
    ended: Sequence[RankExit], failed: RankExit, errors: Mapping[int, Frame]
) -> RankExit | None:
    """Return the first rank that exited with code 0, if it exited before `failed`; otherwise
    None."""
    well = [rank for rank in ended if rank.exit_code == 0]
    first = min(well, key=lambda rank: rank.ended_at, default=None)
    if first is None or failed.rank not in errors:
        return None
    is_before = first.ended_at - SEEN_LATE_S <= _failed_at(failed, errors[failed.rank])[0]
    return first if is_before else None


def _is_secondary_failure(ended: RankExit, causes: Mapping[int, Cause]) -> bool:
    """Whether the rank was aborted without writing an error, as happens when NCCL's watchdog aborts
    a process whose peers have died."""
    return ended.exit_code == -signal.SIGABRT and ended.rank not in causes


def excused(outcome: Outcome, slowness: float) -> Outcome:
    """Return the outcome, with a note if overloaded machines might have caused it.

    `slowness` is the factor by which the machines were slower than usual when the group's start or
    recovery last took too long. `slowness` is 1 if neither the start nor a recovery took too long.
    """
    may_be = outcome.cause in (Cause.WORKER_LOST, Cause.INFRASTRUCTURE)
    if not may_be or slowness < OVERLOADED:
        return outcome
    return replace(outcome, message=outcome.message + overload_note(slowness), slowness=slowness)


def with_role(outcome: Outcome, names: Sequence[str]) -> Outcome:
    """Return the outcome. If the rank at fault has a role, the message names the role.
    `names` contains role names as returned by `dray.ranks.role_names`."""
    role = "" if outcome.rank is None else role_of(outcome.rank, names)
    note = f" (rank {outcome.rank} is {role})" if role else ""
    return replace(outcome, message=outcome.message + note)


SENT_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
"""Signals that a process receives from outside, for example from the out-of-memory killer, from a
node that shuts down, or from an operator."""


def _unexplained(ended: RankExit, *, is_secondary_failure: bool) -> tuple[Cause, str]:
    code = ended.exit_code
    assert code is not None
    if code == STORAGE_EXIT_CODE:
        message = f"rank {ended.rank} could not report its error because of a full or failing disk"
        return Cause.INFRASTRUCTURE, message
    if code == -signal.SIGBUS:
        message = f"the process of rank {ended.rank} was killed by SIGBUS: part of a memory-mapped"
        return Cause.INFRASTRUCTURE, f"{message} file, for example in /dev/shm, was unavailable"
    if code >= 0:
        return Cause.USER_ERROR, f"rank {ended.rank} exited with code {code}"
    message = f"the process of rank {ended.rank} was killed by signal {-code}{ended.why_killed}"
    if is_secondary_failure:
        return Cause.WORKER_LOST, f"{message}, probably by NCCL's watchdog"
    return (Cause.WORKER_LOST if -code in SENT_SIGNALS else Cause.USER_ERROR), message
