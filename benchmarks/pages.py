"""The progress of dray's ranks, read from their heartbeat pages, independently of the service's
reports.

A rank writes to its page when it commits a step, like the peers' ranks write to their logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.recovery.commits import Commit
from ray_workers.shared import heartbeat, paths
from ray_workers.shared.heartbeat import RankObservation


class JobPages:
    """The pages of a job's first attempt on this machine."""

    def __init__(self, job_id: str) -> None:
        self._pattern = f"*/*/pages/{job_id}/1"
        self._folder: Path | None = None

    def observe(self) -> list[RankObservation]:
        """Return all processes of the attempt, including dead processes. Empty before the first has
        started."""
        if self._folder is None:
            self._folder = next(paths.machine_root().glob(self._pattern), None)
        return [] if self._folder is None else heartbeat.observe_ranks(self._folder)


def newest(observations: Sequence[RankObservation], rank: int) -> RankObservation | None:
    """Return the newest process of a rank."""
    of_rank = [observation for observation in observations if observation.rank == rank]
    return max(of_rank, key=lambda observation: observation.incarnation, default=None)


class SeenCommits:
    """Derives commits from observations over time."""

    def __init__(self) -> None:
        self.commits: list[Commit] = []
        self._known: dict[tuple[int, str, int], int] = {}

    def take(self, observations: Sequence[RankObservation], at: float) -> None:
        """Add new commits. The first commit of a generation has the time that its rank wrote, and
        the others have the time of the observation."""
        for observation in observations:
            status = observation.status
            member = observation.rank, str(observation.incarnation), status.generation
            if status.step <= status.resumed_step or not status.first_at:
                continue  # it has not committed anything in this generation
            if member not in self._known:
                first = status.resumed_step + 1
                self.commits.append(Commit(*member, first, status.first_at))
                self._known[member] = first
            if status.step > self._known[member]:
                self.commits.append(Commit(*member, status.step, at))
                self._known[member] = status.step
