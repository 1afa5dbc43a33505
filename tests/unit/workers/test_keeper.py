"""A forkserver that is killed is started again, and what it could not take along is ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ray_workers.node import forkserver_manager as keeper_module
from ray_workers.node import session_records
from ray_workers.node.forkserver_client import list_tasks
from ray_workers.node.forkserver_manager import ForkserverManager
from ray_workers.shared.silence import SilenceLimits
from tests.unit.workers.forked import PATIENCE_S, fork, is_alive, until
from tests.unit.workers.test_escapes import AS_A_PROGRAM, ESCAPE

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def kept(
    module: str, silence_limit_s: float = 60.0
) -> AsyncIterator[tuple[ForkserverManager, str, Path]]:
    with tempfile.TemporaryDirectory(prefix="keep") as folder:
        path = str(Path(folder, "fork.sock"))
        keeper = ForkserverManager(Path(folder), path, module, SilenceLimits(silence_limit_s))
        keeping = asyncio.ensure_future(keeper.keep())
        try:
            yield keeper, path, Path(folder)
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})
            await asyncio.to_thread(keeper.stop)


async def serves(keeper: ForkserverManager) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await keeper.problem() is not None:
            await asyncio.sleep(0.05)


async def test_a_killed_forkserver_serves_again_with_nothing_left_of_the_one_before() -> None:
    async with kept("tests.unit.workers.light_forkserver") as (keeper, path, folder):
        assert await asyncio.wait_for(keeper.problem(), PATIENCE_S) is None
        code = ESCAPE.format(then=AS_A_PROGRAM) + "time.sleep(600)"
        forked = await fork(path, code, job_id="j", attempt=1, rank=0)
        escapee = int(await forked.line())
        before = keeper.pid
        os.kill(before, signal.SIGKILL)
        assert await asyncio.wait_for(forked.process.wait(), PATIENCE_S) is None
        await until(lambda: not is_alive(escapee), "what the rank had started lives on")
        assert not is_alive(forked.pid)
        await until(lambda: keeper.pid != before, "it is not started again")
        await serves(keeper)
        assert await list_tasks(path) == []
        again = await fork(path, "print('again')")
        assert await again.end() == (0, "again\n")
        await until(
            lambda: not session_records.read_sessions(session_records.sessions_dir(folder)),
            "records",
        )


async def test_a_stopped_forkserver_is_told_of_and_replaced_and_a_short_stop_is_harmless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper_module, "PING_S", 0.05)
    async with kept("tests.unit.workers.light_forkserver", 4.0) as (keeper, path, _):
        assert await asyncio.wait_for(keeper.problem(), PATIENCE_S) is None
        before = keeper.pid
        forked = await fork(path, "import time; time.sleep(600)", job_id="j", attempt=1, rank=0)
        os.kill(before, signal.SIGSTOP)
        await until(lambda: keeper.silent_since is not None, "nobody is told")
        os.kill(before, signal.SIGCONT)
        await until(lambda: keeper.silent_since is None, "it is silent though it answers")
        assert is_alive(forked.pid)
        os.kill(before, signal.SIGSTOP)
        assert await asyncio.wait_for(forked.process.wait(), PATIENCE_S) is None
        await until(lambda: keeper.pid != before, "it is not replaced")
        await until(lambda: not is_alive(forked.pid), "its rank lives on")
        await serves(keeper)


async def test_a_forkserver_that_was_stopped_when_its_agent_died_is_killed_by_the_next() -> None:
    async with kept("tests.unit.workers.light_forkserver") as (keeper, path, folder):
        assert await asyncio.wait_for(keeper.problem(), PATIENCE_S) is None
        forked = await fork(path, "import time; time.sleep(600)", job_id="j", attempt=1, rank=0)
        os.kill(keeper.pid, signal.SIGSTOP)
        limits = SilenceLimits(60.0)
        after = ForkserverManager(folder, path, "tests.unit.workers.light_forkserver", limits)
        try:
            assert await asyncio.wait_for(forked.process.wait(), PATIENCE_S) is None
            await until(lambda: not is_alive(forked.pid), "its rank lives on")
            await serves(after)
        finally:
            await asyncio.to_thread(after.stop)


async def test_one_that_can_not_start_says_why() -> None:
    async with kept("tests.unit.workers.no_such_module") as (keeper, _, _):
        problem = await asyncio.wait_for(keeper.problem(), PATIENCE_S)
        assert problem is not None
        assert "no_such_module" in problem
