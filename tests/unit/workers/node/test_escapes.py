"""Processes of a rank are found and ended, however they escaped; the report names survivors."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from ray_workers.node import session_records
from ray_workers.node.forkserver.client import list_tasks
from tests.unit.workers.forked import PATIENCE_S, Forked, Server, is_alive, light, server, until
from tests.unit.workers.light_forkserver import GHOST

__all__ = ["light", "server"]

ESCAPE = """
import os, time
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(write, str(os.getpid()).encode())
        os.close(1), os.close(2)
        {then}
    os._exit(0)
os.wait()
print(os.read(read, 20).decode(), flush=True)
"""
AS_A_PROGRAM = 'os.execve("/bin/sleep", ["sleep", "600"], {})'
AS_A_FORK = "time.sleep(600)"


async def escaped(server: Server, then: str, after: str) -> tuple[Forked, int]:
    """A rank, and the pid of an orphan that it started in another session."""
    forked = await server.fork(ESCAPE.format(then=then) + after, job_id="j", attempt=1, rank=0)
    return forked, int(await forked.line())


@pytest.mark.parametrize("then", [AS_A_PROGRAM, AS_A_FORK])
async def test_what_left_the_session_with_nothing_in_its_environment_is_ended(
    server: Server, then: str
) -> None:
    forked, escapee = await escaped(server, then, "")
    assert (await forked.end())[0] == 0
    assert not is_alive(escapee)


@pytest.mark.parametrize("then", [AS_A_PROGRAM, AS_A_FORK])
async def test_a_signal_reaches_what_left_the_session(server: Server, then: str) -> None:
    forked, escapee = await escaped(server, then, "time.sleep(600)")
    assert is_alive(escapee)
    forked.process.signal(signal.SIGTERM)
    assert (await forked.end())[0] == -signal.SIGTERM
    assert not is_alive(escapee)


async def test_the_end_of_one_rank_is_not_the_end_of_what_another_started(server: Server) -> None:
    one, of_one = await escaped(server, AS_A_PROGRAM, "time.sleep(600)")
    two, of_two = await escaped(server, AS_A_PROGRAM, "time.sleep(600)")
    one.process.signal(signal.SIGKILL)
    assert (await one.end())[0] == -signal.SIGKILL
    assert not is_alive(of_one)
    assert is_alive(two.pid)
    assert is_alive(of_two)


async def test_what_can_not_be_ended_is_named_and_stays_listed_until_it_is_gone(
    server: Server,
) -> None:
    forked = await server.fork("import time; time.sleep(600)", job_id="j", attempt=1)
    haunted = Path(server.path).with_name("haunted")
    haunted.write_text(str(forked.pid))
    forked.process.signal(signal.SIGKILL)
    code = await asyncio.wait_for(forked.process.wait(), PATIENCE_S)
    assert (code, forked.process.left) == (-signal.SIGKILL, [GHOST])
    listed = await list_tasks(server.path)
    assert [(each["pid"], each["left"]) for each in listed] == [(forked.pid, [GHOST])]
    other = await server.fork("")
    assert (await other.end(), other.process.left) == ((0, ""), [])  # the others are served
    haunted.unlink()
    async with asyncio.timeout(PATIENCE_S):
        while await list_tasks(server.path):
            await asyncio.sleep(0.05)


async def test_a_session_is_written_down_while_it_lasts(server: Server) -> None:
    directory = session_records.sessions_dir(Path(server.path).parent)
    forked = await server.fork("import time; time.sleep(600)", job_id="j", attempt=4, rank=2)
    (record,) = session_records.read_sessions(directory)
    assert (record.job_id, record.attempt, record.rank, record.pid) == ("j", 4, 2, forked.pid)
    assert record.server_pid == server.process.pid
    assert record.is_of_this_boot
    assert record.has_parent
    forked.process.signal(signal.SIGKILL)
    await forked.end()
    await until(lambda: not list(directory.iterdir()), "its record is left")
