"""The rules of recovery in place: pure, without ray or torch.

The survivors hold the whole state of a replicated model, so a rank that was killed is replaced and
nobody repeats a step. A rank that failed by its own error is not: its replacement would fail alike.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType

from dray.ranks import with_role
from ray_workers.shared.commands import Grant
from ray_workers.shared.contracts import Cause, Frame, Slice
from ray_workers.shared.frames import LossKind, RegroupingReport
from ray_workers.shared.group_traits import GroupTraits
from ray_workers.shared.heartbeat import RankObservation
from ray_workers.supervision.rules.failure_attribution import RankExit

MOST_WITHOUT_A_STEP = 3
"""Recoveries in a row without a step in between; a group that breaks again does not recover."""
MOST_STARTS = 3
"""Tries to start another process for a lost rank."""
MOST_RESTARTS, RESTARTS_WITHIN_S = 3, 600.0
"""So often within so many seconds a rank of a script is started again alone; a program that is
killed more often is no accident."""


@dataclass(frozen=True)
class Regrouping:
    """A group on its way into its next rendezvous round."""

    ranks: tuple[int, ...]
    """The lost ranks; empty if only the size of the group changes."""
    began_at: float
    """Unix seconds at which the loss was seen."""
    furthest_step: int
    """The last step that any rank had committed before."""


@dataclass(frozen=True)
class RecoveryState:
    """How far a group's recovery is."""

    round: int = 0
    """The newest rendezvous round, announced or about to be; `generation` on the wire."""
    regrouping: Regrouping | None = None
    announced_at: float | None = None
    """By the pace's time; None until the ranks that have a place in the round know it."""
    num_lacking: int = 0
    """Workers for which the others stand by."""
    lacking_since: float | None = None
    """By the pace's time; None if no worker is lacking."""
    without_a_step: int = 0
    """Recoveries since the group last took a step."""
    grants: tuple[Grant, ...] = ()
    """Slots that are to be taken in, one grant after the other."""
    is_taking_in: bool = False
    batch_size: int | None = None
    """Global batch that the service has chosen for this attempt last. Each round announces it, so
    that also ranks of a round that broke off have the same."""

    def begin(self, ranks: Iterable[int], began_at: float, furthest_step: int) -> RecoveryState:
        """The group begins to regroup, or does so anew because it lost more ranks."""
        if self.regrouping is not None:
            ranks = sorted({*self.regrouping.ranks, *ranks})
            began_at = self.regrouping.began_at
            furthest_step = max(self.regrouping.furthest_step, furthest_step)
        regrouping = Regrouping(tuple(ranks), began_at, furthest_step)
        return replace(self, round=self.round + 1, regrouping=regrouping, announced_at=None)

    def lack(self, num_workers: int, now: float) -> RecoveryState:
        """The group stands by for so many workers, or has enough of them."""
        since = now if self.lacking_since is None else self.lacking_since
        return replace(self, num_lacking=num_workers, lacking_since=since if num_workers else None)


def are_prepared(observations: Iterable[RankObservation], running: Set[tuple[int, int]]) -> bool:
    """Whether the running processes of a script follow their group into the next round. A process
    that has not called `train.prepare` yet is no obstacle where another one has: it runs the same
    program, and takes its place there.

    observations, running: as for `num_holders`.
    """
    seen = [one for one in observations if (one.rank, one.incarnation) in running]
    return any(one.status.is_prepared for one in seen)


