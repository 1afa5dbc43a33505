"""Three `python -m service` share one PostgreSQL and one Ray, and one of them leads. When it is
killed, stopped or ended, another one leads and starts what waits, and nothing starts twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

from dray import Client
from dray.views import JobState
from service.db.repositories.scheduling import leases
from service.db.session import Database
from tests.integration.harness import (
    ROOT,
    RayByHand,
    Service,
    assert_events_are_whole,
    digits,
    eventually,
)

pytestmark = [pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(900)]

ENDS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
"""How a leader goes away: killed, stopped, or asked to stop."""
SMALL = digits(resources={"num_workers": 1})


@dataclass
class Schedulers:
    """Processes of `python -m service`, and which one of them leads."""

    environment: dict[str, str]
    database: Database
    log: Path
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    lost: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Leaders that were sent a signal."""

    def start(self) -> None:
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "service"],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
            )
        self.processes[process.pid] = process

    def leader(self) -> int | None:
        """Return its process id; None while none of these has the lease."""
        with Session(self.database.engine) as session:
            lease = leases.get(session)
        pid = 0 if lease is None else int(lease.holder.split(":")[1])
        return pid if pid in self.processes else None

    def lose_leader(self, number: signal.Signals) -> int:
        """Send it the signal, and know it no more; answers its process id."""
        pid = eventually(self.leader, why="nobody leads")
        assert pid is not None
        self.lost[pid] = self.processes.pop(pid)
        self.lost[pid].send_signal(number)
        return pid

    def let_go_on(self, pid: int) -> None:
        self.lost[pid].send_signal(signal.SIGCONT)
        self.processes[pid] = self.lost.pop(pid)

    def end(self) -> None:
        for process in [*self.processes.values(), *self.lost.values()]:
            process.kill()
            process.wait()


@pytest.fixture
def ray_cluster(tmp_path: Path) -> Iterator[RayByHand]:
    cluster = RayByHand(tmp_path / "ray", slots_per_node=8)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def schedulers(
    ray_cluster: RayByHand, postgres_url: str, tmp_path: Path
) -> Iterator[tuple[Schedulers, Service]]:
    """Three of these processes, and a server without loops."""
    environment = {
        "DRAY_DATABASE_URL": postgres_url,
        "DRAY_STORAGE_URL": (tmp_path / "storage").as_uri(),
        "DRAY_RAY_ADDRESS": ray_cluster.address,
        "DRAY_RAY_TOKEN_FILE": str(ray_cluster.token_file),
        "DRAY_HOME": str(tmp_path / "home"),
    }
    server = Service(tmp_path / "home", environment)
    server.process = server.spawn("--no-loops")
    database = Database(postgres_url)
    them = Schedulers(environment, database, tmp_path / "schedulers.log")
    try:
        for _ in range(3):
            them.start()
        eventually(server.takes_jobs, why="the server never took jobs")
        yield them, server
    except BaseException as error:
        error.add_note(them.log.read_text()[-6000:])
        raise
    finally:
        them.end()
        server.stop()
        database.close()


def test_when_the_leader_goes_another_leads_and_starts_what_waits(
    schedulers: tuple[Schedulers, Service],
) -> None:
    them, server = schedulers
    with server.client as client:
        jobs = [runs(client)]
        for number in ENDS:
            gone = them.lose_leader(number)
            began = time.monotonic()
            job_id = client.submit(SMALL).id
            eventually(them.leader, why="nobody leads")
            led = time.monotonic() - began
            eventually(lambda job_id=job_id: has_started(client, job_id), why="it never started")
            started = time.monotonic() - began
            print(f"{number.name}: another leads after {led:.1f} s, starts after {started:.1f} s")
            jobs.append(job_id)
            if number == signal.SIGSTOP:
                them.let_go_on(gone)
            else:
                them.start()
        for job_id in jobs:
            job = client.wait(job_id, timeout_s=200)
            assert job.state is JobState.SUCCEEDED, job.reason
            assert [each.attempt for each in client.attempts(job_id)] == [1], "started twice"
            assert_events_are_whole(client, job_id)


def runs(client: Client) -> str:
    job_id: str = client.submit(SMALL).id
    eventually(lambda: has_started(client, job_id), why="the job never started")
    return job_id


def has_started(client: Client, job_id: str) -> bool:
    """Whether its ranks run. A leader that is killed between a claim and its launch leaves an
    attempt of which nobody knows whether it comes, and the next attempt waits for it."""
    return client.get(job_id).state not in (JobState.QUEUED, JobState.STARTING)
