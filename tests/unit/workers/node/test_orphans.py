"""Orphans are found by the records of their dead forkserver, and no other process is killed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ray_workers.node import orphans, session_records
from ray_workers.node.session_records import SessionRecord
from ray_workers.shared import spool_reader
from ray_workers.shared.processes import procfs
from ray_workers.shared.processes.procfs import carry_mark, new_mark, started_ticks
from tests.unit.workers.forked import PATIENCE_S, Server, is_alive, light, server, until
from tests.unit.workers.node.test_escapes import AS_A_FORK, AS_A_PROGRAM, escaped

__all__ = ["light", "server"]


def record(**more: object) -> SessionRecord:
    """The record of a session without processes whose forkserver is dead."""
    fields: dict[str, object] = {
        "place": procfs.pid_namespace(),
        "boot_id": procfs.boot_id(),
        "server_pid": os.getpid(),
        "server_started": 1,
        "pid": os.getpid(),
        "started": 1,
        "mark": new_mark(),
        "job_id": "j",
        "attempt": 1,
        "rank": 0,
    }
    return SessionRecord(**{**fields, **more})  # type: ignore[arg-type]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process
        process.kill()


def marked_sleeper(mark: str, environment: dict[str, str] | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(600)"],
        preexec_fn=lambda: carry_mark(mark),
        env=environment,
        start_new_session=True,
    )


@pytest.mark.parametrize("then", [AS_A_PROGRAM, AS_A_FORK])
async def test_what_a_killed_forkserver_could_not_take_along_is_ended(
    server: Server, then: str
) -> None:
    directory = session_records.sessions_dir(Path(server.path).parent)
    forked, escapee = await escaped(server, then, "time.sleep(600)")
    assert orphans.reap(directory) == []
    assert is_alive(escapee), "it has a forkserver that looks after it"
    server.process.kill()
    server.process.wait(PATIENCE_S)
    await until(lambda: not is_alive(forked.pid), "the rank lives on")
    assert is_alive(escapee)
    left = orphans.reap(directory)
    assert escapee in left[0].pids
    await until(lambda: not orphans.reap(directory), "it is not gone")
    # A process that is just ending has no memory any more in which its mark could be found.
    await until(lambda: not is_alive(escapee), "it lives on")
    assert session_records.read_sessions(directory) == []


@pytest.mark.parametrize("environment", [{}, None])
async def test_a_mark_is_enough_to_be_found(
    tmp_path: Path, environment: dict[str, str] | None
) -> None:
    orphan = record()
    process = marked_sleeper(orphan.mark, environment)
    session_records.write_session(session_records.sessions_dir(tmp_path / "node"), orphan)
    reaping = asyncio.create_task(
        asyncio.to_thread(orphans.reap_within, [tmp_path / "node"], PATIENCE_S)
    )
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == -9
    assert await reaping == []


async def test_a_leader_is_ended_by_pid_and_start(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    started = started_ticks(sleeper.pid)
    assert started is not None
    session_records.write_session(tmp_path, record(pid=sleeper.pid, started=started))
    assert [orphan.pids for orphan in orphans.reap(tmp_path)] == [(sleeper.pid,)]
    assert await asyncio.to_thread(sleeper.wait, PATIENCE_S) == -9


async def test_a_pid_that_is_used_again_is_no_orphan(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    started = started_ticks(sleeper.pid)
    assert started is not None
    session_records.write_session(tmp_path, record(pid=sleeper.pid, started=started - 1))
    assert orphans.reap(tmp_path) == []
    assert sleeper.poll() is None
    assert session_records.read_sessions(tmp_path) == []


async def test_records_of_another_host_or_container_are_left_alone(tmp_path: Path) -> None:
    orphan = record(place="another host")
    process = marked_sleeper(orphan.mark, None)
    session_records.write_session(tmp_path, orphan)
    assert orphans.reap(tmp_path) == []
    assert session_records.read_sessions(tmp_path) == [orphan]
    assert process.poll() is None
    process.kill()
    process.wait()


async def test_records_of_another_boot_are_only_deleted(tmp_path: Path) -> None:
    orphan = record(boot_id="another")
    process = marked_sleeper(orphan.mark, None)
    session_records.write_session(tmp_path, orphan)
    (tmp_path / "torn" / "1").mkdir(parents=True)
    (tmp_path / "torn" / "1" / "x.json").write_text("{")
    assert orphans.reap(tmp_path) == []
    assert session_records.read_sessions(tmp_path) == []
    assert process.poll() is None
    process.kill()
    process.wait()


async def test_what_survives_is_answered_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan = record()
    session_records.write_session(session_records.sessions_dir(tmp_path / "node"), orphan)
    monkeypatch.setattr(orphans, "find_members", lambda _: {orphan.mark: [(1 << 22) + 1]})
    left = orphans.reap_within([tmp_path / "node"], 0.1)
    assert [(each.record, each.pids) for each in left] == [(orphan, ((1 << 22) + 1,))]
    monkeypatch.setattr(orphans, "find_members", lambda _: {orphan.mark: []})
    assert orphans.reap_within([tmp_path / "node"], 0.1) == []


def node_folder(root: Path, name: str, **owner: object) -> Path:
    folder = root / name
    folder.mkdir()
    notes = {
        "place": procfs.pid_namespace(),
        "boot_id": procfs.boot_id(),
        "raylet": os.getpid(),
        "started": 1,
        **owner,
    }
    (folder / session_records.OWNER).write_text(json.dumps(notes))
    return folder


def test_folders_of_nodes_that_are_certainly_dead_are_deleted(tmp_path: Path) -> None:
    dead = node_folder(tmp_path, "dead")
    before_the_boot = node_folder(tmp_path, "old", boot_id="another", raylet=0)
    node_folder(tmp_path, "alive", started=started_ticks(os.getpid()))
    node_folder(tmp_path, "unknown", raylet=0)
    node_folder(tmp_path, "elsewhere", place="another host", boot_id="another")
    own = node_folder(tmp_path, "own")
    (tmp_path / "says-nothing").mkdir()
    assert set(orphans.remove_dead_nodes(tmp_path, own)) == {dead, before_the_boot}
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"alive", "unknown", "elsewhere", "own", "says-nothing"}


def test_a_dead_node_s_folder_stays_while_the_service_has_to_read_it(tmp_path: Path) -> None:
    own, dead = tmp_path / "own", node_folder(tmp_path, "dead")
    spool = dead / "spool" / "job" / "1"
    for folder in (spool, dead / "spool" / "gone", dead / "tmp" / "x"):
        folder.mkdir(parents=True)
    assert orphans.remove_dead_nodes(tmp_path, own) == []
    assert {path.name for path in dead.iterdir()} == {"spool", "owner.json"}
    spool_reader.remove(spool)
    assert orphans.remove_dead_nodes(tmp_path, own) == [dead]


def test_a_dead_node_s_folder_stays_while_something_of_it_runs(tmp_path: Path) -> None:
    own, dead = tmp_path / "own", node_folder(tmp_path, "dead")
    directory = session_records.sessions_dir(dead)
    left = record()
    process = marked_sleeper(left.mark, None)
    session_records.write_session(directory, left)
    assert orphans.remove_dead_nodes(tmp_path, own) == []
    process.kill()
    process.wait()
    with_a_forkserver = replace(left, server_started=started_ticks(os.getpid()) or 0)
    session_records.write_session(directory, with_a_forkserver)
    assert orphans.remove_dead_nodes(tmp_path, own) == []
    session_records.write_session(directory, left)
    assert orphans.remove_dead_nodes(tmp_path, own) == [dead]
    assert not dead.exists()


async def test_records_are_read_while_others_go(tmp_path: Path) -> None:
    ends = threading.Event()

    def come_and_go() -> None:
        while not ends.is_set():
            for job in "abcdefgh":
                passing = record(job_id=job)
                session_records.write_session(tmp_path, passing)
                session_records.remove_session(tmp_path, passing)

    coming = asyncio.create_task(asyncio.to_thread(come_and_go))
    staying = record(job_id="stays")
    session_records.write_session(tmp_path, staying)
    try:
        for _ in range(1000):
            assert staying in await asyncio.to_thread(session_records.read_sessions, tmp_path)
    finally:
        ends.set()
        await coming
