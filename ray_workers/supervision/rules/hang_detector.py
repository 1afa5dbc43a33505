"""Detects whether a group hangs, and which ranks cause the hang. The module is pure, and imports
neither Ray nor torch.

When a rank hangs, the ranks that wait for it make no progress either. However, a waiting rank is
further ahead than the hanging rank: it has entered a collective that the hanging rank has not
reached. Therefore, the hang is caused by the ranks that are furthest behind or, if all ranks are at
the same point, by a rank whose process is suspended.

The limits depend on the job's step times, because one step of a job can take as long as a thousand
steps of another job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ray_workers.shared.contracts import Cause, Outcome
from ray_workers.shared.heartbeat import RankObservation, RankPhase
from ray_workers.shared.supervisor_frames import HangReport, RankWhereabouts
from ray_workers.supervision.rules.timings import Timings

FACTOR = 10.0
"""A rank counts as hanging when it has been in the same phase for this many times the duration of
the slowest step."""
REMEMBERED = 100
"""Number of recent steps from which the slowest step is determined."""

PATIENCE = 10.0
"""Factor by which the limits are extended for groups that do not recover in place, and for ranks
that are all at the same point. In these cases, each false alarm would restart the job from its
checkpoint. If a phase always took this long, the job would be restarted repeatedly."""

STOPPED = ("T", "t")

_PHASE_ORDER = {
    RankPhase.EVALUATE: 0,
    RankPhase.SAVE: 1,
    RankPhase.DATA: 2,
    RankPhase.COMPUTE: 3,
    RankPhase.EXCHANGE: 4,
    RankPhase.UPDATE: 5,
    RankPhase.FINISH: 6,
}
"""The order of the phases after a committed step."""


@dataclass(frozen=True)
class Hang:
    """A hang of a group."""

    culprits: tuple[RankObservation, ...]
    """The ranks that cause the hang. Empty if all ranks are at the same point and no process is
    suspended."""
    waited_s: float
    limit_s: float

    def outcome(self, phase: str, cause: Cause) -> Outcome:
        """Return the outcome of an attempt that ends because these ranks were killed. The next
        attempt resumes from the checkpoint."""
        ranks = [observation.rank for observation in self.culprits]
        who = f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
        verb = "was" if len(ranks) == 1 else "were"
        message = f"{who} made no progress for {self.waited_s:.1f} s in {phase}, and {verb} killed"
        return Outcome.of(cause, message, ranks[0])


@dataclass(frozen=True)
class StepTimes:
    """The observed step times of a job."""

    slow_s: tuple[float, ...] = ()
    last: tuple[int, int, float] | None = None
    """(round, step, time) of the last observation of a new step."""

    @property
    def slowest_s(self) -> float:
        return max(self.slow_s, default=0.0)

    def after(
        self, observations: Sequence[RankObservation], now: float, *, at_own_pace: bool = False
    ) -> StepTimes:
        """Return the step times, updated with another observation. `now` is a time from
        `MachineSpeed.time`. `at_own_pace` is true if a slow rank may skip step numbers, so that
        the time between two observed numbers counts as the time of one step."""
        if not _is_training(observations):
            return replace(self, last=None)
        number = observations[0].status.generation
        step = min(observation.status.step for observation in observations)
        if self.last is None or self.last[0] != number or step < self.last[1]:
            return replace(self, last=(number, step, now))
        if step == self.last[1]:
            return self
        took_s = (now - self.last[2]) / (1 if at_own_pace else step - self.last[1])
        return StepTimes((*self.slow_s, took_s)[-REMEMBERED:], (number, step, now))


@dataclass(frozen=True)
class HangLimits:
    """Limits on how long a rank can keep other ranks waiting."""

    timings: Timings
    patience: float = 1.0
    """Factor by which the minimum limit of each phase is extended."""
    slowest_step_s: float = 0.0
    slowness: float = 1.0
    """How many times slower than usual the machines are."""

    def limit_s(self, observation: RankObservation) -> float:
        """Return the time limit for the rank's current phase."""
        status = observation.status
        least_s = self.timings.hang_s[status.phase]
        if status.step == status.resumed_step:
            least_s = max(least_s, self.timings.first_step_hang_s)
        return self.slowness * max(least_s * self.patience, FACTOR * self.slowest_step_s)


