"""Explains the order of the waiting jobs: the factors of a job's rank, and why the jobs ahead of it
come first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from service.domain.scheduling.placement.gangs import SIZE_POWER, Gang
from service.domain.scheduling.placement.phrases import workers
from service.domain.scheduling.policy import Snapshot, WaitingJob
from service.domain.scheduling.policy.ordering import in_order
from service.domain.scheduling.rules.order import LONGEST_WAIT_S, SETTLING_S, Rank
from service.domain.scheduling.rules.shares import Tier, UserStanding

TIERS = {
    Tier.QUOTA: "within its queue's quota",
    Tier.SHARE: "its queue has used at most its share",
    Tier.AHEAD: "its queue has used more than its share",
}
IN_TREE = {
    Tier.QUOTA: "within the quota of the queue {!r}",
    Tier.SHARE: "the queue {!r} has used at most its share",
    Tier.AHEAD: "the queue {!r} has used more than its share",
}
STANDINGS = {
    UserStanding.BEHIND: "its owner has used less than their share",
    UserStanding.EVEN: "its owner has used about their share",
    UserStanding.AHEAD: "its owner has used more than their share",
}


@dataclass(frozen=True)
class RankFactor:
    """A part of a job's rank. The parts are compared one after another."""

    name: str
    value: float | None
    """None if the part is not compared."""
    message: str


@dataclass(frozen=True)
class Precedence:
    """A job that comes before another job, and the factor that decides between them."""

    job_id: str
    decided_by: str
    message: str


@dataclass(frozen=True)
class _Place:
    """A waiting job and its rank."""

    job: WaitingJob
    rank: Rank
    as_job: WaitingJob
    """The job whose rank this job has: itself, or the first job that it passes if it was moved to
    the front."""
    gang: Gang
    """The gang of `as_job`."""
    is_forgiven: bool
    """Whether `as_job` ranks as if its owner were behind, because it has waited for 7 days."""

    @property
    def is_adopted(self) -> bool:
        return self.as_job is not self.job


class Factors:
    """The factors of the jobs of a snapshot, in the order in which a plan considers these jobs."""

    def __init__(self, snapshot: Snapshot, now: datetime) -> None:
        order = in_order(snapshot, now, lambda job_id, error: None)
        jobs = order.snapshot.queue
        by_seq = {(job.queue, job.seq): at for at, job in enumerate(jobs)}
        self._places: list[_Place] = []
        for at in order.queue:
            job, rank = jobs[at], order.ranks[at]
            leader = at if rank == order.own_ranks[at] else by_seq.get((job.queue, rank.seq), at)
            as_job, gang = jobs[leader], order.of_queue[leader]
            is_forgiven = order.ranking.is_forgiven(as_job.job_id)
            self._places.append(_Place(job, rank, as_job, gang, is_forgiven))
        self._positions = {place.job.job_id: at for at, place in enumerate(self._places)}

    def __contains__(self, job_id: str) -> bool:
        """Whether the job has a position: it waits, and is not held."""
        return job_id in self._positions

    def num_ahead(self, job_id: str) -> int:
        return self._positions[job_id]

    def of(self, job_id: str) -> list[RankFactor]:
        """Return the factors of a job, in the order in which they are compared."""
        place = self._places[self._positions[job_id]]
        rank, job = place.rank, place.job
        moved = "not moved to the front"
        if place.is_adopted:
            moved = (
                f"moved to the front, so its other factors are the factors of {place.as_job.job_id}"
            )
        elif job.place:
            moved = "moved to the front, but it passes no job"
        return [
            *(RankFactor("tier", tier, message) for tier, message in _tiers(rank)),
            RankFactor("priority", rank.priority, f"priority {rank.priority}"),
            RankFactor("standing", rank.user, _standing(place)),
            RankFactor("usage", rank.of_share, _usage(place)),
            RankFactor("overdue", int(rank.is_overdue), _overdue(place)),
            RankFactor("work", None if rank.is_overdue else rank.work, _work(place)),
            RankFactor("submission", rank.seq, f"submitted as number {rank.seq}"),
            RankFactor("front", job.place, moved),
        ]

    def ahead(self, job_id: str, most: int) -> list[Precedence]:
        """Return the nearest jobs ahead of a job, in the order of the queue, and the factor that
        decides between each of them and the job."""
        at = self._positions[job_id]
        this = self._places[at]
        return [_compared(other, this) for other in self._places[max(0, at - most) : at]]

    def in_order(self) -> Sequence[str]:
        return list(self._positions)


