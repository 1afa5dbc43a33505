"""Commands to living attempts: stop, leave, grow, shrink, inject a fault. Each is passed on once.

A command is stored in SQL; that the cluster took it, only this process remembers. After a restart
of the service it is passed on again, which the port promises to be harmless.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from dray.views import JobState
from service.cluster.port import AttemptRef, Cluster
from service.loops.shared.queue_view import FollowedAttempt


@dataclass(frozen=True)
class Command:
    """One call of the cluster."""

    job_id: str
    attempt: int
    what: str
    """Its name among the commands of the attempt."""
    call: Callable[[], Awaitable[None]]
    """Raises ClusterUnavailable if nobody took it."""

    @property
    def key(self) -> tuple[str, int, str]:
        return self.job_id, self.attempt, self.what


class Commands:
    """The commands that are still to be passed on."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._done: set[tuple[str, int, str]] = set()

    def due(self, attempt: FollowedAttempt, ref: AttemptRef) -> Iterator[Command]:
        """Commands to the attempt that are not passed on yet.

        A job that is being cancelled gets no further commands.
        """
        cluster = self._cluster
        wanted: dict[str, Callable[[], Awaitable[None]]] = {}
        if attempt.job_state is JobState.CANCELLING:
            wanted["stop"] = functools.partial(cluster.stop_attempt, ref)
        else:
            if attempt.preempt_grace_s is not None:
                grace_s = attempt.preempt_grace_s
                wanted["preempt"] = functools.partial(cluster.preempt, ref, grace_s)
            elif attempt.grant is not None:
                grant = attempt.grant
                wanted[f"grow {grant.number}"] = functools.partial(cluster.grow, ref, grant)
            elif attempt.recall is not None:
                recall = attempt.recall
                wanted[f"recall {recall.number}"] = functools.partial(cluster.recall, ref, recall)
            for drill in attempt.drills:
                wanted[drill.id] = functools.partial(cluster.drill, ref, drill)
        for what, call in wanted.items():
            command = Command(attempt.job_id, attempt.attempt, what, call)
            if command.key not in self._done:
                yield command

    def done(self, command: Command) -> None:
        self._done.add(command.key)

    def forget(self, job_id: str, attempt: int) -> None:
        """The attempt has ended."""
        self._done = {key for key in self._done if key[:2] != (job_id, attempt)}
