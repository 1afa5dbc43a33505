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

from ray_workers import records
from ray_workers.forking import list_tasks
from ray_workers.keeper import ForkserverKeeper
from tests.unit.workers.forked import PATIENCE_S, fork, is_alive, until
from tests.unit.workers.test_escapes import AS_A_PROGRAM, ESCAPE

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def kept(module: str) -> AsyncIterator[tuple[ForkserverKeeper, str, Path]]:
    with tempfile.TemporaryDirectory(prefix="keep") as folder:
        path = str(Path(folder, "fork.sock"))
        keeper = ForkserverKeeper(Path(folder), path, module)
        keeping = asyncio.ensure_future(keeper.keep())
        try:
            yield keeper, path, Path(folder)
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})
            await asyncio.to_thread(keeper.stop)


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

        async def serves() -> bool:
            return await keeper.problem() is None

        async with asyncio.timeout(PATIENCE_S):
            while not await serves():
                await asyncio.sleep(0.05)
        assert await list_tasks(path) == []
        again = await fork(path, "print('again')")
        assert await again.end() == (0, "again\n")
        await until(lambda: not records.read_sessions(records.sessions_dir(folder)), "records")


async def test_one_that_can_not_start_says_why() -> None:
    async with kept("tests.unit.workers.no_such_module") as (keeper, _, _):
        problem = await asyncio.wait_for(keeper.problem(), PATIENCE_S)
        assert problem is not None
        assert "no_such_module" in problem
