"""The rules by which a round of silos ends: a state machine without I/O or a clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from ray_workers.shared.frames import SiloRoundReport
from ray_workers.training.parallel.federated.rounds import Collection, Next, next_of


@dataclass(frozen=True)
class SiloUpdate:
    """The work of a silo in a round."""

    num_samples: int
    """Number of its training samples."""
    num_steps: int
    update: Tensor
    """float32 (elements,)."""
    metrics: Mapping[str, float]
    """The metrics that the silo may send, by the names that a job uses for its own."""
    is_refused: bool = False
    """Whether the update would spoil the mean."""


class RoundCollector:
    """Accepts one update of each silo in each round.

    A round ends by the rules of `next_of`; once there are `least` updates, it does not wait for
    lost silos. A silo is awaited from the beginning of the training until it is lost, and again
    once it has returned.
    """

    def __init__(self, num_silos: int, least: int, deadline_s: float | None) -> None:
        self._all = frozenset(range(num_silos))
        self._least = least
        self._deadline_s = math.inf if deadline_s is None else deadline_s
        self._awaited = set(range(num_silos))
        self._ends_at = math.inf
        self.number: int | None = None
        """The open round."""
        self.updates: dict[int, SiloUpdate] = {}
        """The updates of the newest round, by silo."""

    def begin(self, number: int, now: float) -> None:
        """Open a round."""
        self.number, self.updates = number, {}
        self._ends_at = now + self._deadline_s

    def join(self, silo: int) -> None:
        """Record that a silo has come, or its replacement."""
        self._awaited.add(silo)

    def lost(self, silo: int) -> None:
        """Record that a silo is gone; an update that it has sent counts."""
        self._awaited.discard(silo)

    def wants(self, silo: int) -> int | None:
        """The round for which the silo must send an update now; None if there is none."""
        return None if silo in self.updates else self.number

    def take(self, silo: int, number: int, update: SiloUpdate) -> bool:
        """Add an update, and return whether it counts: the silo's first one in the open round."""
        if number != self.number or silo in self.updates:
            return False
        self.updates[silo] = update
        return True

    @property
    def num_late(self) -> int:
        """Number of connected silos that have not sent their update."""
        return len(self._awaited - self.updates.keys())

    def wait_s(self, now: float) -> float:
        """Seconds for which the round may continue if nothing happens; 0 if it is over."""
        refused = {silo for silo, sent in self.updates.items() if sent.is_refused}
        accepted = self.updates.keys() - refused
        is_enough = len(accepted) >= self._least
        asked = self._awaited if is_enough else self._all
        state = Collection(asked, True, self._least, accepted, refused)
        if next_of(state, is_late=now >= self._ends_at) is Next.END:
            return 0.0
        return self._ends_at - now if is_enough else math.inf

    def state(self, now: float) -> SiloRoundReport:
        """The open round, and the silos that have not answered in it."""
        assert self.number is not None
        missing = sorted(self._all - self.updates.keys())
        ends_in_s = None if math.isinf(self._ends_at) else max(0.0, self._ends_at - now)
        return SiloRoundReport(self.number, missing, self._least, ends_in_s)

    def end(self) -> dict[int, SiloUpdate]:
        """Close the round, and return its updates, sorted by silo."""
        self.number = None
        return dict(sorted(self.updates.items()))


NOTICE_S: Final = 5.0
"""A shorter round is not reported, and a longer one at intervals of at least this many seconds."""


class RoundNotices:
    """Reports a round that is open for long, so that users see which silos the job waits for: the
    round, then the silos that have answered since, and its end."""

    def __init__(self, report: Callable[[SiloRoundReport], object]) -> None:
        self._report = report
        self._reported: SiloRoundReport | None = None
        """The newest report of the open round."""
        self._not_before = math.inf

    def begin(self, now: float) -> None:
        """Record that a round opens."""
        self._not_before = now + NOTICE_S

    def look(self, found: SiloRoundReport, now: float) -> None:
        """found: the current state of the open round."""
        is_news = self._reported is None or found.missing != self._reported.missing
        if is_news and now >= self._not_before:
            self._report(found)
            self._reported, self._not_before = found, now + NOTICE_S

    def end(self) -> None:
        """Report the end of a round that was reported."""
        if self._reported is not None:
            self._report(replace(self._reported, missing=[]))
            self._reported = None
