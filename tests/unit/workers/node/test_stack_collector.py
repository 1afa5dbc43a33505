"""The stacks of a rank are collected without its help, even if it is stuck or stopped."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from ray_workers.node import stack_collector
from ray_workers.node.forkserver.client import ForkFailed, ask_dump, list_tasks, send_to_rank
from ray_workers.shared.heartbeat import prefix_of, stack_path
from ray_workers.shared.processes import procfs
from ray_workers.shared.processes.stack_writer import END
from tests.unit.workers.forked import PATIENCE_S, Forked, Server, is_alive, light, server, until

__all__ = ["light", "server"]

MAIN_THREAD = "Stack (most recent call first):"
"""The first line of faulthandler."""
MANY_DUMPS = 300
"""One in 40 was fatal when the handler read every thread."""

STUCK = """
import ctypes, signal, sys, threading, time
from pathlib import Path
from ray_workers.shared.processes.stack_writer import dump_on
LIBC = ctypes.PyDLL(None)
MUTEX = ctypes.create_string_buffer(256)
LIBC.pthread_mutex_init(MUTEX, None)
def a_thread_of_its_own():
    time.sleep(600)
def threads_come_and_go():
    while True:
        other = threading.Thread(target=time.sleep, args=(0.0002,))
        other.start()
        other.join()
dump_on(signal.SIGUSR2, Path({path!r}))
threading.Thread(target=a_thread_of_its_own, daemon=True, name="reader").start()
threading.Thread(target={other}, daemon=True).start()
def the_place_it_is_stuck_at():
    print("here", flush=True)
    while True:
        {stuck_in}