def find_hang(
    observations: Sequence[RankObservation], limits: HangLimits, *, are_last: bool = False
) -> Hang | None:
    """Return a `Hang` if the ranks' latest processes are hanging. `are_last` is true if other
    ranks have finished.

    Returns None while a rank is joining or waiting for a round, because the recovery handles such
    ranks.
    """
    stopped_s = limits.timings.stopped_hang_s
    stopped = [one for one in observations if one.state == "T" and one.age_s > stopped_s]
    if stopped:
        return Hang(tuple(stopped), min(one.age_s for one in stopped), stopped_s)
    if not _is_training(observations):
        return None
    culprits = behind = _furthest_behind(observations)
    if are_last:
        limits = replace(limits, patience=PATIENCE)  # the ranks might be committing a checkpoint
    elif len(behind) == len(observations):
        stopped = [one for one in behind if one.state in STOPPED]
        limits = limits if stopped else replace(limits, patience=PATIENCE)
        culprits = behind if len(observations) == 1 else stopped
    if any(one.age_s <= limits.limit_s(one) for one in behind):
        return None
    waited_s = min(one.age_s for one in observations)
    return Hang(tuple(culprits), waited_s, max(map(limits.limit_s, behind)))


def find_left_behind(
    observations: Sequence[RankObservation], round_number: int, limits: HangLimits
) -> Hang | None:
    """Return the hang of the ranks that have not joined the latest round to which they are
    assigned.

    In rare cases (about once in 500 kills), gloo does not notice that a connection broke. The
    operation then continues to wait, although the peer is lost and the connection has been cut.
    Also, a rank that is still trying to connect to a peer that has died has no connection that
    could be cut.
    """
    forming_s = limits.slowness * limits.timings.forming_hang_s
    forming = [one for one in observations if one.status.phase is RankPhase.FORMING]
    if len(forming) == len(observations):
        forming = []  # ranks that might be joining the latest round
    behind = [
        one
        for one in observations
        if one.status.generation < round_number
        and one.status.phase in _PHASE_ORDER
        and one.age_s > limits.limit_s(one)
    ]
    limit_s = max(map(limits.limit_s, behind), default=forming_s)
    behind += [one for one in forming if one.age_s > forming_s]
    if not behind:
        return None
    return Hang(tuple(behind), min(one.age_s for one in behind), limit_s)


@dataclass(frozen=True)
class Suspicion:
    """Ranks that seem to hang, and the time at which they were first suspected."""

    suspects: tuple[tuple[int, int, float], ...] = ()
    since: float = 0.0

    def after(self, hang: Hang, everyone: Sequence[RankObservation], now: float) -> Suspicion:
        """Return the suspicion, updated with another observation of a hang."""
        blamed = hang.culprits or everyone
        suspects = tuple((one.rank, one.incarnation, one.status.since) for one in blamed)
        return self if suspects == self.suspects else Suspicion(suspects, now)


def hang_report(
    hang: Hang, observations: Sequence[RankObservation], stacks: Mapping[int, str]
) -> HangReport:
    """Return the report of a hang, with the ranks that cause the hang, and the phase and stack of
    every rank."""
    blamed = hang.culprits or tuple(observations)
    return HangReport(
        culprits=[one.rank for one in hang.culprits],
        step=min(one.status.step for one in blamed),
        phase=blamed[0].status.phase.name.lower(),
        waited_s=hang.waited_s,
        limit_s=hang.limit_s,
        ranks=[
            RankWhereabouts(
                rank=one.rank,
                step=one.status.step,
                phase=one.status.phase.name.lower(),
                collective=one.status.collective,
                since_s=one.age_s,
                stack=stacks.get(one.rank, ""),
            )
            for one in observations
        ],
    )


def _is_training(observations: Sequence[RankObservation]) -> bool:
    """Whether all ranks are in the training loop and in the same round."""
    trains = all(one.status.phase in _PHASE_ORDER for one in observations)
    return trains and len({one.status.generation for one in observations}) == 1


def _furthest_behind(observations: Sequence[RankObservation]) -> list[RankObservation]:
    def progress(observation: RankObservation) -> tuple[int, int, int]:
        status = observation.status
        # The number of collectives takes precedence over the phase, because some ranks communicate
        # only after they update the model.
        return status.step, status.collective, _PHASE_ORDER[status.phase]

    least = min(map(progress, observations))
    return [one for one in observations if progress(one) == least]
