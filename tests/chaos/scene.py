"""A job that is about to be hit by faults, and its processes."""

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
"""Number of the rendezvous store among the processes of a job."""


class Missed(Exception):
    """Raised if a fault has no target: the job is between two attempts or has ended."""


@dataclass(frozen=True)
class Stopped:
    """A process that was stopped with SIGSTOP."""

    kind: str
    pid: int
    started: int | None
    """Start time in ticks, because pids are reused."""

    @property
    def is_still(self) -> bool:
        return self.started is not None and started_ticks(self.pid) == self.started

    def let_go(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.is_still:
                os.kill(self.pid, signal.SIGCONT)


@dataclass
class Scene:
    """A job on a ground that is about to be hit by faults."""

    ground: Ground
    client: Client
    job_id: str
    kind: Kind
    rng: random.Random
    known: Mapping[str, Kind]
    """Kinds of jobs that can be submitted, by name."""
    came: list[tuple[str, Kind]] = field(default_factory=list)
    """IDs of jobs submitted since the start, with their kinds."""
    damaged_step: int = 0
    """Step of a damaged checkpoint, which must be skipped on resume."""
    stopped: list[Stopped] = field(default_factory=list)
    """Processes that are stopped and not yet continued."""
    outside: OutsideClients | None = None
    """The job's clients outside of the cluster, if it has any."""

    def worker_indices(self) -> list[int]:
        """Return the seats of the running ranks, in order of rank."""
        found = sorted(
            worker_index for worker_index in training_pids(self.job_id) if worker_index != STORE
        )
        if not found:
            raise Missed("no rank has a process")
        return found

    def first(self) -> int:
        """Return the seat of rank 0, which saves, reports, and aggregates the updates of silos and
        clients."""
        return self.worker_indices()[0]

    def other(self) -> int:
        """Return the seat of a rank other than 0 if there are several. For a job with silos, this
        is a silo."""
        worker_indices = self.worker_indices()
        return self.rng.choice(worker_indices[1:] or worker_indices)

    def any(self) -> int:
        return self.rng.choice(self.worker_indices())

    def node_agent(self) -> int:
        """Return the pid of the agent on a node with a rank of the job."""
        # A stopped forkserver can't list its ranks.
        still = [one.pid for one in self.stopped if one.kind == "forkserver" and one.is_still]
        forkserver = still[-1] if still else self.ground.forkserver_of(self.job_id)
        return parent_of(forkserver, "ray::NodeAgent")

    def client_outside(self) -> tuple[OutsideClients, int]:
        """Return the clients and the number of a running one."""
        if self.outside is None:
            raise Missed("the job has no clients outside of the cluster")
        return self.outside, self.outside.one_at_work(self.rng)

    def loader(self) -> int:
        """Return the pid of a rank's loader process."""
        loaders = list(children_of(pid_of(self, self.any())))
        if not loaders:
            raise Missed("the rank has no loader process")
        return self.rng.choice(loaders)

    def actor(self, role: str) -> int:
        """Return the pid of an actor of the job."""
        try:
            return self.ground.service.actor_pid(self.job_id, role)
        except (IndexError, OSError):
            raise Missed(f"there is no actor {role}") from None


def pid_of(scene: Scene, worker_index: int) -> int:
    pid = training_pids(scene.job_id).get(worker_index)
    if pid is None:
        raise Missed(f"worker {worker_index} has no process")
    return pid
