"""A round of the scheduler, and the base class of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from sqlalchemy.orm import Session

from service.cluster.port import ClusterSnapshot
from service.domain.scheduling import policy
from service.loops.shared.queue_view import LiveAttempt


@dataclass
class SchedulerRound:
    """The inputs and decisions of a round. Stages change both."""

    cluster: ClusterSnapshot | None
    snapshot: policy.Snapshot
    live: Sequence[LiveAttempt]
    now: datetime
    """The time according to the database's clock."""
    total: Mapping[str, float] = field(default_factory=dict)
    """The total resources of the accepted nodes."""
    asked: policy.Snapshot | None = None
    """The snapshot passed to the policy in its last call, without jobs that wait for a node."""
    planned: Sequence[policy.Decision] = ()
    """The decisions of the policy."""
    decisions: Sequence[policy.Decision] = ()
    """The decisions to carry out."""
    is_over: bool = False
    """Whether a stage has ended the round early, before jobs are planned."""
    starting_s: float = 0.0
    """Seconds spent on claims and launches."""

    @property
    def attempts(self) -> dict[str, int]:
        """The number of the live attempt of each job."""
        return {attempt.job_id: attempt.attempt for attempt in self.live}


class Stage:
    """A part of each round. The hooks do nothing unless a stage overrides them.

    The scheduler calls the first hook of all stages in order, then the next hook of all stages, and
    so on. An exception ends the round, and the next round starts from scratch.
    """

    def look(self, session: Session, seen: SchedulerRound) -> None:
        """Extend the snapshot, in the transaction that reads the round's inputs."""

    async def before(self, seen: SchedulerRound) -> None:
        """Change the snapshot before the round is planned."""

    async def after(self, seen: SchedulerRound) -> None:
        """Change the decisions, or carry them out."""

    def close(self) -> None:
        """Release the stage's resources when the scheduler has ended."""


def held_back(snapshot: policy.Snapshot, waiting: Mapping[str, str]) -> policy.Snapshot:
    """Return the snapshot modified so that the jobs in `waiting` get no slots. `waiting` maps each
    job to the reason why it waits."""
    if not waiting:
        return snapshot
    queue = (
        replace(job, preparing=waiting[job.job_id]) if job.job_id in waiting else job
        for job in snapshot.queue
    )
    growing = (group for group in snapshot.growing if group.job_id not in waiting)
    return replace(snapshot, queue=tuple(queue), growing=tuple(growing))
