"""Commands to attempts that live: stop, leave, grow, inject a fault. Each is passed on once.

What is asked lies in SQL, and whether the cluster took it, only in this process: after a restart
of the service it is passed on again, which is harmless by the port's word.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from dray.views import JobState
from service.cluster.port import AttemptRef, Cluster
from service.loops.queue_view import LiveAttempt


@dataclass(frozen=True)
class Command:
    """One thing to tell the cluster."""

    job_id: str
    attempt: int
    what: str
    """Names it among the errands of the attempt."""
    call: Callable[[], Awaitable[None]]
    """Raises ClusterUnavailable if nobody took it."""

    @property
    def key(self) -> tuple[str, int, str]:
        return self.job_id, self.attempt, self.what


class Commands:
    """Which errands are still to be run."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._done: set[tuple[str, int, str]] = set()

    def due(self, attempt: LiveAttempt, ref: AttemptRef) -> Iterator[Command]:
        """What was asked of the attempt and not passed on yet. Who is to stop is asked no more."""
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
            for drill in attempt.drills:
                wanted[drill.id] = functools.partial(cluster.drill, ref, drill)
        for what, call in wanted.items():
            errand = Command(attempt.job_id, attempt.attempt, what, call)
            if errand.key not in self._done:
                yield errand

    def done(self, errand: Command) -> None:
        self._done.add(errand.key)

    def forget(self, job_id: str, attempt: int) -> None:
        """The attempt has ended."""
        self._done = {key for key in self._done if key[:2] != (job_id, attempt)}
