"""A slot whose process still exists is given to no job, across restarts, until the process ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dray import Client
from dray.views import JobState
from ray_workers.node import session_records
from ray_workers.node.session_records import SessionRecord
from ray_workers.shared import paths
from ray_workers.shared.processes.procfs import (
    boot_id,
    carry_mark,
    command,
    new_mark,
    pid_namespace,
    started_ticks,
)
from tests.integration.harness import Service, assert_nothing_left, eventually, script
from tests.marks import SOAK

pytestmark = pytest.mark.ray

SLEEPS = "import time\ntime.sleep(600)\n"
ENDS = "print('done')\n"


@contextlib.contextmanager
def stuck_process(job_id: str) -> Iterator[None]:
    """A process of the job's first attempt that can't be killed.

    No process survives SIGKILL, so this one is recorded as a process of another forkserver, which
    does not end it: for the node, it belongs to the attempt and still exists.
    """
    (spools,) = paths.machine_root().glob(f"*/*/spool/{job_id}")
    node = spools.parents[1]
    mark = new_mark()
    sleeper = subprocess.Popen(
        [sys.executable, "-S", "-c", SLEEPS],
        preexec_fn=lambda: carry_mark(mark),
        start_new_session=True,
    )
    record = SessionRecord(
        place=pid_namespace(),
        boot_id=boot_id(),
        server_pid=os.getpid(),
        server_started=started_ticks(os.getpid()) or 0,
        pid=sleeper.pid,
        started=started_ticks(sleeper.pid) or 0,
        mark=mark,
        job_id=job_id,
        attempt=1,
        rank=0,
    )
    session_records.write_session(session_records.sessions_dir(node), record)
    try:
        yield
    finally:
        sleeper.kill()
        sleeper.wait()
        session_records.remove_session(session_records.sessions_dir(node), record)


def told(client: Client, job_id: str) -> list[str]:
    return [e.type for e in client.events(job_id) if e.type.startswith("slot_")]


def kept(client: Client) -> list[tuple[str, int]]:
    nodes = client.cluster().nodes
    return [(each.job_id, each.slots) for node in nodes for each in node.quarantined]


@SOAK
def test_a_slot_whose_process_is_not_gone_is_given_to_nobody(
    embedded: Service, client: Client, tmp_path: Path
) -> None:
    for name, text in (("sleeps", SLEEPS), ("ends", ENDS)):
        (tmp_path / f"{name}.py").write_text(text)
    job = client.submit(script(tmp_path / "sleeps.py"))
    client.wait(job.id, states=[JobState.RUNNING], timeout_s=60)
    with stuck_process(job.id):
        client.cancel(job.id)
        assert client.wait(job.id, timeout_s=60).state is JobState.CANCELLED
        eventually(lambda: kept(client) == [(job.id, 1)], within_s=20)
        assert told(client, job.id) == ["slot_quarantined"]
        all_four = client.submit(script(tmp_path / "ends.py", resources={"num_workers": 4}))
        three = script(tmp_path / "ends.py", resources={"num_workers": 3}, priority=90)
        assert client.wait(client.submit(three).id, timeout_s=60).state is JobState.SUCCEEDED
        embedded.kill()
        embedded.start()
        eventually(lambda: kept(client) == [(job.id, 1)], within_s=20)
        assert client.wait(client.submit(three).id, timeout_s=60).state is JobState.SUCCEEDED
        assert client.get(all_four.id).state is JobState.QUEUED
    assert client.wait(all_four.id, timeout_s=60).state is JobState.SUCCEEDED
    eventually(lambda: not kept(client), within_s=20)
    assert told(client, job.id) == ["slot_quarantined", "slot_released"]
    for ended in (job, all_four):
        assert_nothing_left(embedded, ended.id)


@SOAK
def test_a_killed_supervisor_gives_no_slot_back_whose_process_is_there(
    embedded: Service, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    job = client.submit(script(tmp_path / "sleeps.py"))
    client.wait(job.id, states=[JobState.RUNNING], timeout_s=60)
    with stuck_process(job.id):
        os.kill(embedded.actor_pid(job.id, "supervisor"), signal.SIGKILL)
        eventually(lambda: len(client.attempts(job.id)) == 2, within_s=60)
        eventually(lambda: kept(client) == [(job.id, 1)], within_s=20)
        client.wait(job.id, states=[JobState.RUNNING], timeout_s=60)
        client.cancel(job.id)
        assert client.wait(job.id, timeout_s=60).state is JobState.CANCELLED
        assert kept(client) == [(job.id, 1)]
    eventually(lambda: not kept(client), within_s=20)
    assert_nothing_left(embedded, job.id)


def test_a_node_says_which_raylet_it_belongs_to(embedded: Service) -> None:
    owners = [
        json.loads(path.read_text())
        for path in paths.machine_root().glob(f"*/*/{session_records.OWNER}")
        if not session_records.is_dead_node(path.parent)
    ]
    assert owners
    assert all(command(owner["raylet"]) == "raylet" for owner in owners)
