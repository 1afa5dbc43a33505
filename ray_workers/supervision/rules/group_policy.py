"""Decisions about a running group. The module is pure, and imports neither Ray nor torch.

After each observation of the group, `GroupPolicy.decide` returns actions, which the group monitor
carries out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ray_workers.shared.commands import Drill, Grant
from ray_workers.shared.contracts import NOT_PREPARED, Cause, Outcome
from ray_workers.shared.group_traits import GroupTraits
from ray_workers.shared.heartbeat import RankObservation, RankPhase, RankStatus
from ray_workers.supervision.rules.hang_detector import (
    PATIENCE,
    Hang,
    HangLimits,
    StepTimes,
    Suspicion,
    find_hang,
    find_left_behind,
)
from ray_workers.supervision.rules.recovery_rules import RecoveryState
from ray_workers.supervision.rules.timings import Timings


@dataclass(frozen=True)
class GroupObservation:
    """An observation of a group."""

    ranks: Sequence[RankObservation]
    """Observations of the running processes of the group's ranks, sorted by rank. Ranks on nodes
    that do not respond are missing."""
    num_running: int
    """Number of ranks in the group that are running, including ranks that were not observed."""
    num_placed: int
    """Number of ranks in the group."""
    recovery: RecoveryState
    through: Mapping[int, RankStatus] = field(default_factory=dict)
    """The last known statuses of ranks that have exited with code 0, keyed by rank."""
    num_through: int = 0
    """Number of ranks in the group that have exited with code 0."""
    drills: Sequence[Drill] = ()
    """Faults that have not been injected yet."""
    is_leaving: bool = False
    """Whether the group was asked to release its slots."""
    is_ending_hang: bool = False
    """Whether a rank was killed because it hung, and its exit has not been observed yet."""
    slowness: float = 1.0
    """How many times slower than usual the machines are."""

    @property
    def is_whole(self) -> bool:
        """Whether every rank of the group either has exited with code 0, or is running and was
        observed."""
        return len(self.ranks) == self.num_running == self.num_placed - self.num_through

    @property
    def statuses(self) -> dict[int, RankStatus]:
        """Statuses of ranks that are running or have exited with code 0, keyed by rank."""
        return {rank.rank: rank.status for rank in self.ranks} | dict(self.through)


@dataclass(frozen=True)
class GroupMemory:
    """The state that is passed from one decision to the next."""

    stray_since: float | None = None
    forming_since: float | None = None
    steps: StepTimes = field(default_factory=StepTimes)
    suspicion: Suspicion = field(default_factory=Suspicion)


@dataclass(frozen=True)
class AddWorkers:
    """Start workers in granted slots."""

    grant: Grant


@dataclass(frozen=True)
class Confirm:
    """Report that the group has resumed training."""


@dataclass(frozen=True)
class Inject:
    """Inject a fault. `step` is the last step that the group has completed."""

    drill: Drill
    step: int


@dataclass(frozen=True)
class Gather:
    """Form another round, because ranks lost their connections and did not reconnect in time."""


@dataclass(frozen=True)
class EndHang:
    """End ranks that have been hanging for too long."""

    hang: Hang


@dataclass(frozen=True)
class End:
    """End the attempt."""

    outcome: Outcome


Action = AddWorkers | Confirm | Inject | Gather | EndHang | End


@dataclass(frozen=True)
class GroupPolicy:
    """Decides what to do with the group of one attempt."""

    timings: Timings
    traits: GroupTraits
    is_elastic: bool

    def decide(
        self, seen: GroupObservation, memory: GroupMemory, now: float
    ) -> tuple[list[Action], GroupMemory]:
        """Return the actions to perform, in order, and the new memory. `now` is in seconds at the
        machines' usual speed."""
        recovery = seen.recovery
        actions: list[Action] = []
        if self.traits.is_script and self.is_elastic and _is_unprepared(seen):
            return [End(Outcome.of(Cause.CANNOT_RUN, NOT_PREPARED))], memory
        if recovery.grants and not recovery.is_adding_workers:
            actions.append(AddWorkers(recovery.grants[0]))
        if trains_again := self.trains_again(seen):
            actions.append(Confirm())
        memory = replace(memory, forming_since=_forming_since(seen, memory, now))
        message = None if trains_again else self._overdue(seen, memory, now)
        if message is not None:
            return [*actions, End(Outcome.of(Cause.WORKER_LOST, message))], memory

        since = self._stray_since(seen, memory, now)
        if since is not None and not seen.is_leaving and now - since > self.timings.stray_s:
            return [*actions, Gather()], replace(memory, stray_since=None)
        memory = replace(memory, stray_since=since)

        is_regrouping = recovery.regrouping is not None and not trains_again
        if not is_regrouping:
            step = max((rank.status.step for rank in seen.ranks), default=0)
            actions += (Inject(d, step) for d in seen.drills if step >= (d.at_step or 0))
        if self.traits.state_holders or (self.traits.is_script and not is_regrouping):
            return self._judge_stopped(seen, actions, memory, now)
        if is_regrouping:
            hang = self._left_behind(seen, memory, now)
        else:
            # Ranks that are missing from the observation were lost or are on unresponsive nodes.
            if since is not None or seen.is_ending_hang or not seen.is_whole:
                return actions, memory
            if not seen.num_through:
                steps = memory.steps.after(seen.ranks, now, at_own_pace=self.traits.at_own_pace)
                memory = replace(memory, steps=steps)
            hang = find_hang(seen.ranks, self._limits(seen, memory), are_last=seen.num_through > 0)
        if hang is None:
            return actions, memory
        memory = replace(memory, suspicion=memory.suspicion.after(hang, seen.ranks, now))
        if now - memory.suspicion.since >= self.timings.sure_s:
            actions.append(EndHang(hang))
        return actions, memory

    def trains_again(self, seen: GroupObservation) -> bool:
        """Whether a recovering group has taken a step in its new round, or has finished. With
        parameter servers, the workers that were not lost do not notice the loss, and can finish
        during the recovery."""
        recovery = seen.recovery
        if recovery.regrouping is None or recovery.lacking_since is not None:
            return False
        if self.traits.state_holders:
            return _newcomers_are(lambda rank: _has_begun(rank) and _trains(rank), seen)

        def is_back(status: RankStatus) -> bool:
            return status.generation >= recovery.round and _trains(status)

        # All ranks of a round take their first step together and finish together, so a single rank
        # that has exited with code 0 is enough.
        if any(map(is_back, seen.through.values())):
            return True
        return seen.is_whole and bool(seen.ranks) and all(is_back(r.status) for r in seen.ranks)

    def _judge_stopped(
        self, seen: GroupObservation, actions: list[Action], memory: GroupMemory, now: float
    ) -> tuple[list[Action], GroupMemory]:
        """Treat only suspended processes as hanging. A script can stay in any phase for any length
        of time, even if it calls `train.prepare`. With parameter servers, a slow worker does not
        make other workers wait."""
        if self.traits.recovers_in_place:  # `_left_behind` uses the step times
            memory = replace(memory, steps=memory.steps.after(seen.ranks, now))
        stopped = tuple(rank for rank in seen.ranks if rank.state == "T")
        if not stopped or seen.is_ending_hang:
            return actions, replace(memory, suspicion=Suspicion())
        limit_s = self.timings.stopped_hang_s
        suspicion = memory.suspicion.after(Hang(stopped, 0.0, limit_s), seen.ranks, now)
        waited_s = now - suspicion.since
        if waited_s > limit_s:
            actions.append(EndHang(Hang(stopped, waited_s, limit_s)))
        return actions, replace(memory, suspicion=suspicion)

    def _overdue(self, seen: GroupObservation, memory: GroupMemory, now: float) -> str | None:
        """Return a message if the first round or a recovery is taking too long; else None."""
        recovery, limits = seen.recovery, self.timings
        phases = "; ".join(f"rank {r.rank}: {r.status.phase.name.lower()}" for r in seen.ranks)
        since = memory.forming_since
        if since is not None and now - since > limits.whole_limit_s:
            return f"the ranks did not connect within {limits.whole_limit_s:g} s ({phases})"
        if recovery.lacking_since is not None:
            grows = recovery.grants or recovery.is_adding_workers
            if grows or now - recovery.lacking_since <= limits.standby_limit_s:
                return None
            return (
                f"no slots became available within {limits.standby_limit_s:g} s to replace "
                f"{recovery.num_lacking} lost workers"
            )
        if recovery.regrouping is None or recovery.announced_at is None:
            return None
        if now - recovery.announced_at <= limits.whole_limit_s:
            return None
        if self.traits.state_holders and _newcomers_are(_has_begun, seen):
            return None  # a newcomer's first step can take long, or wait for another worker
        return f"the group was still incomplete after {limits.whole_limit_s:g} s ({phases})"

    def _stray_since(self, seen: GroupObservation, memory: GroupMemory, now: float) -> float | None:
        """Return the time since which ranks have been waiting for a round although no rank was
        lost, or None if they are not waiting. The ranks wait because their connections broke or a
        round could not be formed."""
        is_any_standby = any(rank.status.phase is RankPhase.STANDBY for rank in seen.ranks)
        may_be = (
            self.traits.recovers_in_place and is_any_standby and seen.num_running == seen.num_placed
        )
        if not may_be or seen.recovery.lacking_since is not None:
            return None
        return now if memory.stray_since is None else memory.stray_since

    def _left_behind(self, seen: GroupObservation, memory: GroupMemory, now: float) -> Hang | None:
        """Return the hang of the ranks that have not joined the round although their old
        connections were cut; None if there are no such ranks."""
        announced_at = seen.recovery.announced_at
        if seen.is_ending_hang or announced_at is None:
            return None
        if now - announced_at < self.timings.cut_off_s:
            return None
        return find_left_behind(seen.ranks, seen.recovery.round, self._limits(seen, memory))

    def _limits(self, seen: GroupObservation, memory: GroupMemory) -> HangLimits:
        patience = 1.0 if self.traits.recovers_in_place else PATIENCE
        return HangLimits(self.timings, patience, memory.steps.slowest_s, seen.slowness)


