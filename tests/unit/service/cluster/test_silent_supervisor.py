"""A suspended supervisor does not delay the processes that send it commands."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ray_workers.shared.commands import Stop
from service.cluster.port import AttemptRef
from service.cluster.ray import driver
from service.cluster.ray.driver import RayCluster
from tests.unit.service.cluster.test_node_agents import CONFIG

REF = AttemptRef("job-a", 1, "session", ("n",))


def never(*_: Any) -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def test_who_sends_it_a_command_hears_in_time_that_it_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "ANSWER_LIMIT_S", 0.05)
    cluster = RayCluster(CONFIG)
    stopped = SimpleNamespace(carry_out=SimpleNamespace(remote=never))
    cluster._supervisors[REF.job_id, REF.attempt] = stopped
    async with asyncio.timeout(10):
        with pytest.raises(TimeoutError):
            await cluster.send(REF, Stop())
