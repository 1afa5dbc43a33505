"""A shared supervisor runs one attempt after another, and confuses none with another."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ray_workers.node import compat_ray
from ray_workers.shared.commands import Command, Stop
from ray_workers.shared.contracts import AttemptSpec
from ray_workers.supervision import supervisor
from tests.wire import attempt_spec

FIRST, SECOND = ("job", 1), ("job-b", 1)


class Run:
    """An attempt in which nothing happens."""

    def __init__(self, spec: AttemptSpec) -> None:
        self.commands: list[Command] = []
        self.was_routine = True
        self.is_dropped = False

    async def poll(self, *_: Any) -> str:
        return "reply"

    async def carry_out(self, command: Command) -> None:
        self.commands.append(command)

    async def drop(self) -> None:
        self.is_dropped = True


def spec_of(key: tuple[str, int], **more: Any) -> AttemptSpec:
    own = {"spec": {"name": "digits"}, **more}
    return attempt_spec(job_id=key[0], attempt=key[1], array_index=0, **own)


def shared(monkeypatch: pytest.MonkeyPatch, name: str | None = "dray:shared-supervisor:7") -> Any:
    """Return a supervisor that runs the attempt FIRST."""
    context = SimpleNamespace(get_node_id=lambda: "a")
    monkeypatch.setattr(supervisor.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(compat_ray, "use_exported_class", lambda actor_class, descriptor: None)
    monkeypatch.setattr(supervisor, "AttemptRun", Run)
    actor_class: Any = supervisor.Supervisor
    return actor_class.__ray_actor_class__(spec_of(FIRST), b"", name)


async def test_calls_for_another_attempt_have_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    one = shared(monkeypatch)
    assert await one.poll(FIRST, {}, 0.0, 1) == "reply"
    await one.acknowledge(FIRST)
    assert await one.reserve()
    await one.begin(spec_of(SECOND))
    assert not await one.reserve(), "it runs an attempt"
    await one.carry_out(FIRST, Stop())
    assert await one.acknowledge(FIRST) is None
    assert (one._run.commands, one._run.is_dropped) == ([], False)
    assert await one.poll(FIRST, {}, 0.0, 1) is None
    await one.begin(spec_of(FIRST))
    assert one._key == SECOND


async def test_an_attempt_that_was_reported_as_lost_never_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = shared(monkeypatch)
    await one.acknowledge(FIRST)
    assert await one.poll(SECOND, {}, 0.0, 1) is None
    await one.begin(spec_of(SECOND))
    assert await one.poll(SECOND, {}, 0.0, 1) is None


async def test_it_runs_only_jobs_of_the_same_owner_and_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = shared(monkeypatch)
    await one.acknowledge(FIRST)
    spec = spec_of(SECOND, spec={"name": "another"})
    await one.begin(spec)
    assert await one.reserve()
    assert supervisor.series_of(attempt_spec()) is None, "the job is not in an array"


@pytest.mark.parametrize(
    ("name", "was_routine", "num_attempts", "stays"),
    [
        ("dray:shared-supervisor:7", True, 1, True),
        ("dray:shared-supervisor:7", False, 1, False),
        ("dray:shared-supervisor:7", True, supervisor.MAX_ATTEMPTS, False),
        (None, True, 1, False),
    ],
)
async def test_it_stays_only_after_a_routine_attempt_of_a_shared_supervisor(
    monkeypatch: pytest.MonkeyPatch,
    name: str | None,
    was_routine: bool,
    num_attempts: int,
    stays: bool,
) -> None:
    one = shared(monkeypatch, name)
    one._run.was_routine, one._num_attempts, run = was_routine, num_attempts, one._run
    farewell = await one.acknowledge(FIRST)
    assert (farewell.idle_as, farewell.was_routine) == (name if stays else None, was_routine)
    assert run.is_dropped


async def test_an_idle_supervisor_ends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    has_ended = asyncio.Event()
    monkeypatch.setattr(supervisor, "IDLE_S", 0.01)
    monkeypatch.setattr(supervisor, "_end_own_process", has_ended.set)
    one = shared(monkeypatch)
    await one.acknowledge(FIRST)
    async with asyncio.timeout(30):
        await has_ended.wait()
    assert not await one.reserve(), "its process is about to exit"
    await one.begin(spec_of(SECOND))
    assert one._run is None


async def test_a_supervisor_that_fails_to_begin_an_attempt_ends_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(spec: AttemptSpec) -> None:
        raise OSError("no space left on device")

    has_ended = asyncio.Event()
    monkeypatch.setattr(supervisor, "IDLE_S", 0.01)
    monkeypatch.setattr(supervisor, "_end_own_process", has_ended.set)
    one = shared(monkeypatch)
    await one.acknowledge(FIRST)
    monkeypatch.setattr(supervisor, "AttemptRun", fails)
    with pytest.raises(OSError, match="no space"):
        await one.begin(spec_of(SECOND))
    async with asyncio.timeout(30):
        await has_ended.wait()
