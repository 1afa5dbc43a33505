"""One job on one ground, about to be struck, and where its processes are."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from dray import Client
from ray_workers.shared.processes.procfs import started_ticks
from tests.chaos.ground import Ground, parent_of
from tests.chaos.kinds import Kind
from tests.chaos.outside import OutsideClients
from tests.integration.harness import children_of, training_pids

STORE = -1
"""What the rendezvous store is called among the processes of a job."""


class Missed(Exception):
    """There was nothing to strike: the job is between two attempts, or has ended."""


@dataclass(frozen=True)
class Stopped:
    """A process to which SIGSTOP was sent."""

    kind: str
    pid: int
    started: int | None
    """In ticks: a pid alone may be another's by now."""

    @property
    def is_still(self) -> bool:
        return self.started is not None and started_ticks(self.pid) == self.started

    def let_go(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.is_still:
                os.kill(self.pid, signal.SIGCONT)


@dataclass
class Scene:
    """One job on one ground, about to be struck."""

    ground: Ground
    client: Client
    job_id: str
    kind: Kind
    rng: random.Random
    known: Mapping[str, Kind]
    """Kinds of jobs that may come, by name."""
    came: list[tuple[str, Kind]] = field(default_factory=list)
    """Ids of jobs that came since, with their kinds."""
    damaged_step: int = 0
    """Of a checkpoint that was damaged: whoever resumes must pass over it."""
    stopped: list[Stopped] = field(default_factory=list)
    """What was stopped, and not let go."""
    outside: OutsideClients | None = None
    """Clients of the job outside of the cluster, if it has any."""

    def seats(self) -> list[int]:
        """What the ranks that run now are called, in order of their ranks."""
        found = sorted(seat for seat in training_pids(self.job_id) if seat != STORE)
        if not found:
            raise Missed("no rank has a process")
        return found

    def first(self) -> int:
        """Rank 0, which saves and tells, and aggregates what silos and other clients send."""
        return self.seats()[0]

    def other(self) -> int:
        """One that is not rank 0, where there are several: of silos, one of them."""
        seats = self.seats()
        return self.rng.choice(seats[1:] or seats)

    def any(self) -> int:
        return self.rng.choice(self.seats())

    def node_agent(self) -> int:
        """Of a node that has a rank of the job."""
        # A forkserver that is stopped does not tell its ranks.
        still = [one.pid for one in self.stopped if one.kind == "forkserver" and one.is_still]
        forkserver = still[-1] if still else self.ground.forkserver_of(self.job_id)
        return parent_of(forkserver, "ray::NodeAgent")

    def client_outside(self) -> tuple[OutsideClients, int]:
        """The clients, and the number of one that runs."""
        if self.outside is None:
            raise Missed("the job has no clients outside of the cluster")
        return self.outside, self.outside.one_at_work(self.rng)

    def loader(self) -> int:
        """Pid of a process that reads for a rank."""
        loaders = list(children_of(pid_of(self, self.any())))
        if not loaders:
            raise Missed("the rank has no loader process")
        return self.rng.choice(loaders)

    def actor(self, role: str) -> int:
        """Pid of an actor of the job."""
        try:
            return self.ground.service.actor_pid(self.job_id, role)
        except (IndexError, OSError):
            raise Missed(f"there is no actor {role}") from None


def pid_of(scene: Scene, seat: int) -> int:
    pid = training_pids(scene.job_id).get(seat)
    if pid is None:
        raise Missed(f"seat {seat} has no process")
    return pid
