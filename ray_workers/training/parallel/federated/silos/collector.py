"""The rules for when a round of silos ends, as a state machine without I/O or a clock."""

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
    """A silo's contribution to a round."""

    num_samples: int
    """Number of the silo's training samples."""
    num_steps: int
    update: Tensor
    """float32 (elements,)."""
    metrics: Mapping[str, float]
    """Metrics that the silo is allowed to release, keyed by the names of a job's own metrics."""
    is_refused: bool = False
    """Whether the update is refused because it would corrupt the mean."""


class RoundCollector:
    """Accepts one update from each silo in each round.

    A round ends according to the rules of `next_of`. Once `least` updates have arrived, the round
    doesn't wait for lost silos. The collector waits for a silo from the start of training until the
    silo is lost, and again after it has returned.
    """

    def __init__(self, num_silos: int, least: int, deadline_s: float | None) -> None:
        self._all = frozenset(range(num_silos))
        self._least = least
        self._deadline_s = math.inf if deadline_s is None else deadline_s
        self._awaited = set(range(num_silos))
        self._ends_at = math.inf
        self.number: int | None = None
        """The number of the open round; None if no round is open."""
        self.updates: dict[int, SiloUpdate] = {}
        """The updates of the latest round, keyed by silo."""

    def begin(self, number: int, now: float) -> None:
        """Open a round."""
        self.number, self.updates = number, {}
        self._ends_at = now + self._deadline_s

    def join(self, silo: int) -> None:
        """Record that a silo or its replacement has connected."""
        self._awaited.add(silo)

    def lost(self, silo: int) -> None:
        """Record that a silo is lost. An update that the silo has already sent still counts."""
        self._awaited.discard(silo)

    def wants(self, silo: int) -> int | None:
        """Return the round for which the silo has to send an update; None if no update is
        needed."""
        return None if silo in self.updates else self.number

    def take(self, silo: int, number: int, update: SiloUpdate) -> bool:
        """Add an update. Returns whether the update counts: only a silo's first update in the open
        round is counted."""
        if number != self.number or silo in self.updates:
            return False
        self.updates[silo] = update
        return True

    @property
    def num_late(self) -> int:
        """Number of connected silos that have not sent their update."""
        return len(self._awaited - self.updates.keys())

    def wait_s(self, now: float) -> float:
        """Return the number of seconds after which the round ends if no update arrives; 0 if the
        round has ended."""
        refused = {silo for silo, sent in self.updates.items() if sent.is_refused}
        accepted = self.updates.keys() - refused
        is_enough = len(accepted) >= self._least
        asked = self._awaited if is_enough else self._all
        state = Collection(asked, True, self._least, accepted, refused)
        if next_of(state, is_late=now >= self._ends_at) is Next.END:
            return 0.0
        return self._ends_at - now if is_enough else math.inf

    def state(self, now: float) -> SiloRoundReport:
        """Return a report about the open round and the silos that have not responded."""
        assert self.number is not None
        missing = sorted(self._all - self.updates.keys())
        ends_in_s = None if math.isinf(self._ends_at) else max(0.0, self._ends_at - now)
        return SiloRoundReport(self.number, missing, self._least, ends_in_s)

    def end(self) -> dict[int, SiloUpdate]:
        """Close the round, and return its updates, sorted by silo."""
        self.number = None
        return dict(sorted(self.updates.items()))


NOTICE_S: Final = 5.0
"""Minimum number of seconds between two reports. Rounds that are shorter than this are not
reported."""


class RoundNotices:
    """Reports long rounds, so that users see which silos the job is waiting for. The first report
    is about the round, the next ones about changes in the set of silos that have not responded, and
    the last one about the end of the round."""

    def __init__(self, report: Callable[[SiloRoundReport], object]) -> None:
        self._report = report
        self._reported: SiloRoundReport | None = None
        """The latest report about the open round."""
        self._not_before = math.inf

    def begin(self, now: float) -> None:
        """Record that a round has been opened."""
        self._not_before = now + NOTICE_S

    def look(self, found: SiloRoundReport, now: float) -> None:
        """Report the open round if a report is due. found: the round's current state."""
        is_news = self._reported is None or found.missing != self._reported.missing
        if is_news and now >= self._not_before:
            self._report(found)
            self._reported, self._not_before = found, now + NOTICE_S

    def end(self) -> None:
        """Report the end of the round, if its start was reported."""
        if self._reported is not None:
            self._report(replace(self._reported, missing=[]))
            self._reported = None
