"""Short attempts of one array share a supervisor, on a real Ray: nothing passes from one to the
next, and an idle supervisor that dies or stops costs no attempt."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import textwrap
from collections.abc import Set
from pathlib import Path

import pytest

from ray_workers.shared.commands import Stop
from ray_workers.shared.contracts import Cause, Phase, PollReply
from ray_workers.supervision.supervisor import IDLE_S
from service.cluster.port import AttemptRef, ClusterUnavailable
from service.cluster.ray.gateway import GatewayCluster
from tests.contract.grounds import Ground, eventually, frames_of, lines_of
from tests.integration.harness import children_of, command_line, supervisors_of
from tests.marks import soak

pytestmark = [
    pytest.mark.ray,
    pytest.mark.parametrize("_cluster", ["ray"], indirect=True),
]

LEAVES_MARKS = """
    import builtins, json, os, random, socket, sys, tempfile, threading
    from pathlib import Path
    mark, temporary = "leftover", Path(tempfile.gettempdir())
    print(json.dumps({
        "variables": sorted(os.environ),
        "values": mark in " ".join(os.environ.values()),
        "files": sorted(path.name for path in temporary.rglob("*")),
        "num_fds": len(os.listdir("/proc/self/fd")),
        "drawn": random.random(),
        "modules": len(sys.modules),
        "threads": threading.active_count(),
        "memory": hasattr(builtins, mark),
        "socket": mark.encode() in Path("/proc/net/unix").read_bytes(),
        "umask": os.umask(0),
        "folder": str(temporary),
    }))
    os.environ["LEFTOVER"] = mark
    setattr(builtins, mark, True)
    random.seed(7)
    (temporary / mark).write_text(mark)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("\\0" + mark)
"""


def supervisors(ground: Ground) -> Set[int]:
    """Return the pids of the running supervisors of this cluster."""
    instance = json.loads((ground._home / "ray" / "daemon.json").read_text())["instance"]
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_supervisor = (folder / "cmdline").read_bytes().startswith(b"ray::Supervisor")
            if is_supervisor and instance.encode() in (folder / "environ").read_bytes():
                found.add(int(folder.name))
    return found


async def idle(ground: Ground) -> int:
    """Return the pid of a supervisor that has become idle at this moment."""
    for _ in range(2):  # the first attempt shows that the array's attempts are short
        before = supervisors(ground)
        assert (
            await ground.settle(await ground.launch("steps", array_index=0))
        ).outcome is not None
    (pid,) = supervisors(ground) - before or supervisors(ground)
    return pid


async def is_over(ground: Ground, pid: int) -> bool:
    return pid not in supervisors(ground)


def runs(reply: PollReply) -> bool:
    return reply.phase is Phase.RUNNING


async def outcome(ground: Ground, ref: AttemptRef) -> Cause:
    reply = await ground.settle(ref)
    assert reply.outcome is not None
    return reply.outcome.cause


async def test_nothing_passes_from_one_attempt_to_the_next(ground: Ground) -> None:
    pid = await idle(ground)
    (ground._home / "marks.py").write_text(textwrap.dedent(LEAVES_MARKS))
    seen, num_held = [], []
    for _ in range(4):
        replies = await ground.follow(ref := await ground.launch("marks", array_index=0))
        await ground.cluster.acknowledge(ref)
        seen.append(json.loads("".join(text for _, text in lines_of(frames_of(replies), 0))))
        assert pid in supervisors(ground), "it was not reused"
        num_held.append(len([*Path(f"/proc/{pid}/fd").iterdir()]))
    for own in ("drawn", "folder"):
        assert len({one.pop(own) for one in seen}) == len(seen)
    for one in seen:
        found = {name: one.pop(name) for name in ("values", "memory", "socket", "files")}
        assert found == {"values": False, "memory": False, "socket": False, "files": []}
        assert one == seen[0]
    assert len(set(num_held[1:])) == 1, num_held


async def test_an_idle_supervisor_exits_on_its_own(ground: Ground) -> None:
    pid = await idle(ground)
    assert await eventually(lambda: is_over(ground, pid), "the idle supervisor is still there")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_idle_supervisor_that_dies_or_stops_costs_no_attempt(
    ground: Ground, number: int
) -> None:
    pid = await idle(ground)
    os.kill(pid, number)
    assert await outcome(ground, await ground.launch("steps", array_index=0)) is Cause.SUCCEEDED
    assert await eventually(lambda: is_over(ground, pid), "the stopped supervisor is still there")


@pytest.mark.parametrize("number", [signal.SIGKILL, soak(signal.SIGSTOP)])
async def test_a_reused_supervisor_that_dies_or_stops_is_lost_like_any_other(
    ground: Ground, number: int
) -> None:
    pid = await idle(ground)
    ref = await ground.launch("waits", array_index=0)
    os.kill(pid, number)
    assert await outcome(ground, ref) is Cause.SUPERVISOR_LOST
    assert await eventually(lambda: is_over(ground, pid), "the lost supervisor is still there")
    assert await eventually(ground.all_free, "the slots of the lost attempt are held")


async def test_a_gcs_that_is_suspended_briefly_costs_no_attempt(ground: Ground) -> None:
    spec = await ground.spec("steps", array_index=0)
    ref = await ground.ref(spec)
    pid = await idle(ground)
    daemon = json.loads((ground._home / "ray" / "daemon.json").read_text())
    (gcs,) = (one for one in children_of(daemon["pid"]) if "gcs_server" in command_line(one))
    os.kill(gcs, signal.SIGSTOP)
    try:
        launching = asyncio.ensure_future(ground.cluster.launch(spec))
        await asyncio.sleep(2 * IDLE_S)  # the reserved supervisor waits longer than an idle one
    finally:
        os.kill(gcs, signal.SIGCONT)
    await launching
    assert await outcome(ground, ref) is Cause.SUCCEEDED
    assert pid in supervisors(ground), "it was not reused"


async def test_another_gateway_finds_the_attempt_of_a_reused_supervisor(ground: Ground) -> None:
    pid = await idle(ground)
    ref = await ground.launch("waits", array_index=0)
    await ground.follow(ref, until=runs)
    assert isinstance(ground.cluster, GatewayCluster)
    assert ground.cluster.pid is not None
    os.kill(ground.cluster.pid, signal.SIGKILL)

    async def answers() -> bool:
        try:
            return (await ground.poll(ref)).phase is Phase.RUNNING
        except ClusterUnavailable:
            return False

    await eventually(answers, "the attempt was not found")
    found = await ground.cluster.attempts()
    assert [(one.job_id, one.attempt) for one in found] == [(ref.job_id, ref.attempt)]
    assert pid in supervisors(ground)
    assert supervisors_of(ref.job_id) == [pid]
    await ground.cluster.send(ref, Stop())
    assert await outcome(ground, ref) is Cause.STOPPED
    assert supervisors_of(ref.job_id) == []
    assert await eventually(
        lambda: is_over(ground, pid), "a stopped attempt was followed by others"
    )
