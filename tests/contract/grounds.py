"""The clusters that the conformance suite runs against, and the scripts that run on them.

A script is a Python file, which real ranks run, a coroutine, which the fake's ranks run and which
reports the same values, and a plan for the simulated cluster.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dray.spec import JobSpec
from ray_workers.shared.commands import Stop
from ray_workers.shared.contracts import AttemptSpec, Cause, Frame, FrameKind, PollReply
from ray_workers.shared.slices import Slice
from service.cluster.port import AttemptRef, Cluster
from service.cluster.ray.embedded import EmbeddedRay
from tests.fakes.attempt import Exited, FakeRank
from tests.fakes.cluster import FakeCluster
from tests.integration.harness import actor_of
from tests.simulation.attempt import PAUSE, Plan
from tests.simulation.cluster import SimCluster
from tests.wire import attempt_spec, traits

if TYPE_CHECKING:
    from _typeshed import SupportsLenAndGetItem

T = TypeVar("T")
SLOTS = 4
SILENCE_LIMIT_S = 12.0
"""Shorter than a service's limit, because tests wait for it."""
PATIENCE_S = 150.0
PAUSE_S = 0.05
STEPS = 5

FILES = {
    "steps": f"""
        from dray import train
        rank = train.context().rank
        for step in range(1, {STEPS} + 1):
            print(f"rank {{rank}} is at {{step}}")
            train.report(step, {{"train/loss": 1.0 / step}})
    """,
    "fails": """
        from dray import train
        if train.context().rank == 1:
            raise ValueError("the sky is red")
    """,
    "killed": """
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    """,
    "leaves": """
        import os, signal
        if os.environ["RANK"] == "1":
            os._exit(3)
        signal.pause()
    """,
    "waits": """
        import signal
        print("waits")
        signal.pause()
    """,
}


PLANS = {
    "steps": Plan(STEPS),
    "fails": Plan(STEPS, Cause.USER_ERROR, error_step=2, num_errors=1),
    "killed": Plan(STEPS, Cause.WORKER_LOST, error_step=2, num_errors=1),
    "waits": Plan(0, PAUSE, error_step=1),
}
"""The scripts of the simulated cluster."""

NOT_SIMULATED = {
    "test_a_rank_that_leaves_is_to_blame_not_the_peers_that_are_then_stopped": (
        "its ranks are no processes, so that none can leave while its peers go on"
    ),
}
"""Tests that do not apply to the simulated cluster, and the reason."""


async def play(rank: FakeRank) -> None:
    """The same scripts, for the fake."""
    match Path(rank.spec.spec["script"]["entrypoint"]).stem:
        case "steps":
            for step in range(1, STEPS + 1):
                rank.print(f"rank {rank.rank} is at {step}")
                rank.report(step, train_loss=1.0 / step)
        case "fails" if rank.rank == 1:
            raise ValueError("the sky is red")
        case "killed":
            raise Exited(-9)
        case "leaves" if rank.rank == 1:
            raise Exited(3)
        case "leaves":
            await asyncio.get_running_loop().create_future()
        case "waits":
            rank.print("waits")
            await asyncio.get_running_loop().create_future()


COUNT_CLASSES = """
import sys, ray
from ray.experimental.internal_kv import _internal_kv_list
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(len(_internal_kv_list(b"ActorClass", namespace=b"fun")))
"""
"""Drives the cluster through its own driver process, which has the only table of functions."""


@dataclass(frozen=True)
class Failure:
    """The error of the script `fails`."""

    rank: int
    type: str
    words: str