def _compared(other: _Place, this: _Place) -> Precedence:
    a, b = other.rank, this.rank
    if a.tiers != b.tiers:
        at = next(at for at, tier in enumerate(a.tiers) if tier != b.tiers[at])
        name, message = "tier", _both(_tier(a, at), _tier(b, at))
    elif a.priority != b.priority:
        name, message = "priority", f"priority {a.priority} > {b.priority}"
    elif a.user != b.user:
        name, message = "standing", _both(_standing(other), _standing(this))
    elif a.of_share != b.of_share:
        name, message = "usage", _both(_usage(other), _usage(this))
    elif a.is_overdue != b.is_overdue:
        name, message = "overdue", _both(_overdue(other), _overdue(this))
    elif a.work != b.work:
        work = f"work {_number(a.work)} < {_number(b.work)}"
        name, message = "work", f"{_left(other)} < {_left(this)} ({work})"
    elif a.seq != b.seq:
        name, message = "submission", f"submitted earlier (number {a.seq} < {b.seq})"
    elif a.place != b.place:
        name, message = "front", "moved to the front"
    else:
        numbers = f"number {other.job.seq} < {this.job.seq}"
        name, message = (
            "submission",
            f"both jobs were moved to the front; the job ahead was submitted earlier ({numbers})",
        )
    if name != "front" and other.is_adopted and other.as_job is not this.as_job:
        message += (
            f"; the job ahead was moved to the front, and has the rank of {other.as_job.job_id}"
        )
    return Precedence(other.job.job_id, name, message)


def _tiers(rank: Rank) -> list[tuple[Tier, str]]:
    """Return the tiers of the queues on the job's path, from the top of the tree."""
    return [(rank.tiers[at], _tier(rank, at)) for at in range(max(1, len(rank.path)))]


def _tier(rank: Rank, at: int) -> str:
    """Return what a tier means, with the name of the queue if there is a tree of queues."""
    if len(rank.tiers) == 1:
        return TIERS[rank.tiers[0]]
    return IN_TREE[rank.tiers[at]].format(rank.path[min(at, len(rank.path) - 1)])


def _both(other: str, this: str) -> str:
    return f"{other}; this job: {this}"


def _standing(place: _Place) -> str:
    if place.is_forgiven:
        waited = f"waited for {_duration(place.as_job.waited_s)}"
        return f"{waited}, so it ranks as if its owner had used less than their share"
    return STANDINGS[place.rank.user]


def _usage(place: _Place) -> str:
    if place.is_forgiven:
        return "ranks as if its owner had used nothing"
    if place.rank.user is UserStanding.EVEN:
        return "not compared, because its owner has used about their share"
    return f"its owner has used {100 * place.rank.of_share:.4g}% of their share"


def _overdue(place: _Place) -> str:
    waited_s = max(0.0, place.as_job.waited_s)
    if place.rank.is_overdue:
        return f"overdue, with the longest wait ({_duration(waited_s)})"
    waited = f"not overdue: waited for {_duration(waited_s)}"
    if waited_s <= LONGEST_WAIT_S:
        return waited
    return (
        f"{waited}, but only the longest-waiting job that is not blocked by a limit counts as "
        "overdue"
    )


def _work(place: _Place) -> str:
    if place.rank.is_overdue:
        return "not compared, because the job is overdue"
    left_s = _left_s(place.as_job)
    if left_s is None:
        return f"{_left(place)}, so the work counts as 0"
    share = place.gang.share
    seconds = f"({_number(left_s)} + {SETTLING_S:g}) s"
    return (
        f"{_left(place)}, {share:.3g} of the cluster: "
        f"{seconds} * {share:.3g}^{SIZE_POWER:g} = {_number(place.rank.work)}"
    )


def _left(place: _Place) -> str:
    job, gang = place.as_job, place.gang
    slots = f"{workers(gang.request.num_workers)} of {gang.bundle_spoken}"
    if gang.request.roles:
        slots = gang.needs.removeprefix("needs ")
    left_s = _left_s(job)
    if left_s is None:
        return f"unknown time left with {slots}"
    return f"{'about ' if job.left_s is None else ''}{_duration(left_s)} left with {slots}"


def _left_s(job: WaitingJob) -> float | None:
    return job.guess_s if job.left_s is None else job.left_s


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    for unit_s, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:,.4g} {unit}"
    return f"{seconds:.0f} s"
