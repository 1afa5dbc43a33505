"""A forkserver that is killed is restarted, and the processes that survived it are ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import ray_workers
from ray_workers.node import session_records
from ray_workers.node.forkserver import manager as forkserver_manager
from ray_workers.node.forkserver.client import list_tasks
from ray_workers.node.forkserver.manager import ForkserverManager
from ray_workers.shared.processes.silence import SilenceLimits
from tests.unit.workers.forked import PATIENCE_S, fork, is_alive, until
from tests.unit.workers.node.test_escapes import AS_A_PROGRAM, ESCAPE


@contextlib.asynccontextmanager
async def managed(
    module: str, silence_limit_s: float = 60.0
) -> AsyncIterator[tuple[ForkserverManager, str, Path]]:
    with tempfile.TemporaryDirectory(prefix="fork") as folder:
        path = str(Path(folder, "fork.sock"))
        manager = ForkserverManager(Path(folder), path, module, SilenceLimits(silence_limit_s))
        running = asyncio.ensure_future(manager.run())
        try:
            yield manager, path, Path(folder)
        finally:
            running.cancel()
            await asyncio.wait({running})
            await asyncio.to_thread(manager.stop)


async def serves(manager: ForkserverManager) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await manager.problem() is not None:
            await asyncio.sleep(0.05)


async def test_a_killed_forkserver_serves_again_with_nothing_left_of_the_one_before() -> None:
    async with managed("tests.unit.workers.light_forkserver") as (manager, path, folder):
        assert await asyncio.wait_for(manager.problem(), PATIENCE_S) is None
        code = ESCAPE.format(then=AS_A_PROGRAM) + "time.sleep(600)"
        forked = await fork(path, code, job_id="j", attempt=1, rank=0)
        escapee = int(await forked.line())
        before = manager.pid
        os.kill(before, signal.SIGKILL)
        assert await asyncio.wait_for(forked.process.wait(), PATIENCE_S) is None
        await until(lambda: not is_alive(escapee), "what the rank had started lives on")
        await until(lambda: not is_alive(forked.pid), "its rank lives on")
        await until(lambda: manager.pid != before, "it is not started again")
        await serves(manager)
        assert await list_tasks(path) == []
        again = await fork(path, "print('again')")
        assert await again.end() == (0, "again\n")
        await until(
            lambda: not session_records.read_sessions(session_records.sessions_dir(folder)),
            "records",
        )


async def test_a_stopped_forkserver_is_reported_and_replaced_and_a_short_stop_is_harmless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forkserver_manager, "PING_S", 0.05)
    async with managed("tests.unit.workers.light_forkserver", 4.0) as (manager, path, _):
        assert await asyncio.wait_for(manager.problem(), PATIENCE_S) is None
        before = manager.pid
        forked = await fork(path, "import time; time.sleep(600)", job_id="j", attempt=1, rank=0)
        os.kill(before, signal.SIGSTOP)
        await until(lambda: manager.silent_since is not None, "the silence is not reported")
        os.kill(before, signal.SIGCONT)
        await until(lambda: manager.silent_since is None, "it is silent though it answers")
        assert is_alive(forked.pid)
        os.kill(before, signal.SIGSTOP)
        assert await asyncio.wait_for(forked.process.wait(), PATIENCE_S) is None
        await until(lambda: manager.pid != before, "it is not replaced")
        await until(lambda: not is_alive(forked.pid), "its rank lives on")
        await serves(manager)


async def test_a_forkserver_that_is_stopped_as_soon_as_it_serves_is_reported_and_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No ping was answered yet, but the forkserver is not importing any more."""
    monkeypatch.setattr(forkserver_manager, "PING_S", 0.5)
    async with managed("tests.unit.workers.light_forkserver", 4.0) as (manager, path, _):
        before = manager.pid
        await until(Path(path).exists, "it does not serve")
        os.kill(before, signal.SIGSTOP)
        await until(lambda: manager.silent_since is not None, "the silence is not reported")
        await until(lambda: manager.pid != before, "it is not replaced")
        assert "was killed because it did not respond" in str(manager._failure)
        await serves(manager)


async def test_a_forkserver_that_was_stopped_when_its_agent_died_is_killed_by_the_next() -> None:
    async with managed("tests.unit.workers.light_forkserver") as (manager, path, folder):
        assert await asyncio.wait_for(manager.problem(), PATIENCE_S) is None
        forked = await fork(path, "import time; time.sleep(600)", job_id="j", attempt=1, rank=0)
        os.kill(manager.pid, signal.SIGSTOP)
        limits = SilenceLimits(60.0)
        after = ForkserverManager(folder, path, "tests.unit.workers.light_forkserver", limits)
        try:
            assert await asyncio.wait_for(forked.process.wait(), PATIENCE_S) is None
            await until(lambda: not is_alive(forked.pid), "its rank lives on")
            await serves(after)
        finally:
            await asyncio.to_thread(after.stop)


async def test_a_rank_can_import_dray_but_not_the_other_packages() -> None:
    """A script that imports Hugging Face's `datasets` must not get `ray_workers.datasets`."""
    async with managed("tests.unit.workers.light_forkserver") as (manager, path, _):
        assert await asyncio.wait_for(manager.problem(), PATIENCE_S) is None
        rank = await fork(path, "import os; print(os.environ['PYTHONPATH'])")
        first = Path((await rank.end())[1].split(os.pathsep)[0].strip())
    assert first == Path(ray_workers.__file__).parents[1]


async def test_a_forkserver_that_can_not_start_reports_why() -> None:
    async with managed("tests.unit.workers.no_such_module") as (manager, _, _):
        problem = await asyncio.wait_for(manager.problem(), PATIENCE_S)
        assert problem is not None
        assert "no_such_module" in problem
