"""The baselines: EASY backfill in three orders, and preemptive policies."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from benchmarks.scheduler.generated.simulator import SimulatedJob
from benchmarks.scheduler.generated.workloads import DAY_S, LONGEST_S

Decision = tuple[list[SimulatedJob], list[SimulatedJob]]


class Easy:
    """EASY backfill (Lifka 1995): the first job that does not fit reserves GPUs for the time when
    enough jobs must have ended, and later jobs start if they don't delay it. Nothing is preempted.
    """

    def __init__(self, num_gpus: int) -> None:
        self.num_gpus = num_gpus

    def key(self, one: SimulatedJob, now: float) -> tuple[float, ...]:
        return (one.seq,)

    def bound_s(self, one: SimulatedJob) -> float:
        """Return the assumed time from the start of a job to its end."""
        return one.job.limit_s or LONGEST_S

    def ended(self, one: SimulatedJob, now: float) -> None:
        pass

    def decide(
        self, waiting: Sequence[SimulatedJob], running: Sequence[SimulatedJob], now: float
    ) -> Decision:
        free = self.num_gpus - sum(one.job.num_gpus for one in running)
        ends = [
            (max(now, (one.began_s or 0.0) + self.bound_s(one)), one.job.num_gpus)
            for one in running
        ]
        starts: list[SimulatedJob] = []
        shadow_s, extra = math.inf, 0
        for one in sorted(waiting, key=lambda each: self.key(each, now)):
            size = one.job.num_gpus
            if size > free:
                if shadow_s == math.inf:
                    shadow_s, extra = self._shadow(size, free, ends)
                if not free:
                    break
                continue
            ends_s = now + self.bound_s(one)
            if shadow_s < math.inf and ends_s > shadow_s:
                if size > extra:
                    continue
                extra -= size
            free -= size
            starts.append(one)
            ends.append((ends_s, size))
        return starts, []

    @staticmethod
    def _shadow(size: int, free: int, ends: Sequence[tuple[float, int]]) -> tuple[float, int]:
        """Return when `size` GPUs will be free, and how many more will be."""
        for at, number in sorted(ends):
            free += number
            if free >= size:
                return at, free - size
        raise AssertionError("the job does not fit the cluster")


class FairEasy(Easy):
    """EASY in the order of Slurm's multifactor priority: 2^(-usage / share) with a half-life of a
    week, and a tenth of that weight for the age, up to a week."""

    HALF_LIFE_S = 7 * DAY_S

    def __init__(self, num_gpus: int, weights: Mapping[str, float]) -> None:
        """weights: the weight of each user."""
        super().__init__(num_gpus)
        self._shares = {user: each / sum(weights.values()) for user, each in weights.items()}
        self._used: defaultdict[str, float] = defaultdict(float)
        self._at = 0.0
        self._counted: dict[int, float] = {}

    def decide(
        self, waiting: Sequence[SimulatedJob], running: Sequence[SimulatedJob], now: float
    ) -> Decision:
        decay = 0.5 ** ((now - self._at) / self.HALF_LIFE_S)
        for user in self._used:
            self._used[user] *= decay
        for one in running:
            self._count(one, now)
        self._at = now
        whole = sum(self._used.values()) or 1.0
        self._factor = {
            user: 2 ** -(used / whole / self._shares[user]) for user, used in self._used.items()
        }
        return super().decide(waiting, running, now)

    def _count(self, one: SimulatedJob, now: float) -> None:
        since = self._counted.get(one.seq, one.began_s or 0.0)
        self._used[one.job.user] += one.job.num_gpus * max(0.0, now - since)
        self._counted[one.seq] = now

    def ended(self, one: SimulatedJob, now: float) -> None:
        self._count(one, now)

    def key(self, one: SimulatedJob, now: float) -> tuple[float, ...]:
        age = min(1.0, (now - one.job.submitted_s) / (7 * DAY_S))
        return (-(10 * self._factor.get(one.job.user, 1.0) + age), one.seq)


class ShortestEasy(Easy):
    """EASY with an oracle: the shortest job first, with exact bounds."""

    def key(self, one: SimulatedJob, now: float) -> tuple[float, ...]:
        return (one.job.runs_s, one.seq)

    def bound_s(self, one: SimulatedJob) -> float:
        return one.job.runs_s + one.job.restart_s


class Preemptive:
    """Runs the jobs that come first in an order, and preempts others that save their state. If a
    job does not fit, jobs behind it can start."""

    MIN_RUN_S = 300.0

    def __init__(self, num_gpus: int, order: Callable[[SimulatedJob, float], float]) -> None:
        self.num_gpus = num_gpus
        self._order = order

    def ended(self, one: SimulatedJob, now: float) -> None:
        pass

    def decide(
        self, waiting: Sequence[SimulatedJob], running: Sequence[SimulatedJob], now: float
    ) -> Decision:
        def stays(one: SimulatedJob) -> bool:
            return not one.job.saves or one.is_leaving or one.held_s(now) < self.MIN_RUN_S

        kept = [one for one in running if stays(one)]
        left = self.num_gpus - sum(one.job.num_gpus for one in kept)
        free = self.num_gpus - sum(one.job.num_gpus for one in running)
        movable = [one for one in running if not stays(one)]
        chosen: list[SimulatedJob] = []
        for one in sorted(
            (*waiting, *movable), key=lambda each: (self._order(each, now), each.seq)
        ):
            if one.job.num_gpus <= left:
                left -= one.job.num_gpus
                chosen.append(one)
        starts: list[SimulatedJob] = []
        for one in chosen:
            if one.began_s is None and one.job.num_gpus <= free:
                free -= one.job.num_gpus
                starts.append(one)
        wanted = {id(one) for one in chosen}
        is_short = any(one.began_s is None for one in chosen if one not in starts)
        return starts, [one for one in movable if id(one) not in wanted] if is_short else []


def attained(one: SimulatedJob, now: float) -> float:
    """Order for least attained service, in two classes as in Tiresias (Gu et al., NSDI 2019)."""
    return float(one.job.num_gpus * one.trained_s(now) > 3600.0)


def remaining(one: SimulatedJob, now: float) -> float:
    """Order by the work that is left, known to an oracle."""
    return (one.job.runs_s - one.trained_s(now)) * one.job.num_gpus
