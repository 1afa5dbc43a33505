"""The node agent, without Ray."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle

from dray.train.spool import SpoolWriter, begin_count, known
from ray_workers.node import agent
from ray_workers.node.ray_calls import brief
from ray_workers.shared.contracts import FrameKind
from ray_workers.shared.heartbeat import HeartbeatPage, page_path, prefix_of
from ray_workers.shared.paths import NODE_TMPDIR, page_dir, runtime_dir, spool_dir
from ray_workers.shared.processes.procfs import boot_id, pid_namespace, started_ticks


def node_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def start_forkserver(directory: Path, *_: object) -> None:
        (directory / "forkserver.log").touch()
        (directory / "spool").mkdir()

    context = SimpleNamespace(get_node_id=lambda: "0" * 56)
    monkeypatch.setattr(agent.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(agent, "ForkserverManager", start_forkserver)
    monkeypatch.setenv(NODE_TMPDIR, str(tmp_path))
    actor_class: Any = agent.NodeAgent
    before = os.umask(0o022)
    try:
        return actor_class.__ray_actor_class__("deployment", 60.0)
    finally:
        os.umask(before)


def test_ray_can_send_the_agents_class_to_a_node() -> None:
    """Ray pickles the class by value, with every global that a method uses."""
    actor_class: Any = agent.NodeAgent
    assert cloudpickle.dumps(actor_class.__ray_actor_class__)


def test_files_of_an_agent_and_its_forkserver_are_their_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_agent(tmp_path, monkeypatch)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert {"forkserver.log", "spool"} < set(modes)
    assert [name for name, mode in modes.items() if mode & 0o077] == []


async def test_an_observation_brings_system_metrics_where_they_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, sampled = node_agent(tmp_path, monkeypatch), []

    async def sample(*attempt: Any) -> dict[int, dict[str, float]]:
        sampled.append(attempt)
        return {0: {"system/cpu": 1.0}}

    monkeypatch.setattr(node._system_metrics, "sample", sample)
    assert (await node.observe("job", 1, True, False)).system_metrics == {}
    assert (await node.observe("job", 1, False, True)).system_metrics == {0: {"system/cpu": 1.0}}
    assert sampled == [("job", 1)]


async def test_the_speed_of_a_rank_is_that_of_the_thread_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, sampled = node_agent(tmp_path, monkeypatch), []
    folder = page_dir("deployment", "0" * 56, "job", 1)
    pages = [HeartbeatPage(page_path(prefix_of(folder, rank, 0))) for rank in range(2)]
    pages[1].trains_in(4711)

    def sample(threads: Iterable[int]) -> float:
        sampled.extend(threads)
        return 3.0

    monkeypatch.setattr(node, "_waits", SimpleNamespace(sample=sample))
    assert await node.slowness("job", 1) == 3.0
    assert sampled[:2] == [os.getpid(), 4711]


async def test_what_a_stopped_rank_actor_keeps_alive_is_killed_before_slots_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is whole, so the forkserver does not know that the process is unwanted."""
    alive = [("j", 1, 0), ("j", 1, -1), ("j", 2, 0), ("k", 1, 0)]
    killed = []

    async def list_tasks(_: Path) -> list[dict[str, Any]]:
        names = ("job_id", "attempt", "rank")
        return [{**dict(zip(names, task, strict=True)), "pid": 7, "left": []} for task in alive]

    async def send_to_rank(_: Path, *task: Any) -> list[int]:
        killed.append(task)
        return [7]

    async def held_slots() -> list[Any]:
        return []

    monkeypatch.setattr(agent, "list_tasks", list_tasks)
    monkeypatch.setattr(agent, "send_to_rank", send_to_rank)
    monkeypatch.setattr(agent.placement_groups, "held_slots", held_slots)
    node = node_agent(tmp_path, monkeypatch)
    assert await node.running("j", 1) == 1
    assert await node.running("j", 1, [5]) == 0
    assert killed == [], "asking harms no process"
    assert await node.quarantine("j", 1)
    assert killed == [("j", 1, 0, signal.SIGKILL), ("j", 1, -1, signal.SIGKILL)]
    (entry,) = node._book.entries()
    await node._try_again(entry)
    assert len(killed) == 4, "again, until nothing is left"
    alive[:2] = []
    assert not await node.quarantine("j", 1)


