"""Which supervisor an attempt gets: a new one, or an idle one of its array; without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from ray_workers.shared.contracts import AttemptSpec
from ray_workers.supervision.supervisor import Farewell, series_of
from service.cluster.ray import launch_once, supervisors
from service.cluster.ray.supervisors import Supervisors
from tests.wire import attempt_spec

SPEC = attempt_spec(array_index=0, spec={"name": "digits"})
SHORT = Farewell(series_of(SPEC), was_routine=True, idle_as=None, node_id="a")


class Actor:
    """A supervisor that responds to `reserve` with `answer`; None if it is suspended."""

    def __init__(self, answer: bool | Exception | None) -> None:
        self.begun: list[AttemptSpec] = []
        self._answer = answer
        self.reserve = SimpleNamespace(remote=self._reserve)
        self.begin = SimpleNamespace(remote=self._begin)

    async def _reserve(self) -> bool:
        if isinstance(self._answer, Exception):
            raise self._answer
        if self._answer is None:
            await asyncio.get_running_loop().create_future()
        return bool(self._answer)

    async def _begin(self, spec: AttemptSpec) -> None:
        self.begun.append(spec)


class Pool:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all = Supervisors("d")
        self.created: list[str | None] = []
        self.claimed: list[str] = []
        self.killed: list[Any] = []
        self.ended: list[Any] = []

        async def create(spec: AttemptSpec, shared: str | None) -> str:
            self.created.append(shared)
            return "new"

        def claim(deployment_id: str, job_id: str, attempt: int, name: str) -> None:
            self.claimed.append(name)

        monkeypatch.setattr(supervisors, "_create", create)
        monkeypatch.setattr(launch_once, "claim_launch", claim)
        monkeypatch.setattr(supervisors.ray, "kill", self.killed.append)
        monkeypatch.setattr(supervisors, "end_actor", self.ended.append)
        monkeypatch.setattr(supervisors, "RESERVE_LIMIT_S", 0.05)

    async def launch(self, spec: AttemptSpec = SPEC, drained: Sequence[str] = ()) -> Any:
        return await (await self.all.claim(spec, drained))

    async def with_idle(self, *actors: Actor) -> None:
        for number, actor in enumerate(actors):
            await self.all.dismiss(
                actor, replace(SHORT, idle_as=f"dray:shared-supervisor:{number}")
            )


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    return Pool(monkeypatch)


async def test_supervisors_are_shared_once_an_attempt_of_the_array_was_short(pool: Pool) -> None:
    await pool.launch()
    await pool.all.dismiss("first", SHORT)
    assert pool.killed == ["first"]
    await pool.launch()
    await pool.launch(attempt_spec(spec={"name": "digits"}))
    await pool.launch(replace(SPEC, spec={**SPEC.spec, "name": "another"}))
    first, second, *others = pool.created
    assert (first, others) == (None, [None, None])
    assert second is not None
    own = f"dray:{SPEC.job_id}:{SPEC.attempt}:supervisor"
    assert pool.claimed == [own, second, own, own]


async def test_an_idle_supervisor_gets_one_attempt_of_its_array(pool: Pool) -> None:
    idle = Actor(True)
    await pool.with_idle(idle)
    assert await pool.launch(attempt_spec()) == "new", "the job is not in the array"
    assert await pool.launch(drained=["a"]) == "new", "its node is about to leave"
    assert await pool.launch() is idle
    assert pool.claimed[-1] == "dray:shared-supervisor:0"
    assert await pool.launch() == "new"
    assert idle.begun == [SPEC]


async def test_launches_at_the_same_time_get_different_supervisors(pool: Pool) -> None:
    idle = [Actor(True), Actor(True)]
    await pool.with_idle(*idle)
    got = await asyncio.gather(*(pool.launch() for _ in range(4)))
    assert got.count("new") == 2
    assert [len(actor.begun) for actor in idle] == [1, 1]


async def test_supervisors_that_have_exited_are_passed_over(pool: Pool) -> None:
    alive = Actor(True)
    await pool.with_idle(alive, Actor(ActorDiedError()), Actor(False))
    assert await pool.launch() is alive
    assert not pool.ended


async def test_a_suspended_supervisor_is_ended_and_delays_no_launch_for_long(pool: Pool) -> None:
    suspended = Actor(None)
    await pool.with_idle(suspended)
    async with asyncio.timeout(30):
        assert await pool.launch() == "new"
        while not pool.ended:
            await asyncio.sleep(0)
    assert pool.ended == [suspended]
    assert not suspended.begun


async def test_a_suspended_supervisor_that_nobody_needs_is_ended(
    monkeypatch: pytest.MonkeyPatch, pool: Pool
) -> None:
    monkeypatch.setattr(supervisors, "IDLE_S", 0.01)
    suspended = Actor(None)
    await pool.with_idle(suspended)
    async with asyncio.timeout(30):
        while not pool.ended:
            await asyncio.sleep(0.01)
    assert pool.ended == [suspended]


async def test_a_supervisor_whose_attempt_is_not_launched_is_ended(
    monkeypatch: pytest.MonkeyPatch, pool: Pool
) -> None:
    def claim(*_: object) -> None:
        raise launch_once.LaunchedBefore

    reserved = Actor(True)
    await pool.with_idle(reserved)
    monkeypatch.setattr(launch_once, "claim_launch", claim)
    with pytest.raises(launch_once.LaunchedBefore):
        await pool.launch()
    async with asyncio.timeout(30):
        while not pool.ended:
            await asyncio.sleep(0)
    assert pool.ended == [reserved]
    assert not reserved.begun