def refused(
    lost: Sequence[RankExit],
    errors: Mapping[int, Frame],
    *,
    num_holders: int,
    without_a_step: int,
    servers: Set[int] = frozenset(),
    replicas: Mapping[int, int] = MappingProxyType({}),
    recovering: Iterable[int] = (),
) -> str | None:
    """Why ranks that ended are not replaced; None if they are.

    lost: the ends of these ranks, none of them good. errors: the ERROR frames that they left.
    num_holders: how many other ranks hold the state.
    without_a_step: recoveries since the group last took a step.
    servers: ranks that alone hold their part of the state, but for the replicas.
    replicas: by rank, of servers, the rank with the replica.
    recovering: ranks that were lost before, and have not taken a step since.
    """
    gone = {*(rank.rank for rank in lost), *recovering}
    for server in sorted(gone & servers):
        keeper = replicas.get(server)
        if keeper is None:
            return f"rank {server} is a server, and nobody else holds its part of the state"
        if keeper in gone:
            return (
                f"rank {server} is a server, and rank {keeper}, which has its replica, is lost too"
            )
    if num_holders == 0:
        return "nobody is left who holds the state"
    if without_a_step >= MOST_WITHOUT_A_STEP:
        return f"it recovered {without_a_step} times in a row without a step in between"
    for rank in lost:
        frame = errors.get(rank.rank)
        if frame is not None and Cause(frame.body["cause"]) is not Cause.WORKER_LOST:
            return f"rank {rank.rank} ended by an error of its own"
        if frame is None and rank.exit_code is not None and rank.exit_code > 0:
            return f"rank {rank.rank} exited with code {rank.exit_code}"
    return None


def may_restart(lost: Sequence[RankExit], lone: Set[int], earlier: Mapping[int, int]) -> bool:
    """Whether these ranks are started again while the others go on. One that ended by itself is
    not, since it would again; nor one whose actor is gone, which had the port that the others know.

    lone: ranks that the others need not wait for. earlier: how often each was started again of
    late.
    """
    return all(
        end.rank in lone
        and end.exit_code is not None
        and end.exit_code < 0
        and earlier.get(end.rank, 0) < MOST_RESTARTS
        for end in lost
    )


def num_holders(
    observations: Iterable[RankObservation], running: Set[tuple[int, int]], *, furthest_step: int
) -> int:
    """How many running ranks can hand over the state.

    A replacement has no state until it has joined the group; without the others it would begin from
    the checkpoint that the attempt began from, whatever was done since. Before the first step of
    the attempt there is nothing to lose, and every rank counts.

    observations: of every process of the attempt that can be seen, also the dead. running: (seat,
    incarnation) of the processes that have a place and run. furthest_step: the last step that any
    rank is known to have committed, seen or not.
    """
    steps = {
        (observation.rank, observation.incarnation): observation.status.step
        for observation in observations
    }
    if not furthest_step and not any(steps.values()):
        return len(running)
    return sum(steps.get(one, 0) > 0 for one in running)


def recalled(held: Sequence[Slice], asked: Sequence[Slice], least: int) -> list[int]:
    """The places of the held slices that are given back: those that are asked for, as long as at
    least so many workers stay. A slice goes as a whole, as its placement group does."""
    left, wanted, going = sum(part.num_workers for part in held), list(asked), []
    for at in reversed(range(len(held))):
        part = held[at]
        if part in wanted and left - part.num_workers >= least:
            wanted.remove(part)
            left -= part.num_workers
            going.append(at)
    return going


def loss_report(
    lost: Sequence[RankExit],
    kind: LossKind,
    round_number: int,
    traits: GroupTraits,
    why_slow: str,
) -> RegroupingReport:
    """The report of a loss. lost: empty if ranks lost each other. why_slow: as
    `MachinePace.why`."""
    if lost:
        reason = "; ".join(how(rank, traits.role_names) for rank in lost)
    else:
        reason = "ranks lost each other, though all of them live"
    goes_on = (traits.goes_on_without_lost or traits.restarted_alone) and lost
    others = f"{'the others' if lost else 'they'} {'go on' if goes_on else 'keep their state'}"
    return RegroupingReport(
        generation=round_number,
        ranks=[rank.rank for rank in lost],
        code=kind,
        message=f"{reason}; {others}{why_slow}",
    )


def how(lost: RankExit, names: Sequence[str] = ()) -> str:
    """The end of a rank in a few words. names: as of `dray.ranks.role_names`."""
    rank = f"rank {with_role(lost.rank, names)}"
    if lost.exit_code is None:
        return f"the worker of {rank} vanished"
    if lost.exit_code >= 0:
        return f"{rank} lost the others"
    try:
        name = signal.Signals(-lost.exit_code).name
    except ValueError:
        name = f"signal {-lost.exit_code}"
    return f"{rank} was killed by {name}{lost.why_killed}"