async def test_an_agent_reports_that_its_disk_takes_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = node_agent(tmp_path, monkeypatch)

    async def none() -> None:
        return None

    monkeypatch.setattr(here, "_begin", lambda: None)
    monkeypatch.setattr(here, "_problem", none)
    monkeypatch.setattr(agent, "own_address", lambda: "127.0.0.1")
    assert (await here.describe(None)).full is None

    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    full = (await here.describe(None)).full
    assert full == f"no file can be written to {here._directory}: Read-only file system"


async def test_a_rank_learns_what_is_stored_before_it_writes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that waits for its end writes nothing in the meantime."""
    node = node_agent(tmp_path, monkeypatch)
    spool = spool_dir("deployment", "0" * 56, "j", 1) / "r0.0.metrics"
    writer = SpoolWriter(spool, limit_bytes=1 << 20)
    begin_count(spool)
    writer.append(FrameKind.METRICS, {"step": 1})
    stored = writer.position
    asked = asyncio.ensure_future(node.read("j", 1, {"r0.0.metrics": stored}, 1 << 20, 600.0))
    while known(spool).stored < stored:
        assert not asked.done()
        await asyncio.sleep(0.001)
    writer.append(FrameKind.METRICS, {"step": 2})
    assert list((await asked).data) == ["r0.0.metrics"]
    writer.close()


async def test_what_an_attempt_left_on_a_dead_node_of_the_machine_is_read_and_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = node_agent(tmp_path, monkeypatch)
    folders = [runtime_dir("deployment", f"{number}" * 56) for number in (1, 2)]
    dead, alive = folders
    for folder, raylet in ((dead, 1 << 22), (alive, os.getpid())):
        spool = folder / "spool" / "j" / "1"
        writer = SpoolWriter(spool / "r0.0.metrics", limit_bytes=1 << 20)
        for step in range(3):
            writer.append(FrameKind.METRICS, {"step": step})
        assert writer.flush()
        writer.close()
        owner = {"place": pid_namespace(), "boot_id": boot_id(), "raylet": raylet}
        owner["started"] = started_ticks(os.getpid())
        (folder / "owner.json").write_text(json.dumps(owner))
    assert await node.spooled() == [("j", 1)]
    whole = (await node.read_left("j", 1, {}, 1 << 20))["r0.0.metrics"]
    lines = whole.splitlines(keepends=True)
    assert [json.loads(line)["body"]["step"] for line in lines] == [0, 1, 2]
    rest = await node.read_left("j", 1, {"r0.0.metrics": len(lines[0])}, 1 << 20)
    assert rest == {"r0.0.metrics": b"".join(lines[1:])}
    assert await node.read_left("j", 1, {"r0.0.metrics": len(whole)}, 1 << 20) == {}
    assert await node.read_left("j", 2, {}, 1 << 20) == {}
    await node.drop("j", 1)
    assert await node.spooled() == []
    assert (alive / "spool" / "j" / "1").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "\x1b[36mray::RankActor.start()\x1b[39m (pid=7)\n    raise ForkFailed(why)\n"
            "ray_workers.node.forkserver.client.ForkFailed: no answer: [Errno 104] reset\n",
            "ForkFailed: no answer: [Errno 104] reset",
        ),
        ("the actor died: 10.0.0.1: gone\n----\n", "the actor died: 10.0.0.1: gone"),
        ("", "RuntimeError"),
    ],
)
def test_an_error_of_rays_is_shown_in_a_line(text: str, words: str) -> None:
    assert brief(RuntimeError(text)) == words