def _is_unprepared(seen: GroupObservation) -> bool:
    """Whether a script has reported a step without calling `train.prepare` first."""
    return any(rank.status.first_at and not rank.status.is_prepared for rank in seen.ranks)


def _forming_since(seen: GroupObservation, memory: GroupMemory, now: float) -> float | None:
    """Return when the ranks of the attempt's first round began to connect to each other. Later
    rounds have no separate limit for connecting, because the time for the entire recovery is
    limited."""
    forming = any(rank.status.phase is RankPhase.FORMING for rank in seen.ranks)
    if not forming or seen.recovery.regrouping is not None:
        return None
    return now if memory.forming_since is None else memory.forming_since


def _newcomers_are(is_so: Callable[[RankStatus], bool], seen: GroupObservation) -> bool:
    """Whether `is_so` is true for all ranks that replaced lost ranks in this recovery."""
    regrouping = seen.recovery.regrouping
    assert regrouping is not None
    return set(regrouping.ranks) <= {rank for rank, one in seen.statuses.items() if is_so(one)}


def _has_begun(newcomer: RankStatus) -> bool:
    """Whether the newcomer has joined a round. A newcomer never joins the attempt's first round,
    whose number is 0."""
    return newcomer.generation > 0


def _trains(rank: RankStatus) -> bool:
    """Whether the rank's copy of the state is equal to the copies of the other ranks, and the rank
    has either taken a step in its round or finished."""
    return rank.is_verified and (rank.first_at > 0.0 or rank.phase is RankPhase.FINISH)
