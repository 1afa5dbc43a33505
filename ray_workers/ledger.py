"""What an attempt's slots were used for, second by second: pure, without ray or torch.

The training processes book most of it themselves, on their pages. What no process accounts for is
booked by what the attempt was at: starting, recovering, or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ray_workers.pages import USES, Sight, Use


class Ledger:
    """Of one attempt. The classes add up to the slot-seconds that it held."""

    def __init__(self) -> None:
        self._unaccounted = dict.fromkeys(USES, 0.0)
        self._rest_before = 0.0
        self._num_slots = 0
        self._since = 0.0
        self.held_s = 0.0
        """Slot-seconds held so far."""
        self._seen: dict[tuple[int, int], dict[Use, float]] = {}

    def hold(self, num_slots: int, now: float) -> None:
        """From `now` on, in monotonic seconds, the attempt holds so many slots."""
        self.held_s += self._num_slots * (now - self._since)
        self._num_slots, self._since = num_slots, now

    def look(self, sights: Sequence[Sight], otherwise: Use) -> dict[str, float]:
        """Slot-seconds by class so far.

        sights: every process that the attempt ever had and whose page is still there. otherwise:
        what to book on that no process accounts for.
        """
        for sight in sights:
            self._seen[sight.rank, sight.incarnation] = _booked(sight)
        booked = {use: sum(each[use] for each in self._seen.values()) for use in USES}
        rest = self.held_s - sum(booked.values())
        self._unaccounted[otherwise] += rest - self._rest_before
        self._rest_before = rest
        return {use.value: max(0.0, booked[use] + self._unaccounted[use]) for use in USES}


def _booked(sight: Sight) -> dict[Use, float]:
    """What a process has used, with what goes on now while it lives."""
    uses: Mapping[Use, float] = sight.look.uses
    now = {sight.look.use: sight.age_s} if sight.state else {}
    return {use: uses[use] + now.get(use, 0.0) for use in USES}
