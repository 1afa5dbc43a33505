"""Attempts on the fake cluster: the base class, and attempts whose ranks are coroutines."""

from __future__ import annotations

import asyncio
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, assert_never

from dray.drills import DrillKind, DrillState
from ray_workers.shared import spool_reader
from ray_workers.shared.commands import Command, Drill, Grant, Leave, Limit, Recall, Stop
from ray_workers.shared.contracts import (
    FIRST_SIGNS,
    SUPERVISOR_RANK,
    AttemptSpec,
    Cause,
    Frame,
    FrameKind,
    Outcome,
    Phase,
    PollReply,
)
from ray_workers.shared.slices import Slice, by_bundle
from ray_workers.supervision.rules.failure_attribution import RankExit, judge
from tests.fakes.node import FakeNode, Pulse

if TYPE_CHECKING:
    from tests.fakes.cluster import FakeCluster

ECHO_S = 0.05
"""Grace period in which the peers of a failed rank may fail by themselves."""


class Failed(Exception):
    """Raised by a rank's script to fail with a cause that dray knows."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Exited(Exception):
    """Raised by a rank's script to exit silently, with an exit code or a (negative) signal
    number."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


@dataclass
class FakeRank:
    """The interface available to a rank's script."""

    spec: AttemptSpec
    rank: int
    node_id: str
    node: FakeNode
    pulse: Pulse
    now: Callable[[], float]
    exit_code: int | None = None
    """Exit code after a kill."""
    _lines: int = 0

    @property
    def job_id(self) -> str:
        return self.spec.job_id

    @property
    def attempt(self) -> int:
        return self.spec.attempt

    def report(self, step: int, **values: float) -> None:
        """Report the metrics of one step; `train_loss=1.0` is reported as `train/loss`."""
        named = {key.replace("_", "/", 1): value for key, value in values.items()}
        self.emit(FrameKind.METRICS, {"step": step, "values": named})

    def print(self, text: str) -> None:
        """Write a line to the log."""
        self._append("log", FrameKind.LOG, {"line": self._lines, "text": text})
        self._lines += 1

    def emit(self, kind: FrameKind, body: Mapping[str, Any]) -> None:
        self._append("metrics", kind, body)

    def _append(self, stream: str, kind: FrameKind, body: Mapping[str, Any]) -> None:
        key = spool_reader.spool_key(self.rank, 0, stream)
        spool = self.node.spool_of(self.job_id, self.attempt, key)
        spool.append(kind, body, self.now())
        self.pulse.beat()


Play = Callable[[FakeRank], Awaitable[None]]
"""A rank's script. It succeeds by returning and fails by raising. A stop or kill cancels it; it
counts as gone once it has really finished."""


class Attempt(ABC):
    """An attempt: a supervisor, as long as `supervised` is true, and processes that hold slots."""

    def __init__(self, cluster: FakeCluster, spec: AttemptSpec) -> None:
        self.cluster = cluster
        self.spec = spec
        self.key = (spec.job_id, spec.attempt)
        self.supervised = True
        self.phase = Phase.ACQUIRING
        self.phase_times = {Phase.ACQUIRING.value: cluster.now()}
        self.outcome: Outcome | None = None
        self.nodes = {part.node_id: cluster.nodes[part.node_id] for part in spec.slices}
        self.held: list[Slice] = []
        self.grants = 0
        """Number of the newest grant it knows of."""

    @property
    @abstractmethod
    def num_processes(self) -> int:
        """Processes that have not yet been seen to exit."""

    @abstractmethod
    def carry_out(self, command: Command) -> None:
        """Execute a command sent to its supervisor."""

    @abstractmethod
    def lose_node(self, node_id: str) -> None:
        """Lose a node with its ranks and spools."""

    @abstractmethod
    def lose_supervisor(self) -> None:
        """Lose its supervisor, then its processes. The spools remain."""

    def vanish(self) -> None:
        """Disappear with the whole cluster."""
        self.lose_supervisor()

    @property
    def holds_anything(self) -> bool:
        return bool(self.held) or self.num_processes > 0

    def read(self, cursor: Mapping[str, int], max_bytes: int) -> dict[str, tuple[bytes, int]]:
        """Return new frames from each spool and the offset where they end."""
        share = max_bytes // len(self.nodes)
        found: dict[str, tuple[bytes, int]] = {}
        for node in self.nodes.values():
            found |= node.read(*self.key, cursor, share)
        return found

    def has_more(self, cursor: Mapping[str, int]) -> bool:
        return any(node.has_more(*self.key, cursor) for node in self.nodes.values())

    def reply(
        self, cursor: Mapping[str, int], data: Mapping[str, tuple[bytes, int]], max_bytes: int
    ) -> PollReply:
        frames = [f for key, (chunk, _) in data.items() for f in spool_reader.decode(key, chunk)]
        if self.phase is Phase.STARTING and any(f.kind in FIRST_SIGNS for f in frames):
            self.enter(Phase.RUNNING)
        advanced = {**cursor, **{key: end for key, (_, end) in data.items()}}
        more = self.has_more(advanced)
        return PollReply(
            cursor=advanced,
            phase=self.phase,
            phase_times=dict(self.phase_times),
            frames=tuple(frames),
            more=more,
            outcome=None if more else self.outcome,
            silent=(),
        )

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self.phase_times[phase.value] = self.cluster.now()
        self.cluster.pulse.beat()


