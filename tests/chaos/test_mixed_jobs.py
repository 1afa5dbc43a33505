"""Fifty jobs with all kinds of results leave nothing behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dray import Client, errors
from dray.views import JobState
from tests.integration.harness import (
    Service,
    agent_of,
    assert_promises,
    children_of,
    digits,
    eventually,
    script,
)
from tests.marks import SOAK

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

SCRIPTS = {
    "works": "print('done')\n",
    "raises": "raise RuntimeError('on purpose')\n",
    "exits": "import sys\nsys.exit(3)\n",
    "crashes": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n",
    "sleeps": "import time\nprint('asleep', flush=True)\ntime.sleep(600)\n",
    "stubborn": (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('asleep', flush=True)\n"
        "time.sleep(600)\n"
    ),
}


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    for name, text in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(text)
    return lambda name, **changes: script(tmp_path / f"{name}.py", **changes)


def open_files(service: Service) -> Counter[str]:
    """Count the open descriptors of the service, its gateway, and the node's agent and
    forkserver."""
    assert service.process is not None
    pids = {"service": service.process.pid, "gateway": service.gateway_pid()}
    pids["agent"] = agent_of(service.ray_daemon()["instance"])
    (pids["forkserver"],) = children_of(pids["agent"])
    return Counter({name: len([*Path(f"/proc/{pid}/fd").iterdir()]) for name, pid in pids.items()})


def placement_groups(service: Service) -> list[str]:
    listed = service.dashboard("/api/v0/placement_groups?detail=true&limit=10000")
    groups = listed["data"]["result"]["result"]
    return [g["name"] for g in groups if g["name"].startswith("dray:") and g["state"] != "REMOVED"]


@SOAK
def test_fifty_jobs_of_every_fate_leave_nothing_behind(
    embedded: Service, client: Client, job: Callable[..., dict[str, Any]]
) -> None:
    # Run one of each first, so that descriptors opened once and kept don't count as leaks.
    warm_up = [client.submit(digits(train={"epochs": 1})), client.submit(job("works"))]
    for submitted in warm_up:
        assert client.wait(submitted.id, timeout_s=60).state is JobState.SUCCEEDED
    files_before = open_files(embedded)

    for _ in range(6):
        with pytest.raises(errors.Unsatisfiable):
            client.submit(job("works", resources={"num_workers": 5}))
    expected: dict[str, JobState] = {}
    for number in range(44):
        expected |= submit_one(client, job, number)
    for number, (job_id, state) in enumerate(expected.items()):
        ended = client.wait(job_id, timeout_s=240)
        assert ended.state is state, f"job {number}: {ended.reason}"

    assert Counter(expected.values()) == {
        JobState.SUCCEEDED: 16,
        JobState.FAILED: 16,
        JobState.CANCELLED: 12,
    }
    for job_id in expected:
        assert_promises(embedded, client, job_id)
    eventually(lambda: not placement_groups(embedded), within_s=60, why="placement groups are left")
    # A long poll or connection of this test may still be closing.
    eventually(
        lambda: not (open_files(embedded) - files_before - ALLOWANCE),
        within_s=60,
        why=f"open files grew from {files_before}",
    )
    assert all(not node.held.get("CPU") for node in client.cluster().nodes)


ALLOWANCE = Counter({"service": 6, "gateway": 6, "agent": 6, "forkserver": 0})
"""Allowance for temporary connections: the database pool, HTTP, and Ray's gRPC channels. A leak of
one descriptor per job would be seven times as many."""


def submit_one(
    client: Client, job: Callable[..., dict[str, Any]], number: int
) -> dict[str, JobState]:
    """Submit the job with this number, and cancel it if it is meant to be cancelled."""
    fates: list[tuple[dict[str, Any], JobState, bool]] = [
        (job("works"), JobState.SUCCEEDED, False),
        (job("raises"), JobState.FAILED, False),
        (job("works", resources={"num_workers": 4}), JobState.SUCCEEDED, False),
        (job("sleeps", resources={"num_workers": 2}), JobState.CANCELLED, True),
        (job("exits", resources={"num_workers": 2}), JobState.FAILED, False),
        (digits(train={"epochs": 1}), JobState.SUCCEEDED, False),
        (job("sleeps", max_runtime_s=1), JobState.FAILED, False),
        (job("crashes"), JobState.FAILED, False),
        (job("stubborn"), JobState.CANCELLED, True),
        (job("works", priority=number), JobState.SUCCEEDED, False),
        (job("sleeps", priority=0), JobState.CANCELLED, True),
    ]
    spec, state, cancel = fates[number % len(fates)]
    submitted = client.submit(spec)
    # Jobs with odd numbers are cancelled when they run, the others while they wait.
    if cancel and number % 2:
        client.wait(submitted.id, states=[JobState.RUNNING], timeout_s=120)
    if cancel:
        client.cancel(submitted.id)
    return {submitted.id: state}
