"""Finding out that a group hangs, and which rank is to blame: pure, without ray or torch.

A rank that waits for another one looks as still as the one that it waits for. But the waiting rank
is further on: it has entered the collective that the other has not come to. So of the ranks that
stand still, the one that is furthest behind is to blame; where all are at the same place, the one
whose process is stopped.

How long is too long is learned from the job's own steps, since an eternity for one job is a step of
another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ray_workers.shared.contracts import Cause, Outcome
from ray_workers.shared.frames import HangReport, RankWhereabouts
from ray_workers.shared.heartbeat import RankObservation, RankPhase
from ray_workers.supervision.rules.timings import Timings

FACTOR = 10.0
"""A rank hangs when it has been in a phase for so many times a slow step's time."""
REMEMBERED = 100
"""Observations of a step, of which the slowest counts."""

PATIENCE = 10.0
"""A group that does not recover in place, and ranks that are all at the same place, get so many
times as long: a false alarm would cost the way back to the checkpoint, again and again if that is
simply how long it takes."""

STOPPED = ("T", "t")

_PLACE_IN_STEP = {
    RankPhase.EVALUATE: 0,
    RankPhase.SAVE: 1,
    RankPhase.DATA: 2,
    RankPhase.COMPUTE: 3,
    RankPhase.EXCHANGE: 4,
    RankPhase.UPDATE: 5,
    RankPhase.FINISH: 6,
}
"""In the order in which they come once a step is committed."""


@dataclass(frozen=True)
class Hang:
    """The group stands still."""

    culprits: tuple[RankObservation, ...]
    """The ranks to blame; empty if all ranks are at the same place, and none of them is stopped."""
    waited_s: float
    limit_s: float

    def outcome(self, phase: str, cause: Cause) -> Outcome:
        """Of a group that resumes from its checkpoint, since the culprits were ended."""
        ranks = [observation.rank for observation in self.culprits]
        who = f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
        verb = "was" if len(ranks) == 1 else "were"
        message = f"{who} stood still for {self.waited_s:.1f} s in {phase}, and {verb} ended"
        return Outcome.of(cause, message, ranks[0])


@dataclass(frozen=True)
class StepTimes:
    """How long the steps of a job take, as far as they were observed."""

    slow_s: tuple[float, ...] = ()
    last: tuple[int, int, float] | None = None
    """(round, step, time) of the last observation of another step."""

    @property
    def slowest_s(self) -> float:
        return max(self.slow_s, default=0.0)

    def after(
        self, observations: Sequence[RankObservation], now: float, *, at_own_pace: bool = False
    ) -> StepTimes:
        """With another observation of the group. now: seconds at the machines' usual pace.
        at_own_pace: a slow rank may pass several steps with one share, whose time counts."""
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
    """How long a rank may keep other ranks waiting."""

    timings: Timings
    patience: float = 1.0
    """How many times as long as elsewhere a rank may always be in a phase."""
    slowest_step_s: float = 0.0
    slowness: float = 1.0
    """How many times slower than usual the machines are."""

    def limit_s(self, observation: RankObservation) -> float:
        """By what this rank does."""
        status = observation.status
        least_s = self.timings.hang_s[status.phase]
        if status.step == status.resumed_step:
            least_s = max(least_s, self.timings.first_step_hang_s)
        return self.slowness * max(least_s * self.patience, FACTOR * self.slowest_step_s)


def find_hang(
    observations: Sequence[RankObservation], limits: HangLimits, *, are_last: bool = False
) -> Hang | None:
    """The hang that the ranks' newest processes show. are_last: others are through.

    None while a rank joins or waits for a place: that group is not whole, and recovery's to judge.
    """
    stopped_s = limits.timings.stopped_hang_s
    stopped = [one for one in observations if one.state == "T" and one.age_s > stopped_s]
    if stopped:
        return Hang(tuple(stopped), min(one.age_s for one in stopped), stopped_s)
    if not _is_training(observations):
        return None
    culprits = behind = _furthest_behind(observations)
    if are_last:
        limits = replace(limits, patience=PATIENCE)  # it may be committing a checkpoint
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
    """Ranks that hang in an older round than the one in which they have a place.

    Now and then an operation does not notice that its connection broke (seen once in some 500
    kills: gloo waits on), so neither the loss of a peer nor cutting the connection ends it. And a
    rank that still connects to one that died before it had connected has no connection to cut.
    """
    forming_s = limits.slowness * limits.timings.forming_hang_s
    forming = [one for one in observations if one.status.phase is RankPhase.FORMING]
    if len(forming) == len(observations):
        forming = []  # they may be on their way into the newest round
    behind = [
        one
        for one in observations
        if one.status.generation < round_number
        and one.status.phase in _PLACE_IN_STEP
        and one.age_s > limits.limit_s(one)
    ]
    limit_s = max(map(limits.limit_s, behind), default=forming_s)
    behind += [one for one in forming if one.age_s > forming_s]
    if not behind:
        return None
    return Hang(tuple(behind), min(one.age_s for one in behind), limit_s)


@dataclass(frozen=True)
class Suspicion:
    """Since when the same ranks have been observed to hang at the same places."""

    places: tuple[tuple[int, int, float], ...] = ()
    since: float = 0.0

    def after(self, hang: Hang, everyone: Sequence[RankObservation], now: float) -> Suspicion:
        """With another hang that was found."""
        blamed = hang.culprits or everyone
        places = tuple((one.rank, one.incarnation, one.status.since) for one in blamed)
        return self if places == self.places else Suspicion(places, now)


def hang_report(
    hang: Hang, observations: Sequence[RankObservation], stacks: Mapping[int, str]
) -> HangReport:
    """Which ranks are to blame for a hang, and where every rank was."""
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
    """Whether every rank is in the training loop, and all in the same round."""
    trains = all(one.status.phase in _PLACE_IN_STEP for one in observations)
    return trains and len({one.status.generation for one in observations}) == 1


def _furthest_behind(observations: Sequence[RankObservation]) -> list[RankObservation]:
    def place(observation: RankObservation) -> tuple[int, int, int]:
        status = observation.status
        # The collective comes first: ranks that step by themselves agree after their update.
        return status.step, status.collective, _PLACE_IN_STEP[status.phase]

    least = min(map(place, observations))
    return [one for one in observations if place(one) == least]
