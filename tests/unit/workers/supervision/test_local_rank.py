"""A rank without an actor is called like an actor, and holds nothing once it is closed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import RayActorError

from ray_workers.shared.contracts import AttemptSpec
from ray_workers.shared.slices import Slice
from ray_workers.supervision.local_rank import LocalRank, end_all, is_local, kill
from tests.wire import attempt_spec

ALONE: dict[str, Any] = {"slices": (Slice("a", 1),), "bundle": {"CPU": 1.0}}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, True),
        ({"bundle": {"CPU": 1.0, "GPU": 0.5}}, False),
        ({"slices": (Slice("b", 1),)}, False),
        ({"slices": (Slice("a", 2),)}, False),
        ({"min_workers": 1}, False),
    ],
)
def test_only_a_lonely_rank_without_a_gpu_on_the_supervisors_node_needs_no_actor(
    more: dict[str, Any], expected: bool
) -> None:
    spec: AttemptSpec = attempt_spec(**{**ALONE, **more})
    assert is_local(spec, "a") is expected


class Rank:
    def __init__(self) -> None:
        self.num_closed = 0

    async def add(self, a: int, b: int) -> int:
        return a + b

    async def wait(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def fail(self) -> None:
        raise OSError("no space")

    def close(self) -> None:
        self.num_closed += 1


async def test_it_is_called_like_an_actor() -> None:
    rank: Any = Rank()
    local = LocalRank(rank)
    assert await local.add.remote(1, 2) == 3
    with pytest.raises(OSError, match="no space"):
        await local.fail.remote()


async def test_the_calls_of_a_closed_rank_fail_like_those_of_a_dead_actor() -> None:
    rank: Any = Rank()
    local = LocalRank(rank)
    waiting = local.wait.remote()
    await asyncio.sleep(0)
    kill(local)
    with pytest.raises(RayActorError):
        await waiting
    await end_all([local])
    assert rank.num_closed == 2
    assert not local._calls


async def test_a_cancelled_call_of_a_living_rank_is_cancelled() -> None:
    rank: Any = Rank()
    waiting = LocalRank(rank).wait.remote()
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