class FakeAttempt(Attempt):
    """An attempt whose ranks are coroutines."""

    def __init__(self, cluster: FakeCluster, spec: AttemptSpec, play: Play) -> None:
        super().__init__(cluster, spec)
        self._play = play
        self._pulse = cluster.pulse
        self._stop_asked = False
        self._leave_asked = False
        self._drills: set[str] = set()
        self._taken: list[tuple[Slice, Mapping[str, float]]] = []
        """Slices it holds, with the resources of each worker."""
        self._ranks: dict[int, FakeRank] = {}
        self._processes: dict[int, asyncio.Task[int | None]] = {}
        self._limit = Limit(0, spec.max_runtime_s)
        self._task = asyncio.create_task(self._run())
        self._ending: asyncio.Task[None] | None = None

    # Calls from the cluster.

    @property
    def num_processes(self) -> int:
        return sum(not process.done() for process in self._processes.values())

    def carry_out(self, command: Command) -> None:
        match command:
            case Stop():
                self.stop()
            case Leave():
                self.preempt()
            case Drill():
                self.drill(command)
            case Grant():
                self.grow(command)
            case Recall():
                self.recall(command)
            case Limit():
                self._limit = command if command.number > self._limit.number else self._limit
                self._pulse.beat()
            case _:
                assert_never(command)

    def stop(self) -> None:
        self._stop_asked = True
        self._pulse.beat()

    def preempt(self) -> None:
        self._leave_asked = True
        self._pulse.beat()

    def drill(self, drill: Drill) -> None:
        if drill.id in self._drills:
            return
        self._drills.add(drill.id)
        self.tell(FrameKind.DRILL, {"id": drill.id, "state": DrillState.STRUCK})
        if drill.kind is DrillKind.PREEMPT:
            self.preempt()
        else:
            self.kill(drill.rank, exit_code=-9)

    def grow(self, grant: Grant) -> None:
        """Take more slots without starting processes for them: the fake's ranks don't change."""
        if grant.number <= self.grants or self.phase is Phase.ENDED:
            return
        self.grants = grant.number
        for part in grant.slices:
            node = self.cluster.nodes.get(part.node_id)
            if node is not None and node.take(self.spec.bundle, part.num_workers):
                self.nodes[part.node_id] = node
                self.held.append(part)
                self._taken.append((part, self.spec.bundle))
        self.resized()

    def recall(self, recall: Recall) -> None:
        """Release slots and end the ranks that have none left."""
        if recall.number <= self.grants or self.phase is Phase.ENDED:
            return
        self.grants = recall.number
        for part in recall.slices:
            self.held.remove(part)
            self._taken.remove((part, self.spec.bundle))
            self.nodes[part.node_id].release(self.spec.bundle, part.num_workers)
        left = sum(part.num_workers for part in self.held)
        for rank in sorted(self._ranks)[left:]:
            self._processes.pop(rank).cancel()
            del self._ranks[rank]
        self.resized()

    def resized(self, lacking: int = 0) -> None:
        """Report the slots that it holds now."""
        world_size = sum(part.num_workers for part in self.held)
        body = {
            "world_size": world_size,
            "slices": [{"node_id": s.node_id, "num_workers": s.num_workers} for s in self.held],
            "lacking": lacking,
            "grants": self.grants,
            "message": f"goes on with {world_size} workers",
        }
        self.tell(FrameKind.RESIZED, body)

    def tell(self, kind: FrameKind, body: Mapping[str, Any]) -> None:
        """Write a supervisor's report to its own spool on the first node."""
        key = spool_reader.spool_key(SUPERVISOR_RANK, 0, "metrics")
        node = next(iter(self.nodes.values()))
        node.spool_of(*self.key, key).append(kind, body, self.cluster.now())
        self._pulse.beat()

    def kill(self, rank: int, exit_code: int | None) -> None:
        """End a training process. An exit code of None removes its rank actor as well."""
        self._ranks[rank].exit_code = exit_code
        self._processes[rank].cancel()

    def lose_node(self, node_id: str) -> None:
        if node_id in self.nodes:
            self.nodes[node_id] = FakeNode({})  # its slots and spools no longer exist
            self.held = [part for part in self.held if part.node_id != node_id]
            self._taken = [each for each in self._taken if each[0].node_id != node_id]
            for rank in [r for r in self._ranks.values() if r.node_id == node_id]:
                self.kill(rank.rank, exit_code=None)

    def lose_supervisor(self) -> None:
        if self.supervised:
            self.supervised = False
            self._task.cancel()
            self._ending = asyncio.create_task(self._end_group(-9))
            self._pulse.beat()

    async def destroy(self) -> None:
        """End it even if its ranks resist."""
        self.lose_supervisor()
        while self.holds_anything:
            for process in self._processes.values():
                process.cancel()
            await asyncio.sleep(0)

    # Lifecycle.

    async def _run(self) -> None:
        outcome = await self._train()
        await self._end_group(-15)
        self.outcome = outcome
        self.enter(Phase.ENDED)

    async def _train(self) -> Outcome:
        unfit = await self._acquire()
        if unfit is not None:
            return unfit
        self.enter(Phase.STARTING)
        self._start()
        if self.spec.spec.get("script"):
            self.enter(Phase.RUNNING)
        outcome = await self._watch()
        ended = self._exits()
        self.enter(Phase.STOPPING)
        await self._end_processes(-15)
        return outcome or judge(ended, self._errors())

    async def _acquire(self) -> Outcome | None:
        """Acquire every slice. Return an Outcome if that failed."""
        deadline = asyncio.get_running_loop().time() + self.spec.start_timeout_s
        wanted = by_bundle(self.spec.slices, self.spec.bundle, self.spec.roles)
        while True:
            if self._stop_asked:
                return Outcome.of(Cause.STOPPED, "stopped before it started")
            for part, bundle in list(wanted):
                if self.nodes[part.node_id].take(bundle, part.num_workers):
                    self.held.append(part)
                    self._taken.append((part, bundle))
                    wanted.remove((part, bundle))
            if not wanted:
                return None
            if not await self._pulse.wait(deadline):
                return Outcome.of(
                    Cause.SLOTS_UNAVAILABLE,
                    f"Ray did not provide {self.spec.world_size} slots within "
                    f"{self.spec.start_timeout_s:g} s",
                )

    def _start(self) -> None:
        carriers = [part.node_id for part in self.spec.slices for _ in range(part.num_workers)]
        for number, node_id in enumerate(carriers):
            node = self.nodes[node_id]
            rank = FakeRank(self.spec, number, node_id, node, self._pulse, self.cluster.now)
            self._ranks[number] = rank
            self._processes[number] = asyncio.create_task(self._process(rank))
            self._processes[number].add_done_callback(lambda _: self._pulse.beat())
        self.cluster.count_crowd(self.spec.job_id)

    async def _process(self, rank: FakeRank) -> int | None:
        """Run a training process. Return its exit code, or None if its actor vanished with it."""
        try:
            await self._play(rank)
        except asyncio.CancelledError:
            return rank.exit_code
        except Exited as leaving:
            return leaving.code
        except Exception as error:
            body = {
                "cause": error.cause if isinstance(error, Failed) else Cause.USER_ERROR,
                "type": type(error).__qualname__,
                "message": f"{type(error).__qualname__}: {error}",
                "traceback": traceback.format_exc(),
            }
            rank.emit(FrameKind.ERROR, body)
            return 1
        return 0

    def _exits(self) -> list[RankExit]:
        """Exits of finished processes. A process killed before its first line has no result."""
        return [
            RankExit.of(
                number, self._ranks[number].exit_code if done.cancelled() else done.result()
            )
            for number, done in self._processes.items()
            if done.done()
        ]

    async def _watch(self) -> Outcome | None:
        """Wait for the end. Return an Outcome if the supervisor ended it."""
        began = asyncio.get_running_loop().time()
        while True:
            runtime_s = self._limit.max_runtime_s
            deadline = None if runtime_s is None else began + runtime_s
            if self._stop_asked:
                return Outcome.of(Cause.STOPPED, "stopped as requested")
            if self._leave_asked:
                return Outcome.of(Cause.PREEMPTED, "released its slots as requested")
            ended = self._exits()
            if any(rank.exit_code != 0 for rank in ended):
                await asyncio.wait(self._processes.values(), timeout=ECHO_S)
                return None
            if len(ended) == len(self._processes):
                return None
            if not await self._pulse.wait(deadline):
                return Outcome.of(
                    Cause.RUNTIME_EXCEEDED,
                    f"reached max_runtime_s after {runtime_s:g} s in this attempt",
                )

    async def _end_processes(self, exit_code: int) -> None:
        running = [rank for rank, process in self._processes.items() if not process.done()]
        for rank in running:
            self.kill(rank, exit_code)
        if self._processes:
            await asyncio.wait(self._processes.values())

    async def _end_group(self, exit_code: int) -> None:
        """End the processes, and only then release the slots."""
        await self._end_processes(exit_code)
        for part, bundle in self._taken:
            self.nodes[part.node_id].release(bundle, part.num_workers)
        self.held, self._taken = [], []
        self._pulse.beat()

    def _errors(self) -> dict[int, Frame]:
        """Return the error frame of each rank that has one."""
        spools = [node.spools.get(self.key, {}) for node in self.nodes.values()]
        return {
            frame.rank: frame
            for there in spools
            for key, each in there.items()
            for frame in each.errors(key)
        }
