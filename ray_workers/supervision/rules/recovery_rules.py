"""The rules for recovery in place. The module is pure, and imports neither Ray nor torch.

The surviving ranks have the complete state of a replicated model. Therefore, a killed rank is
replaced, and no rank has to repeat a step. A rank that failed with its own error is not replaced,
because its replacement would fail in the same way.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType

from dray.ranks import with_role
from ray_workers.shared.commands import Grant
from ray_workers.shared.contracts import AttemptSpec, Cause, Frame
from ray_workers.shared.group_traits import GroupTraits
from ray_workers.shared.heartbeat import RankObservation, RankStatus
from ray_workers.shared.slices import Slice
from ray_workers.shared.supervisor_frames import LossKind, RegroupedReport, RegroupingReport
from ray_workers.supervision.rules.failure_attribution import RankExit
from ray_workers.supervision.rules.spare_rules import counted

MOST_WITHOUT_A_STEP = 3
"""Maximum number of consecutive recoveries without a training step between them."""
MOST_STARTS = 3
"""Maximum number of times that a replacement process is started for a lost rank."""
DEVICE_LOST = "DeviceLostError"
"""The type of the error of a rank whose process could not use its GPU any longer."""
MOST_RESTARTS, RESTARTS_WITHIN_S = 3, 600.0
"""Maximum number of restarts of one rank of a script, and the period in seconds over which they are
counted."""
STATE_LOST = frozenset(
    {
        "PartsLostError",
        "KeeperLostError",
        "CopiesDifferError",
        "ScriptDiffersError",
        "BatchLostError",
        "ReplicasDifferError",
        "CorruptedReplicaError",
    }
)
"""Types of the errors that end all ranks of a group, because the group can't continue from the
state that its ranks hold."""


def least_ranks(spec: AttemptSpec) -> int:
    """Return the minimum number of workers with which the group continues if there are no
    replacements."""
    fewest = spec.min_workers if spec.traits.quorum is None else spec.traits.quorum
    return spec.world_size if fewest is None else fewest


@dataclass(frozen=True)
class Regrouping:
    """The transition of a group to its next rendezvous round."""

    ranks: tuple[int, ...]
    """The lost ranks; empty if only the size of the group changes."""
    began_at: float
    """Unix time at which the loss was observed."""
    furthest_step: int
    """The last step that any rank had committed before the loss."""


@dataclass(frozen=True)
class RecoveryState:
    """The state of a group's recovery."""

    round: int = 0
    """Number of the latest rendezvous round, which might not have been announced yet. Messages call
    it `generation`."""
    regrouping: Regrouping | None = None
    announced_at: float | None = None
    """When the round was announced to its ranks, on the clock of `MachineSpeed.time`; None if the
    round has not been announced."""
    num_lacking: int = 0
    """Number of missing workers for which the other workers wait."""
    lacking_since: float | None = None
    """When the group first became short of workers, on the clock of `MachineSpeed.time`; None if no
    worker is missing."""
    without_a_step: int = 0
    """Number of recoveries since the group last took a step."""
    grants: tuple[Grant, ...] = ()
    """Grants of slots in which no workers have been started yet, oldest first."""
    is_adding_workers: bool = False
    batch_size: int | None = None
    """The global batch size that the service last chose for this attempt. The batch size is
    announced in every round, so that the ranks get it even if the previous round failed."""

    def begin(self, ranks: Iterable[int], began_at: float, furthest_step: int) -> RecoveryState:
        """Return the state of a group that starts to regroup, or starts over after further
        losses."""
        if self.regrouping is not None:
            ranks = sorted({*self.regrouping.ranks, *ranks})
            began_at = self.regrouping.began_at
            furthest_step = max(self.regrouping.furthest_step, furthest_step)
        regrouping = Regrouping(tuple(ranks), began_at, furthest_step)
        return replace(self, round=self.round + 1, regrouping=regrouping, announced_at=None)

    def lack(self, num_workers: int, now: float) -> RecoveryState:
        """Return the state of a group that is waiting for `num_workers` missing workers (0 if it
        has enough)."""
        since = now if self.lacking_since is None else self.lacking_since
        return replace(self, num_lacking=num_workers, lacking_since=since if num_workers else None)


