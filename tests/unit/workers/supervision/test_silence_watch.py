"""Processes of a group that are stopped, and not dead, are reported and then ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ray_workers.node import compat_ray
from ray_workers.shared.contracts import ProcessKind
from ray_workers.shared.processes.machine_speed import MachineSpeed
from ray_workers.supervision import silence_watch
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.silence_watch import SilenceWatch
from tests.wire import attempt_spec

SPEC = attempt_spec(silence_limit_s=2.0)
PATIENCE_S = 30.0
QUICK = Timings(ping_period_s=0.02, ping_limit_s=0.02)


class Group:
    """A store that a test stops, and rank actors that it adds."""

    def __init__(self) -> None:
        self.running: list[Any] = []
        self.spares: list[Any] = []
        self.goes = asyncio.Event()
        self.goes.set()
        self.is_ended = False
        self.num_answers = 0

    async def store_answers(self) -> None:
        await self.goes.wait()
        self.num_answers += 1

    def end_store(self) -> None:
        self.is_ended = True
        self.goes.set()


def stopped_actor(name: str, node_id: str) -> SimpleNamespace:
    def ping() -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    actor = SimpleNamespace(
        _actor_id=SimpleNamespace(hex=lambda: name), ping=SimpleNamespace(remote=ping)
    )
    return SimpleNamespace(actor=actor, node_id=node_id, is_running=True)


@contextlib.asynccontextmanager
async def watched(group: Group) -> AsyncIterator[SilenceWatch]:
    watch = SilenceWatch(SPEC, group, MachineSpeed(), QUICK)  # type: ignore[arg-type]
    running = asyncio.ensure_future(watch.run())
    try:
        yield watch
    finally:
        running.cancel()
        await asyncio.wait({running})
    assert watch.silent() == ()


async def until(probe: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not probe():
            await asyncio.sleep(0.01)


async def test_a_stopped_store_is_reported_and_then_killed() -> None:
    group = Group()
    async with watched(group) as watch:
        await until(lambda: group.num_answers > 2)
        assert watch.silent() == ()
        group.goes.clear()
        await until(watch.silent)
        assert [one.kind for one in watch.silent()] == [ProcessKind.STORE]
        assert not group.is_ended
        await until(lambda: group.is_ended)


async def test_a_short_stop_of_the_store_is_harmless() -> None:
    group = Group()
    async with watched(group) as watch:
        group.goes.clear()
        await until(watch.silent)
        group.goes.set()
        await until(lambda: not watch.silent())
    assert not group.is_ended


async def test_a_stopped_rank_actor_is_ended_though_ending_another_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, ended = Group(), []

    def end_actor(actor: Any) -> None:
        ended.append(compat_ray.actor_id_of(actor))
        if compat_ray.actor_id_of(actor) == "a":
            raise TimeoutError("its node does not answer")

    monkeypatch.setattr(silence_watch, "end_actor", end_actor)
    group.running = [stopped_actor("a", "n"), stopped_actor("b", "n")]
    async with watched(group) as watch:
        await until(watch.silent)
        assert [(one.kind, one.node_id) for one in watch.silent()] == [
            (ProcessKind.RANK_ACTOR, "n")
        ]
        await until(lambda: ended.count("a") > 1 and "b" in ended)
