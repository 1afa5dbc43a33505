"""Accounts for every second of an attempt's slots. The module is pure, and imports neither Ray nor
torch.

The training processes account for most of the time themselves, on their heartbeat pages. The
remaining time is classified by what the attempt was doing: starting, recovering, or idling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ray_workers.shared.heartbeat import TIME_CATEGORIES, RankObservation, RankPhase, TimeCategory

Booked = dict[TimeCategory, float]
"""Seconds of a process by category."""


class SlotTimeLedger:
    """Slot-seconds of one attempt by category. The sum over all categories is the number of
    slot-seconds held by the attempt."""

    def __init__(self) -> None:
        self._unaccounted = dict.fromkeys(TIME_CATEGORIES, 0.0)
        self._num_slots = 0
        self._since = 0.0
        self.held_s = 0.0
        """Total slot-seconds held so far."""
        self._seen: dict[tuple[int, int], RankObservation] = {}

    def hold(self, num_slots: int, now: float) -> None:
        """Record that the attempt holds `num_slots` slots, starting at `now` (in monotonic
        seconds)."""
        self.held_s += self._num_slots * (now - self._since)
        self._num_slots, self._since = num_slots, now

    def account(
        self, observations: Sequence[RankObservation], otherwise: TimeCategory
    ) -> dict[str, float]:
        """Return the slot-seconds by category so far.

        `observations` must include all processes of the attempt, past and present, whose pages
        still exist. `otherwise` is the category of time that no process has accounted for.
        """
        self._seen |= {
            (observation.rank, observation.incarnation): observation for observation in observations
        }
        each = _booked(list(self._seen.values()))
        booked = {use: sum(one[use] for one in each) for use in TIME_CATEGORIES}
        rest = max(0.0, self.held_s - sum(booked.values()))
        self._account_rest(rest - sum(self._unaccounted.values()), otherwise)
        return {use.value: booked[use] + self._unaccounted[use] for use in TIME_CATEGORIES}

    def _account_rest(self, seconds: float, otherwise: TimeCategory) -> None:
        """Add seconds that no process has accounted for. A negative number removes seconds that
        were added earlier and that a process has since accounted for."""
        if seconds >= 0.0:
            self._unaccounted[otherwise] += seconds
            return
        for use in (otherwise, *TIME_CATEGORIES):
            removed = min(-seconds, self._unaccounted[use])
            self._unaccounted[use] -= removed
            seconds += removed


def _booked(observations: Sequence[RankObservation]) -> list[Booked]:
    """Return the seconds that each process has used, keyed by category.

    A rank of a script that has not reported a step is assumed to use its time like the rank that
    reported first, because in most scripts one rank reports for all ranks.
    """
    each = [(observation, _of_one(observation)) for observation in observations]
    reported = [booked for observation, booked in each if observation.status.first_at]
    if not reported or not any(booked[TimeCategory.UNREPORTED] for _, booked in each):
        return [booked for _, booked in each]
    first = min(reported, key=lambda booked: booked[TimeCategory.UNREPORTED])
    return [_completed(observation, booked, first) for observation, booked in each]


def _of_one(observation: RankObservation) -> Booked:
    """Return the seconds recorded on the process's page. While the process is alive, the seconds of
    its current use are added."""
    uses: Mapping[TimeCategory, float] = observation.status.uses
    now = {observation.status.use: observation.age_s} if observation.state else {}
    return {use: uses[use] + now.get(use, 0.0) for use in TIME_CATEGORIES}


def _completed(observation: RankObservation, booked: Booked, first: Booked) -> Booked:
    """Return `booked`, with the unreported time divided among the categories in the same way as the
    time of the rank that reported first (`first`). The time of that rank before its first report
    counts as starting."""
    unreported_s = booked[TimeCategory.UNREPORTED]
    was_killed = not observation.state and observation.status.phase is not RankPhase.FINISH
    if was_killed and not observation.status.first_at:  # it never reported how it used its time
        unreported_s += max(0.0, sum(first.values()) - sum(booked.values()))
    starting_s = min(unreported_s, first[TimeCategory.UNREPORTED])
    unknown_s = unreported_s - starting_s
    more = {
        use: max(0.0, first[use] - booked[use])
        for use in TIME_CATEGORIES
        if use not in (TimeCategory.STARTING, TimeCategory.UNREPORTED)
    }
    completed = booked | {
        TimeCategory.STARTING: booked[TimeCategory.STARTING] + starting_s,
        TimeCategory.UNREPORTED: 0.0,
    }
    all_more = sum(more.values())
    if not all_more:
        completed[TimeCategory.STARTING] += unknown_s
        return completed
    return completed | {use: booked[use] + unknown_s * more[use] / all_more for use in more}