def are_prepared(observations: Iterable[RankObservation], running: Set[tuple[int, int]]) -> bool:
    """Whether the running processes of a script will join the next round with their group. True if
    one process has called `train.prepare`: the other processes run the same program, so they will
    call the function too.

    For `observations` and `running`, see `num_holders`.
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
    """Return the reason why lost ranks are not replaced, or None if they are replaced.

    `lost` contains the exits of these ranks (none with code 0), and `errors` the ERROR frames that
    they wrote. `num_holders` is the number of other ranks that have the state, and `without_a_step`
    the number of recoveries since the group last took a step. `servers` contains the ranks that
    each have a different part of the state. Only a server's replica has the same part of the state
    as the server; `replicas` maps the rank of each server to the rank of its replica. `recovering`
    contains ranks that were lost earlier and have not taken a step since.
    """
    gone = {*(rank.rank for rank in lost), *recovering}
    for server in sorted(gone & servers):
        keeper = replicas.get(server)
        if keeper is None:
            return (
                f"rank {server} is a parameter server, and no other rank holds its part of the "
                "state"
            )
        if keeper in gone:
            return (
                f"rank {server} is a parameter server, and rank {keeper}, which holds its replica, "
                "was also lost"
            )
    if num_holders == 0:
        return "no running rank holds the training state"
    if without_a_step >= MOST_WITHOUT_A_STEP:
        return f"the group recovered {without_a_step} times in a row without completing a step"
    for rank in lost:
        frame = errors.get(rank.rank)
        if frame is not None and frame.body["type"] in STATE_LOST:
            return (
                f"rank {rank.rank} reported that training can't continue from the state that the "
                "ranks hold"
            )
        if frame is not None and Cause(frame.body["cause"]) is not Cause.WORKER_LOST:
            return f"rank {rank.rank} raised an error that was not caused by a lost worker"
        if frame is None and rank.exit_code is not None and rank.exit_code > 0:
            return f"rank {rank.rank} exited with code {rank.exit_code}"
    return None


def may_restart(lost: Sequence[RankExit], standalone: Set[int], earlier: Mapping[int, int]) -> bool:
    """Whether these ranks are restarted while the other ranks continue. A rank that exited on its
    own is not restarted, because it would exit again. A rank whose actor is gone is not restarted,
    because the other ranks know the port of that actor.

    `standalone` contains the ranks that other ranks do not have to wait for, and `earlier` the
    number of recent restarts of each rank.
    """
    return all(
        end.rank in standalone
        and end.exit_code is not None
        and end.exit_code < 0
        and earlier.get(end.rank, 0) < MOST_RESTARTS
        for end in lost
    )


def num_holders(
    observations: Iterable[RankObservation], running: Set[tuple[int, int]], *, furthest_step: int
) -> int:
    """Return the number of running ranks that can pass on the state.

    A replacement has no state until it has joined the group. Without the other ranks, the
    replacement would start from the checkpoint from which the attempt started, and all later steps
    would be lost. Before the attempt's first step, no state can be lost, so all ranks are counted.

    `observations` must include all observable processes of the attempt, even ended ones. `running`
    contains the (worker index, incarnation) of each running process in the group. `furthest_step`
    is the last step that any rank, observed or not, is known to have committed.
    """
    steps = {
        (observation.rank, observation.incarnation): observation.status.step
        for observation in observations
    }
    if not furthest_step and not any(steps.values()):
        return len(running)
    return sum(steps.get(one, 0) > 0 for one in running)


def recalled(held: Sequence[Slice], asked: Sequence[Slice], least: int) -> list[int]:
    """Return the indices of the held slices to release. A recalled slice is released if at least
    `least` workers remain. A slice is a placement group, so it can only be released as a whole."""
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
    errors: Mapping[int, Frame] = MappingProxyType({}),
    *,
    num_spares: int = 0,
) -> RegroupingReport:
    """Return the report of a loss. `lost` is empty if ranks only lost their connections. `why_slow`
    is from `MachineSpeed.why`. For `errors`, see `refused`. `num_spares` is the number of spares
    that take the ranks of lost workers."""
    if lost:
        reason = "; ".join(how(rank, traits.role_names, errors.get(rank.rank)) for rank in lost)
    else:
        reason = "ranks lost their connections to each other, but all ranks are still running"
    goes_on = (traits.goes_on_without_lost or traits.restarted_alone) and lost
    others = (
        f"{'the other ranks' if lost else 'all ranks'} "
        f"{'continue' if goes_on else 'keep their state'}"
    )
    if traits.goes_back and lost:
        others = "all ranks return to the newest copies of their state in memory"
    if num_spares:
        each = "a spare takes its place" if len(lost) == 1 else f"spares replace {num_spares}"
        others = f"{each}, and {others}"
    return RegroupingReport(
        generation=round_number,
        ranks=[rank.rank for rank in lost],
        code=kind,
        message=f"{reason}; {others}{why_slow}",
    )


def regrouped_report(
    regrouping: Regrouping,
    ranks: Collection[RankStatus],
    round_number: int,
    traits: GroupTraits,
    world_size: int,
    now: float,
) -> RegroupedReport:
    """Return the report that a group trains again after a loss. `ranks` contains the latest
    statuses of the group's ranks. now: Unix time."""
    resumed = max((rank.resumed_step for rank in ranks), default=0)
    first_at = max((rank.first_at for rank in ranks), default=0.0)
    if first_at < regrouping.began_at:  # the job has finished, or the other ranks did not stop
        first_at = now
    # A group with silos or servers loses no steps: silos keep their part of an open round, and
    # servers keep every gradient.
    is_kept = bool(traits.state_holders)
    return RegroupedReport(
        generation=round_number,
        ranks=list(regrouping.ranks),
        world_size=world_size,
        step=resumed,
        steps_lost=0 if is_kept else max(0, regrouping.furthest_step - resumed),
        recovery_s=max(0.0, first_at - regrouping.began_at),
    )


