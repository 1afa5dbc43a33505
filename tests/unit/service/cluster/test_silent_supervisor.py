"""A supervisor that is stopped holds up nobody who has something to tell it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ray_workers.shared.contracts import Drill, DrillKind, Grant
from service.cluster.port import AttemptRef
from service.cluster.ray import driver
from service.cluster.ray.driver import RayCluster
from tests.unit.service.cluster.test_node_agents import CONFIG

REF = AttemptRef("job-a", 1, "session", ("n",))


def never(*_: Any) -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(
    "tell",
    [
        lambda cluster: cluster.stop_attempt(REF),
        lambda cluster: cluster.preempt(REF, 5.0),
        lambda cluster: cluster.drill(REF, Drill("d", DrillKind.KILL, 0, None)),
        lambda cluster: cluster.grow(REF, Grant(1, (), None)),
    ],
    ids=["stop", "preempt", "drill", "grow"],
)
async def test_who_tells_it_something_hears_in_time_that_it_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, tell: Callable[[RayCluster], Awaitable[None]]
) -> None:
    monkeypatch.setattr(driver, "ANSWER_LIMIT_S", 0.05)
    cluster = RayCluster(CONFIG)
    method = SimpleNamespace(remote=never)
    stopped = SimpleNamespace(stop=method, preempt=method, drill=method, grow=method)
    cluster._supervisors[REF.job_id, REF.attempt] = stopped
    async with asyncio.timeout(10):
        with pytest.raises(TimeoutError):
            await tell(cluster)