the_place_it_is_stuck_at()
"""


async def stuck(
    server: Server,
    directory: Path,
    rank: int,
    incarnation: int = 0,
    *,
    stuck_in: str = "signal.sigwait([signal.SIGUSR1])",
    other: str = "a_thread_of_its_own",
) -> Forked:
    path = stack_path(prefix_of(directory, rank, incarnation))
    code = STUCK.format(path=str(path), stuck_in=stuck_in, other=other)
    forked = await server.fork(code, job_id="j", attempt=1, rank=rank, incarnation=incarnation)
    assert await forked.line() == "here"
    return forked


async def collected(server: Server, directory: Path, ranks: list[int]) -> dict[int, str]:
    return await stack_collector.collect(server.path, directory, "j", 1, ranks, wait_s=20.0)


async def test_stacks_are_of_the_newest_process_at_each_rank_asked_for(
    server: Server, tmp_path: Path
) -> None:
    running = [
        await stuck(server, tmp_path, rank, incarnation)
        for rank, incarnation in ((0, 0), (1, 0), (1, 1), (2, 0))
    ]
    found = await collected(server, tmp_path, [0, 1, 7])
    assert sorted(found) == [0, 1]
    assert all("the_place_it_is_stuck_at" in text for text in found.values())
    assert stack_path(prefix_of(tmp_path, 1, 0)).read_bytes() == b""
    assert stack_path(prefix_of(tmp_path, 2, 0)).read_bytes() == b""
    assert all(is_alive(forked.pid) for forked in running)


async def test_every_thread_is_in_it(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_collector, "QUIET_S", PATIENCE_S)
    forked = await stuck(server, tmp_path, 0)
    text = (await collected(server, tmp_path, [0]))[0]
    assert is_alive(forked.pid)
    assert text.startswith(MAIN_THREAD)
    assert "[reader]" in text
    assert text.index("the_place_it_is_stuck_at") < text.index("a_thread_of_its_own")
    assert text.count("the_place_it_is_stuck_at") == 1
    assert END.decode() not in text


async def test_who_never_lets_the_interpreter_go_shows_its_main_thread(
    server: Server, tmp_path: Path
) -> None:
    # From the second line on no other thread runs. Unlike a sleep, the wait survives a signal.
    keeps_the_lock = (
        "[sys.setswitchinterval(1000), LIBC.write(1, b'stuck\\n', 6), "
        "LIBC.pthread_mutex_lock(MUTEX), LIBC.pthread_mutex_lock(MUTEX)]"
    )
    forked = await stuck(server, tmp_path, 0, stuck_in=keeps_the_lock)
    assert await forked.line() == "stuck"
    text = (await collected(server, tmp_path, [0]))[0]
    assert is_alive(forked.pid)
    assert "the_place_it_is_stuck_at" in text
    assert "a_thread_of_its_own" not in text


async def test_no_dump_costs_a_rank_its_life(server: Server, tmp_path: Path) -> None:
    """Threads that begin and end at the same time are the danger; see `stack_writer`."""
    forked = await stuck(server, tmp_path, 0, other="threads_come_and_go")
    path = stack_path(prefix_of(tmp_path, 0, 0))
    for number in range(1, MANY_DUMPS + 1):
        assert await ask_dump(server.path, "j", 1, 0) == [forked.pid]
        await until(lambda n=number: path.read_bytes().count(END) == n, "no dump")
    assert is_alive(forked.pid)


async def test_a_second_dump_is_not_the_first_one_again(server: Server, tmp_path: Path) -> None:
    forked = await stuck(server, tmp_path, 0)
    first = await collected(server, tmp_path, [0])
    stack_path(prefix_of(tmp_path, 0, 0)).open("a").write("between\n")
    second = await collected(server, tmp_path, [0])
    assert "between" not in second[0]
    assert first[0].count("the_place_it_is_stuck_at") == 1
    assert second[0].count("the_place_it_is_stuck_at") == 1
    assert is_alive(forked.pid)


async def test_a_stopped_rank_writes_its_stack_too(server: Server, tmp_path: Path) -> None:
    forked = await stuck(server, tmp_path, 0)
    assert await send_to_rank(server.path, "j", 1, 0, signal.SIGSTOP) == [forked.pid]
    await until(lambda: procfs.is_stopped(forked.pid), "it was not stopped")
    assert "the_place_it_is_stuck_at" in (await collected(server, tmp_path, [0]))[0]
    assert not procfs.is_stopped(forked.pid)


async def test_a_rank_without_the_handler_lives_on_and_is_left_out(
    server: Server, tmp_path: Path
) -> None:
    code = "import signal; print('here', flush=True); signal.pause()"
    forked = await server.fork(code, job_id="j", attempt=1, rank=0)
    assert await forked.line() == "here"
    assert await collected(server, tmp_path, [0]) == {}
    assert [task["pid"] for task in await list_tasks(server.path)] == [forked.pid]
    assert is_alive(forked.pid)


async def test_a_rank_that_does_not_write_in_time_is_left_out(
    server: Server, tmp_path: Path
) -> None:
    code = (
        "import signal; signal.signal(signal.SIGUSR2, lambda *_: None)\n"
        "print('here', flush=True)\nwhile True: signal.pause()"
    )
    forked = await server.fork(code, job_id="j", attempt=1, rank=0)
    assert await forked.line() == "here"
    async with asyncio.timeout(PATIENCE_S):
        assert await stack_collector.collect(server.path, tmp_path, "j", 1, [0], wait_s=0.1) == {}


async def test_a_signal_ends_the_newest_process_at_a_rank_with_its_children(
    server: Server, tmp_path: Path
) -> None:
    code = (
        "import subprocess, sys; child = subprocess.Popen(['sleep', '600'])\n"
        "print(child.pid, flush=True); child.wait()"
    )
    older = await stuck(server, tmp_path, 3, incarnation=0)
    newer = await server.fork(code, job_id="j", attempt=1, rank=3, incarnation=1)
    child = int(await newer.line())
    reached = await send_to_rank(server.path, "j", 1, 3, signal.SIGKILL)
    assert sorted(reached) == sorted([newer.pid, child])
    assert (await newer.end())[0] == -signal.SIGKILL
    assert not is_alive(child)
    assert is_alive(older.pid)


async def test_no_process_at_another_rank_gets_the_signal(server: Server, tmp_path: Path) -> None:
    forked = await stuck(server, tmp_path, 0)
    for job_id, attempt, rank in (("j", 1, 1), ("j", 2, 0), ("k", 1, 0)):
        assert await send_to_rank(server.path, job_id, attempt, rank, signal.SIGKILL) == []
    with pytest.raises(ForkFailed):
        await stack_collector.collect(f"{server.path}.none", tmp_path, "j", 1, [0], wait_s=1.0)
    assert is_alive(forked.pid)