def size_message(
    message: str,
    *,
    num_spares: int,
    num_coming: int,
    num_idle: int,
    num_lacking: int,
    waits: bool,
) -> str:
    """Complete a message about the size of a group. num_coming: number of processes that are being
    replaced while the others train. num_idle: number of members that complete no replica. waits:
    whether the group waits for the workers that it lacks."""
    if num_spares:
        message += f" and {counted(num_spares, 'spare')}"
    if num_coming:
        message += f", and starts {num_coming} more"
    if num_idle:
        message += f", and leaves {num_idle} idle until there are enough for another replica"
    if num_lacking:
        message += f", and {'waits' if waits else 'asks'} for {num_lacking} more"
    return message


def how(lost: RankExit, names: Sequence[str] = (), error: Frame | None = None) -> str:
    """Describe how a rank exited. `names` contains role names as returned by
    `dray.ranks.role_names`. `error` is the ERROR frame that the rank wrote."""
    rank = f"rank {with_role(lost.rank, names)}"
    if lost.exit_code is None:
        return f"the worker of {rank} vanished"
    if error is not None and error.body["type"] == DEVICE_LOST:
        return f"{rank} exited: {error.body['message']}"
    if lost.exit_code >= 0:
        return f"{rank} lost its connections"
    try:
        name = signal.Signals(-lost.exit_code).name
    except ValueError:
        name = f"signal {-lost.exit_code}"
    return f"{rank} was killed by {name}{lost.why_killed}"