class Ground:
    """A running cluster with one node of four slots, and operations for tests."""

    failure = Failure(1, "ValueError", "the sky is red")

    def __init__(self, cluster: Cluster, deployment_id: str, home: Path) -> None:
        self.cluster = cluster
        self._deployment_id = deployment_id
        self._home = home
        for name, text in FILES.items():
            (home / f"{name}.py").write_text(textwrap.dedent(text))

    async def spec(
        self, script: str, num_workers: int = 1, *, attempt: int = 1, **more: Any
    ) -> AttemptSpec:
        """Return an attempt, each time of another job, on the one node."""
        document = JobSpec.model_validate(
            {
                "script": {"entrypoint": str(self._home / f"{script}.py")},
                "resources": {"num_workers": num_workers},
            }
        )
        return attempt_spec(
            deployment_id=self._deployment_id,
            job_id=f"job-{uuid.uuid4().hex[:12]}",
            attempt=attempt,
            spec=(as_json := document.model_dump(mode="json")),
            traits=traits(as_json, recovers_in_place=False),
            slices=(Slice(await self.node_id(), num_workers),),
            bundle={"CPU": 1.0},
            storage_url=(self._home / "storage").as_uri(),
            silence_limit_s=SILENCE_LIMIT_S,
            **more,
        )

    def steps(self, rank: int) -> list[tuple[int, float]]:
        """Return the steps and losses that a rank of the script `steps` reports."""
        return [(step, 1.0 / step) for step in range(1, STEPS + 1)]

    def lines(self, rank: int) -> list[tuple[int, str]]:
        """Return the numbers and texts of the lines that it prints."""
        return [(n, f"rank {rank} is at {n + 1}") for n in range(STEPS)]

    async def node_id(self) -> str:
        (node,) = (await self.cluster.snapshot()).nodes
        return node.node_id

    async def kill_agent(self) -> None:
        """Kill the node's agent with SIGKILL, like a crash; Ray restarts it."""
        self.signal_actor("NodeAgent", signal.SIGKILL)

    def signal_actor(self, kind: str, number: int) -> None:
        """Send a signal to the only actor of a class, on a real Ray."""
        daemon = json.loads((self._home / "ray" / "daemon.json").read_text())
        os.kill(actor_of(daemon["instance"], kind), number)

    def exported_classes(self) -> int:
        """Return how many times a real Ray stores the code of some actor class."""
        ray = EmbeddedRay(self._home, SLOTS, self._deployment_id)
        address = json.loads((self._home / "ray" / "daemon.json").read_text())["address"]
        command = [sys.executable, "-c", COUNT_CLASSES, address]
        environment = {**os.environ, **ray.environment()}
        return int(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)

    async def ref(self, spec: AttemptSpec) -> AttemptRef:
        session = (await self.cluster.snapshot()).session
        nodes = tuple(part.node_id for part in spec.slices)
        return AttemptRef(spec.job_id, spec.attempt, session, nodes)

    async def launch(self, script: str, num_workers: int = 1, **more: Any) -> AttemptRef:
        spec = await self.spec(script, num_workers, **more)
        await self.cluster.launch(spec)
        return await self.ref(spec)

    async def poll(
        self,
        ref: AttemptRef,
        cursor: Mapping[str, int] | None = None,
        *,
        wait_s: float = 1.0,
        max_bytes: int = 1 << 20,
    ) -> PollReply:
        return await self.cluster.poll(ref, cursor or {}, wait_s, max_bytes)

    async def follow(
        self,
        ref: AttemptRef,
        until: Callable[[PollReply], bool] = lambda reply: reply.outcome is not None,
        **how: Any,
    ) -> list[PollReply]:
        """Poll, each time with the cursor of the last reply, until a reply satisfies the test."""
        replies: list[PollReply] = []
        deadline = time.monotonic() + PATIENCE_S
        while not replies or not until(replies[-1]):
            assert time.monotonic() < deadline, f"{ref} did not come so far: {replies[-3:]}"
            cursor = replies[-1].cursor if replies else {}
            replies.append(await self.poll(ref, cursor, **how))
            if not replies[-1].frames:
                await asyncio.sleep(PAUSE_S / 10)  # the poll of an orphan returns at once
        return replies

    async def settle(self, ref: AttemptRef) -> PollReply:
        """Follow an attempt to its end and acknowledge it."""
        replies = await self.follow(ref)
        await self.cluster.acknowledge(ref)
        return replies[-1]

    async def clear(self) -> None:
        """End what a test has left running."""
        for ref in await self.cluster.attempts():
            await self.cluster.send(ref, Stop())
            await self.settle(ref)

    async def free_slots(self) -> float:
        (node,) = (await self.cluster.snapshot()).nodes
        return node.available.get("CPU", 0.0)

    async def all_free(self) -> bool:
        return await self.free_slots() == SLOTS

    async def stop(self) -> None:
        await self.cluster.stop()


class FakeGround(Ground):
    def __init__(self, home: Path) -> None:
        self._fake = FakeCluster({"node-a": {"CPU": float(SLOTS)}}, play)
        super().__init__(self._fake, "fake", home)

    async def stop(self) -> None:
        await self._fake.shut_down()


class Hurry(random.Random):
    """Randomness without long waits: the suite runs in real time."""

    def uniform(self, a: float, b: float) -> float:
        return a / 6

    def choice(self, seq: SupportsLenAndGetItem[T]) -> T:
        return seq[0]


class SimGround(Ground):
    """The simulated cluster on an ordinary event loop. One rank of each node reports."""

    failure = Failure(0, "Error", "by plan")

    def __init__(self, home: Path) -> None:
        def nothing(_: object) -> None:
            pass

        self._sim = SimCluster(Hurry(), time.time, nothing, nothing, nothing)
        self._sim.shows_free = True
        self._sim.add_slots(SLOTS)
        super().__init__(self._sim, "simulated", home)

    async def spec(
        self, script: str, num_workers: int = 1, *, attempt: int = 1, **more: Any
    ) -> AttemptSpec:
        spec = await super().spec(script, num_workers, attempt=attempt, **more)
        return replace(spec, spec={**spec.spec, "name": PLANS[script].name})

    def steps(self, rank: int) -> list[tuple[int, float]]:
        return [(step, 1.0) for step in range(1, STEPS + 1)] if rank == 0 else []

    def lines(self, rank: int) -> list[tuple[int, str]]:
        return [(0, "begins"), (1, "done")] if rank == 0 else []

    async def stop(self) -> None:
        self._sim.restart()


async def eventually(probe: Callable[[], Awaitable[T]], why: str) -> T:
    """Return what `probe` returns once that is truthy; AssertionError after the time limit."""
    deadline = time.monotonic() + PATIENCE_S
    while not (answer := await probe()):
        assert time.monotonic() < deadline, f"{why} (last answer: {answer!r})"
        await asyncio.sleep(PAUSE_S)
    return answer


def frames_of(replies: list[PollReply]) -> list[Frame]:
    return [frame for reply in replies for frame in reply.frames]


def lines_of(frames: list[Frame], rank: int) -> list[tuple[int, str]]:
    return [
        (frame.body["line"], frame.body["text"])
        for frame in frames
        if frame.kind is FrameKind.LOG and frame.rank == rank
    ]


def steps_of(frames: list[Frame], rank: int) -> list[tuple[int, float]]:
    return [
        (frame.body["step"], frame.body["values"]["train/loss"])
        for frame in frames
        if frame.kind is FrameKind.METRICS and frame.rank == rank
    ]
