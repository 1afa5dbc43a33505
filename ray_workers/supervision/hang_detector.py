"""Finding out that a group hangs, and who is to blame: pure, without ray or torch.

A rank that waits for another one looks as still as the one that it waits for. But it stands
further on: it has entered the collective that the other has not come to. So of the ranks that stand
still, the one that is furthest behind is to blame; where all stand at the same place, the one whose
process is stopped.

How long is too long is learned from the job's own steps, since what is an eternity for one job is
a step of another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ray_workers.shared.heartbeat import RankObservation, RankPhase

FACTOR = 10.0
"""A rank hangs when it has been at one thing for so many times a slow step's time."""
REMEMBERED = 100
"""Looks that showed a step, of which the slowest counts."""

LEAST_S = {
    RankPhase.DATA: 20.0,
    RankPhase.COMPUTE: 4.0,
    RankPhase.EXCHANGE: 4.0,
    RankPhase.UPDATE: 4.0,
    RankPhase.EVALUATE: 60.0,
    RankPhase.SAVE: 120.0,
    RankPhase.FINISH: 300.0,
}
"""What is never too long: a machine may be busy, a store far away, a disk slow."""
FIRST_STEP_LEAST_S = 60.0
"""Before the first step of a group is done: kernels are chosen, buffers made."""

PATIENCE = 10.0
"""A group that does not recover in place, and ranks that all stand at the same place, are given so
many times as long: a false alarm would cost the way back to the checkpoint, again and again if that
is simply how long it takes."""

SURE_S = 1.0
"""For how long whoever is to blame must have been seen to stand still: when the whole machine was
stopped for a while, all ranks look as still, until they are let go on."""

STOPPED = ("T", "t")
STOPPED_S = 5.0
"""How long a process may be at one thing when it is seen to be stopped, whatever that thing is."""

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
    """Who is to blame; empty if all stand at the same place, and none of them is stopped."""
    waited_s: float
    limit_s: float


class HangDetector:
    """Looks at a group again and again, and knows how long its steps take."""

    def __init__(self, patience: float = 1.0) -> None:
        """patience: by how much what is never too long is longer than elsewhere."""
        self._patience = patience
        self.slowness = 1.0
        """How many times slower than usual the machines are now: so much longer is nothing too
        long."""
        self._slow_s: deque[float] = deque(maxlen=REMEMBERED)
        self._last: tuple[int, int, float] | None = None

    def look(self, observations: Sequence[RankObservation], now: float) -> Hang | None:
        """What the ranks' newest processes show at `now`, in seconds at the machines' usual pace.

        None while anybody joins or waits for a place: the group is not whole, and others see to it.
        """
        stopped = [s for s in observations if s.state == "T" and s.age_s > STOPPED_S]
        if stopped:
            return Hang(tuple(stopped), min(s.age_s for s in stopped), STOPPED_S)
        trains = all(observation.status.phase in _PLACE_IN_STEP for observation in observations)
        if (
            not observations
            or not trains
            or len({observation.status.generation for observation in observations}) > 1
        ):
            self._last = None
            return None
        self._learn(
            min(observation.status.step for observation in observations),
            observations[0].status.generation,
            now,
        )
        culprits = behind = _furthest_behind(observations)
        patience = self._patience
        if len(behind) == len(observations):
            stopped = [observation for observation in behind if observation.state in STOPPED]
            patience = patience if stopped else PATIENCE
            culprits = behind if len(observations) == 1 else stopped
        limits = [self._limit_s(observation, patience) for observation in behind]
        if any(s.age_s <= limit for s, limit in zip(behind, limits, strict=True)):
            return None
        return Hang(
            tuple(culprits), min(observation.age_s for observation in observations), max(limits)
        )

    def left_behind(self, observations: Sequence[RankObservation], generation: int) -> Hang | None:
        """Ranks that hang in an older generation of the group than the one they are wanted in.

        Seldom an operation is not told that its connection broke (seen once in some 500 kills: gloo
        waits on), so neither the loss of a peer nor cutting the connection ends it.
        """
        behind = [
            observation
            for observation in observations
            if observation.status.generation < generation
            and observation.status.phase in _PLACE_IN_STEP
            and observation.age_s > self.limit_s(observation)
        ]
        if not behind:
            return None
        limit_s = max(map(self.limit_s, behind))
        return Hang(tuple(behind), min(observation.age_s for observation in behind), limit_s)

    def limit_s(self, observation: RankObservation) -> float:
        """How long this rank may keep others waiting by what it does, in seconds."""
        return self._limit_s(observation, self._patience)

    def _limit_s(self, observation: RankObservation, patience: float) -> float:
        least = LEAST_S[observation.status.phase]
        if observation.status.step == observation.status.resumed_step:
            least = max(least, FIRST_STEP_LEAST_S)
        return self.slowness * max(least * patience, FACTOR * max(self._slow_s, default=0.0))

    def _learn(self, step: int, generation: int, now: float) -> None:
        """Book the time of the steps that were done since the last look that saw one."""
        if self._last is None or self._last[0] != generation or step < self._last[1]:
            self._last = (generation, step, now)
        elif step > self._last[1]:
            self._slow_s.append((now - self._last[2]) / (step - self._last[1]))
            self._last = (generation, step, now)


class Suspicion:
    """Whoever is to blame is so only when it is seen to stand at the same place for a while."""

    def __init__(self) -> None:
        self._places: list[tuple[int, int, float]] = []
        self._since = 0.0

    def proves(self, hang: Hang, everyone: Sequence[RankObservation], now: float) -> bool:
        """Tell of each hang that is found; whether it is one. now: monotonic seconds."""
        blamed = hang.culprits or everyone
        places = [
            (observation.rank, observation.incarnation, observation.status.since)
            for observation in blamed
        ]
        if places != self._places:
            self._places, self._since = places, now
        return now - self._since >= SURE_S


def _furthest_behind(observations: Sequence[RankObservation]) -> list[RankObservation]:
    def place(observation: RankObservation) -> tuple[int, int, int]:
        look = observation.status
        # The collective comes first: ranks that step by themselves agree after their update.
        return look.step, look.collective, _PLACE_IN_STEP[look.phase]

    least = min(map(place, observations))
    return [observation for observation in observations if place(observation) == least]
