"""The forkserver sees the end of everything that it started, whichever process dies first."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest

from dray.spec import JobSpec
from ray_workers.node.forkserver import client as forkserver_client
from ray_workers.node.forkserver.client import ForkedProcess, ForkFailed, list_tasks
from ray_workers.shared.processes import procfs
from tests.unit.workers.forked import PATIENCE_S, Forked, Server, is_alive, light, server, until
from tests.unit.workers.shared.test_huge_pages import huge_mib, packs
from tests.wire import rank_task

__all__ = ["light", "server"]

CHILD_THAT_STAYS = """
import os, signal, sys, time
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)
print(child, flush=True)
"""


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        ("", 0),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('no')", 1),
        ("raise ValueError('the sky is red')", 1),
        ("import os; os._exit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -11),
    ],
)
async def test_the_exit_code_arrives_as_the_process_left_it(
    server: Server, code: str, ends: int
) -> None:
    forked = await server.fork(code)
    result, text = await forked.end()
    assert result == ends
    assert ("the sky is red" in text) == ("sky" in code)
    assert not is_alive(forked.pid)


async def test_a_forked_process_starts_clean(server: Server) -> None:
    """It has its own session, its pipe as output, nothing else open, and default signals."""
    code = (
        "import os, signal, sys\n"
        "print('out', flush=True); print('err', file=sys.stderr, flush=True)\n"
        "print(os.getsid(0) == os.getpid(), repr(sys.stdin.read()))\n"
        "fds = sorted(map(int, os.listdir('/proc/self/fd')))\n"
        "print(fds[:3], len(fds))\n"
        "print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)\n"
    )
    forked = await server.fork(code)
    ends, text = await forked.end()
    # The fourth descriptor lists the descriptors.
    assert (ends, text.split("\n")[:-1]) == (
        0,
        ["out", "err", "True ''", "[0, 1, 2] 4", "True"],
    )


async def test_a_rank_has_the_requested_niceness(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nicer = min(os.nice(0) + 2, 19)
    monkeypatch.setenv("DRAY_RANK_NICENESS", str(nicer))
    server = Server("tests.unit.workers.light_forkserver")
    try:
        await server.serves()
        group = "/proc/self/autogroup"
        code = (
            "import os, pathlib\n"
            f"group = pathlib.Path({group!r})\n"
            "print(os.nice(0), group.read_text().split()[-1] if group.exists() else os.nice(0))\n"
        )
        _, text = await (await server.fork(code)).end()
        assert text.split() == [str(nicer)] * 2
    finally:
        server.close()


@pytest.mark.parametrize(
    ("attack", "ends"),
    [
        ("os.kill(os.getppid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getppid(), signal.SIGTERM); os._exit(4)", 4),
        ("os.kill(0, signal.SIGTERM)", -signal.SIGTERM),
        ("os.kill(os.getppid(), signal.SIGSTOP)", -signal.SIGKILL),
    ],
)
async def test_a_rank_that_signals_its_parent_hits_itself_alone(
    server: Server, attack: str, ends: int
) -> None:
    other = await server.fork("print('here', flush=True); import time; time.sleep(60)")
    assert await other.line() == "here"
    wait = "; print('done', flush=True); time.sleep(60)"
    forked = await server.fork(f"import os, signal, time; {attack}{wait}")
    if "STOP" in attack:
        assert await forked.line() == "done"
        forked.process.signal(signal.SIGKILL)
    assert (await forked.end())[0] == ends
    assert is_alive(server.process.pid)
    assert is_alive(other.pid)
    assert [each["pid"] for each in await list_tasks(server.path)] == [other.pid]


async def test_what_a_rank_leaves_behind_has_not_the_forkserver_as_its_parent(
    server: Server,
) -> None:
    code = (
        "import os, time\n"
        "if not os.fork():\n"
        "    rank = os.getppid()\n"
        "    if not os.fork():\n"
        "        while os.getppid() != int(open(f'/proc/{rank}/stat').read().split()[3]): pass\n"
        "        print(os.getppid(), flush=True)\n"
        "    os._exit(0)\n"
        "time.sleep(60)"
    )
    forked = await server.fork(code)
    assert int(await forked.line()) != server.process.pid
    forked.process.abandon()


async def test_the_end_of_a_rank_whose_init_is_stopped_is_seen(server: Server) -> None:
    forked = await server.fork("import time; print('here', flush=True); time.sleep(600)")
    assert await forked.line() == "here"
    os.kill(int(procfs.stat_fields(forked.pid)[1]), signal.SIGSTOP)
    os.kill(forked.pid, signal.SIGKILL)
    await until(lambda: not is_alive(forked.pid), "it lives on")
    await list_tasks(server.path)  # as its manager does every few seconds
    assert await asyncio.wait_for(forked.process.wait(), PATIENCE_S) == -signal.SIGKILL
    assert await list_tasks(server.path) == []


async def test_many_forks_at_once_each_end_by_their_own_code(server: Server) -> None:
    forked = await asyncio.gather(*(server.fork(f"import sys; sys.exit({n})") for n in range(12)))
    ends = await asyncio.gather(*(each.end() for each in forked))
    assert [code for code, _ in ends] == list(range(12))
    assert await list_tasks(server.path) == []


async def test_a_signal_reaches_the_whole_session(server: Server) -> None:
    code = "import subprocess, sys\nsubprocess.run(['sleep', '60'], stderr=sys.stderr)"
    forked = await server.fork("print('here', flush=True)\n" + code)
    assert await forked.line() == "here"
    session = procfs.Session(forked.pid, 0, procfs.new_mark())

    def members() -> list[int]:
        return procfs.find_members([session])[session.mark]

    await until(lambda: len(members()) == 2, "there is no child")
    whole = members()
    forked.process.signal(signal.SIGTERM)
    ends, _ = await forked.end()
    assert ends == -signal.SIGTERM
    assert not any(is_alive(pid) for pid in whole)


async def test_a_process_is_gone_only_when_its_children_are(server: Server) -> None:
    forked = await server.fork(CHILD_THAT_STAYS + "sys.exit(5)")
    child = int(await forked.line())
    assert await asyncio.wait_for(forked.process.wait(), PATIENCE_S) == 5
    assert not is_alive(child)


async def test_a_client_that_lets_go_takes_the_session_with_it(server: Server) -> None:
    forked = await server.fork(CHILD_THAT_STAYS + "time.sleep(60)")
    child = int(await forked.line())
    assert len(await list_tasks(server.path)) == 1
    forked.process.abandon()
    await until(lambda: not is_alive(forked.pid) and not is_alive(child), "they live on")
    deadline = time.monotonic() + PATIENCE_S
    while await list_tasks(server.path):
        assert time.monotonic() < deadline, "what is gone is still listed"


async def test_a_start_that_is_cancelled_leaves_nothing_running(server: Server) -> None:
    """At any moment: the request or the answer may be on its way."""
    kept = []  # with the frames of the start, which the garbage collector would otherwise clean up
    for turns in range(8):
        starting = asyncio.ensure_future(server.fork("import signal; signal.pause()"))
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns > 4:
            await until_forked(server)
        starting.cancel()
        try:
            (await starting).process.abandon()  # it had started before the cancellation
        except asyncio.CancelledError as cancelled:
            kept.append(cancelled)

    async def empty() -> bool:
        return not await list_tasks(server.path)

    async with asyncio.timeout(PATIENCE_S):
        while not await empty():
            await asyncio.sleep(0.01)


async def until_forked(server: Server) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await list_tasks(server.path):
            await asyncio.sleep(0.001)


async def test_the_list_shows_what_runs(server: Server) -> None:
    wait = "print('here', flush=True); import time; time.sleep(60)"
    one = await server.fork(wait, job_id="job-1", attempt=2, rank=0)
    two = await server.fork(wait, job_id="job-2", attempt=1, rank=3)
    assert sorted(await list_tasks(server.path), key=lambda each: str(each["job_id"])) == [
        {"job_id": "job-1", "attempt": 2, "rank": 0, "incarnation": 0, "pid": one.pid, "left": []},
        {"job_id": "job-2", "attempt": 1, "rank": 3, "incarnation": 0, "pid": two.pid, "left": []},
    ]
    one.process.signal(signal.SIGKILL)
    assert (await one.end())[0] == -signal.SIGKILL
    assert [each["pid"] for each in await list_tasks(server.path)] == [two.pid]


async def test_without_its_node_agent_everything_ends(server: Server) -> None:
    forked = await server.fork(CHILD_THAT_STAYS + "time.sleep(60)")
    child = int(await forked.line())
    server.close_lifeline()
    assert await asyncio.to_thread(server.process.wait, PATIENCE_S) == 0
    assert not is_alive(forked.pid)
    assert not is_alive(child)
    assert await asyncio.wait_for(forked.process.wait(), PATIENCE_S) is None


async def test_a_killed_forkserver_takes_its_ranks_along(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkserver_client, "RESTART_LIMIT_S", 0.0)
    forked = await server.fork("print('here', flush=True); import time; time.sleep(60)")
    assert await forked.line() == "here"
    server.process.kill()
    assert await asyncio.wait_for(forked.process.wait(), PATIENCE_S) is None
    await until(lambda: not is_alive(forked.pid), "the rank lives on")
    with pytest.raises(ForkFailed, match=r"fork\.sock"):
        await list_tasks(server.path)
    with pytest.raises(ForkFailed, match=r"fork\.sock"):
        await server.fork("")


async def test_who_forks_while_the_forkserver_starts_again_waits_for_it(light: Server) -> None:
    light.process.kill()
    light.process.wait(timeout=PATIENCE_S)
    asked = asyncio.ensure_future(light.fork(""))
    await asyncio.sleep(0)  # so that it finds no server, but a dead server's socket
    assert not asked.done()
    light.start_again()
    forked = await asyncio.wait_for(asked, PATIENCE_S)
    assert (await forked.end())[0] == 0


@pytest.mark.parametrize(
    "request_line", [b"{", b"[]", b'{"op": "rank", "task": {}}', b'{"op": null}']
)
async def test_a_bad_request_is_refused_and_the_others_stay(
    server: Server, request_line: bytes
) -> None:
    forked = await server.fork("import time; print('here', flush=True); time.sleep(60)")
    reader, writer = await asyncio.open_unix_connection(server.path)
    writer.write(request_line + b"\n")
    assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    writer.close()
    assert [each["pid"] for each in await list_tasks(server.path)] == [forked.pid]
    forked.process.abandon()


async def test_the_real_one_runs_scripts_and_the_store_with_torch_at_hand(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('torch' in sys.modules, __name__, sys.argv[1:])\n")
    spec = JobSpec.model_validate({"script": {"entrypoint": str(script), "args": ["a"]}})
    document = spec.model_dump(mode="json")
    described = json.loads(
        rank_task(
            spec=document, spool_dir=str(tmp_path / "spool"), work_dir=str(tmp_path / "work")
        ).to_json()
    )
    server = Server("ray_workers.node.forkserver.server")
    try:
        await server.serves()
        rank = Forked(await ForkedProcess.start(server.path, {"op": "rank", "task": described}))
        assert await rank.end() == (0, "True __main__ ['a']\n")
        request = {"op": "store", "address": "127.0.0.1", "temp_dir": str(tmp_path)}
        store = Forked(await ForkedProcess.start(server.path, request))
        port, secret = (await store.line()).split()
        assert 0 < int(port) < 65536
        assert len(bytes.fromhex(secret)) == 32
        store.process.abandon()
        await until(lambda: not is_alive(store.pid), "the store lives on")
        if packs():  # while there are no requests
            await until(lambda: huge_mib(server.process.pid) > 64, "a fork copies small pages")
    finally:
        server.close()
