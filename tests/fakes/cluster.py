"""An in-memory cluster that passes the same conformance suite as the real one.

Its ranks are coroutines that run the given `play`. Their reports are stored in byte spools on its
nodes, and an attempt holds its slots until its ranks are seen to be gone. In addition to the port
it has methods for tests only: to break things and to wait for conditions. It uses the time of its
event loop; `tests/simulation` has a loop with simulated time and its own attempts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ray_workers.shared import spool_reader
from ray_workers.shared.commands import Command, Grant, Recall
from ray_workers.shared.contracts import (
    AttemptSpec,
    Cause,
    Frame,
    FrameKind,
    Outcome,
    Phase,
    PollReply,
)
from ray_workers.shared.node_needs import BuildState, JobNeed, NodeEnvironment, NodeNeeds
from ray_workers.shared.self_tests import DeviceOutcome, NodeTest, TestedDevice, TestPhase
from service.cluster.port import AttemptRef, ClusterNode, ClusterSnapshot, ClusterUnavailable
from service.config.node_types import labels_in, without_labels
from tests.fakes.attempt import Attempt, FakeAttempt, Play
from tests.fakes.node import FakeNode, Pulse

T = TypeVar("T")
STARTS = "the node agent is starting"
"""The problem reported for a node that is otherwise fine."""
READY = NodeEnvironment(
    JobNeed.ENVIRONMENT, BuildState.READY, "", packages=("hello==1.0",), replaced=(), log=""
)
PASSED = NodeTest(TestPhase.DONE, (TestedDevice("GPU-0", 0, "H100", DeviceOutcome.PASSED, "", {}),))
PATIENCE_S = 60.0
"""How long a test waits for something that must happen."""


@dataclass
class LostLaunch:
    """A launch whose answer gets lost."""

    arrives: bool
    """Whether the call reaches the cluster."""


@dataclass
class FakeCluster:
    """See the module docstring. It belongs to one event loop; several services may share it."""

    resources: Mapping[str, Mapping[str, float]]
    """Its nodes, by id."""
    play: Play | None = None
    """Script that every rank of every attempt runs."""
    now: Callable[[], float] = time.time
    """Unix seconds."""
    shows_free: bool = True
    """Whether snapshots show which slots are free."""
    shared: bool = False
    unavailable: str | None = None
    """While set, every call fails with this message, including calls that are waiting. Training
    continues."""
    lost_launches: list[LostLaunch] = field(default_factory=list)
    """The next launches whose answers get lost."""
    grants: list[Grant] = field(default_factory=list)
    """Grants that reached an attempt."""
    loses_grants: bool = False
    """While set, no grant of slots reaches an attempt."""
    launches: list[AttemptSpec] = field(default_factory=list)
    """Every launch that reached the cluster."""
    requests: list[tuple[list[tuple[dict[str, float], int]], list[str]]] = field(
        default_factory=list
    )
    """Requests to its autoscaler: bundles with their counts, and the released nodes."""
    environments: dict[str, NodeEnvironment | None] = field(default_factory=dict)
    """Answers of its nodes about every environment, by node. With None the node doesn't answer. A
    node that is not listed is ready."""
    preparations: list[tuple[str, NodeNeeds]] = field(default_factory=list)
    """Every request for an environment: the node, the environment and the job's owner."""
    dropped: list[tuple[str, NodeNeeds]] = field(default_factory=list)
    """Every request to drop an environment that no job needs anymore."""
    tests: dict[str, NodeTest] = field(default_factory=dict)
    """Answers of its nodes about their self-tests, by node. All other nodes pass."""
    checks: list[tuple[str, str, int]] = field(default_factory=list)
    """Every request for a self-test: the node, the test's id, and the number of held GPUs."""
    num_polls: int = 0
    """Number of polls for attempts."""
    crowds: dict[str, int] = field(default_factory=dict)
    """The maximum number of attempts with processes at the same time, by job (I2)."""

    def __post_init__(self) -> None:
        self.pulse = Pulse()
        self._sessions = 1
        self.known: dict[tuple[str, int], Attempt] = {}
        self.gone: list[Attempt] = []
        """Forgotten attempts that may still have processes."""
        self.closed: dict[tuple[str, int], None] = {}
        """Attempts that were given up: they may no longer be launched."""
        self.nodes = {node_id: FakeNode(dict(has)) for node_id, has in self.resources.items()}

    @property
    def session(self) -> str:
        return f"session-{self._sessions}"

    # Methods of the port.

    async def start(self) -> None:
        """Do nothing: there is nothing to connect to."""

    async def stop(self) -> None:
        """Do nothing: training continues."""

    async def snapshot(self) -> ClusterSnapshot:
        self._check()
        return ClusterSnapshot(
            session=self.session,
            address="fake:6379",
            dashboard_url=None,
            shared=self.shared,
            nodes=tuple(self._described(node_id, node) for node_id, node in self.nodes.items()),
        )

    def _described(self, node_id: str, node: FakeNode) -> ClusterNode:
        has = node.free() if self.shows_free else node.resources
        return ClusterNode(
            node_id=node_id,
            hostname=f"{node_id}.fake",
            alive=True,
            resources=without_labels(node.resources),
            available=without_labels(has),
            accepted=node.problem is None and node.drained_by is None and not node.is_released,
            problem=node.problem if node.drained_by is None else "the node is being drained",
            full=node.full,
            drained_by=node.drained_by,
            quarantined=tuple(node.quarantined),
            gpu_faults=(),
            memory_bytes=None,
            labels=labels_in(node.resources),
            is_starting=node.problem == STARTS,
            is_released=node.is_released,
            is_never_released=node.is_never_released,
        )

    async def launch(self, spec: AttemptSpec) -> None:
        self._check()
        lost = self.lost_launches.pop(0) if self.lost_launches else None
        if lost is None or lost.arrives:
            self._launch(spec)
        if lost is not None:
            raise ClusterUnavailable("the answer to the launch was lost")

    def _launch(self, spec: AttemptSpec) -> None:
        key = (spec.job_id, spec.attempt)
        known = self.known.get(key)
        if known is not None and known.supervised:
            raise ClusterUnavailable(f"ValueError: the name of {key} is taken")
        if key in self.closed:
            raise ClusterUnavailable(f"{key} was given up")
        if known is not None:
            self.gone.append(known)
        self.launches.append(spec)
        if all(part.node_id in self.nodes for part in spec.slices):
            for part in spec.slices:
                self.nodes[part.node_id].work_dirs.add(spec.job_id)
            self.known[key] = self.begin(spec)
        self.pulse.beat()

    def begin(self, spec: AttemptSpec) -> Attempt:
        assert self.play is not None
        return FakeAttempt(self, spec, self.play)

    async def give_up(self, ref: AttemptRef) -> None:
        self._check()
        self.closed[ref.job_id, ref.attempt] = None

    async def poll(
        self, ref: AttemptRef, cursor: Mapping[str, int], wait_s: float, max_bytes: int
    ) -> PollReply:
        self._check()
        self.num_polls += 1
        self.pulse.beat()
        if ref.session != self.session:
            return _ended(cursor, Cause.NODE_LOST, "the attempt's Ray cluster no longer exists")
        attempt = self.known.get((ref.job_id, ref.attempt))
        if attempt is None:
            return self._poll_unsupervised(ref, cursor, max_bytes, "there is no such actor")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        phase = attempt.phase
        while attempt.supervised:
            ended = attempt.phase is Phase.ENDED
            data = attempt.read(cursor, max_bytes)
            if data or ended or attempt.phase is not phase or loop.time() >= deadline:
                return attempt.reply(cursor, data, max_bytes)
            await self.pulse.wait(deadline)
            self._check()
        if ref.session != self.session:
            raise ClusterUnavailable("the Ray driver has exited")
        return self._poll_unsupervised(ref, cursor, max_bytes, "the actor died")

    def _poll_unsupervised(
        self, ref: AttemptRef, cursor: Mapping[str, int], max_bytes: int, how: str
    ) -> PollReply:
        """Answer for an attempt without a supervisor: the remaining frames, and its end once
        everything is seen to be gone."""
        if self._is_left(ref.job_id, ref.attempt):
            return PollReply(
                dict(cursor), Phase.STOPPING, {}, (), more=False, outcome=None, silent=()
            )
        here = [self.nodes[node_id] for node_id in ref.node_ids if node_id in self.nodes]
        frames: list[Frame] = []
        advanced = dict(cursor)
        for node in here:
            for key, (chunk, end) in node.read(ref.job_id, ref.attempt, cursor, max_bytes).items():
                frames += spool_reader.decode(key, chunk)
                advanced[key] = end
        if frames:
            return PollReply(
                advanced, Phase.STOPPING, {}, tuple(frames), more=True, outcome=None, silent=()
            )
        if len(here) < len(ref.node_ids):
            return _ended(cursor, Cause.NODE_LOST, "a node on which the attempt ran was lost")
        return _ended(cursor, Cause.SUPERVISOR_LOST, f"the attempt lost its supervisor: {how}")

    async def send(self, ref: AttemptRef, command: Command) -> None:
        self._check()
        if self.loses_grants and isinstance(command, Grant | Recall):
            raise ClusterUnavailable(f"the command was lost: {command.name}")
        attempt = self.known.get((ref.job_id, ref.attempt))
        if attempt is None:
            return
        if isinstance(command, Grant):
            self.grants.append(command)
        attempt.carry_out(command)

    async def acknowledge(self, ref: AttemptRef) -> None:
        self._check()
        attempt = self.known.pop((ref.job_id, ref.attempt), None)
        if attempt is not None:
            attempt.lose_supervisor()
            self.gone.append(attempt)
        for node in self.nodes.values():
            node.drop(ref.job_id, ref.attempt)
        self.pulse.beat()

    async def attempts(self) -> list[AttemptRef]:
        self._check()
        found = {key: None for key, attempt in self.known.items() if attempt.supervised}
        for node in self.nodes.values():
            found |= dict.fromkeys(node.spools)
        return [AttemptRef(*key, self.session, tuple(self.nodes)) for key in found]

    async def request_nodes(
        self, bundles: Sequence[tuple[Mapping[str, float], int]], released: Sequence[str]
    ) -> None:
        self._check()
        self.requests.append(([(dict(bundle), number) for bundle, number in bundles], [*released]))
        for node_id, node in self.nodes.items():
            node.is_released = node_id in released
        self.pulse.beat()

    async def prepare(self, node_id: str, needs: NodeNeeds) -> NodeEnvironment:
        self._check()
        self.preparations.append((node_id, needs))
        self.pulse.beat()
        if node_id not in self.nodes:
            raise ClusterUnavailable(f"the node {node_id} is gone")
        answer = self.environments.get(node_id, READY)
        if answer is None:
            await self.until(lambda: self.environments.get(node_id, READY) is not None)
            return self.environments.get(node_id, READY) or READY
        return answer

    async def forget(self, node_id: str, needs: NodeNeeds) -> None:
        self._check()
        self.dropped.append((node_id, needs))
        self.pulse.beat()

    async def check(self, node_id: str, check_id: str, num_held: int) -> NodeTest:
        self._check()
        if node_id not in self.nodes:
            raise ClusterUnavailable(f"the node {node_id} is gone")
        self.checks.append((node_id, check_id, num_held))
        self.pulse.beat()
        return self.tests.get(node_id, PASSED)

    async def kept_jobs(self) -> list[str]:
        self._check()
        return sorted({job_id for node in self.nodes.values() for job_id in node.work_dirs})

    async def drop_jobs(self, job_ids: Sequence[str]) -> None:
        self._check()
        for node in self.nodes.values():
            node.work_dirs -= set(job_ids)
        self.pulse.beat()

    def _is_left(self, job_id: str, attempt: int) -> bool:
        """Whether an attempt still has processes or slots."""
        return any(a.key == (job_id, attempt) and a.holds_anything for a in self.everyone())

    def everyone(self) -> list[Attempt]:
        """All attempts, including forgotten ones that may still have processes."""
        return [*self.known.values(), *self.gone]

    def _check(self) -> None:
        if self.unavailable is not None:
            raise ClusterUnavailable(self.unavailable)

    def count_crowd(self, job_id: str) -> None:
        crowd = sum(a.spec.job_id == job_id and a.num_processes > 0 for a in self.everyone())
        self.crowds[job_id] = max(self.crowds.get(job_id, 0), crowd)

    # Methods for tests.

    def be_unavailable(self, why: str | None) -> None:
        """Make every call fail from now on, including calls in progress. With None it answers
        again."""
        self.unavailable = why
        self.pulse.beat()

    def lose_supervisor(self, job_id: str, attempt: int = 1) -> None:
        """Kill an attempt's supervisor and its ranks. The spools remain."""
        self.known[job_id, attempt].lose_supervisor()

    def kill_rank(self, job_id: str, rank: int, attempt: int = 1) -> None:
        """SIGKILL a training process."""
        self._fake(job_id, attempt).kill(rank, exit_code=-9)

    def tell(self, job_id: str, kind: FrameKind, body: Mapping[str, Any], attempt: int = 1) -> None:
        """Let an attempt's supervisor report a loss, a hang, a drill or its slots."""
        self._fake(job_id, attempt).tell(kind, body)

    def _fake(self, job_id: str, attempt: int) -> FakeAttempt:
        found = self.known[job_id, attempt]
        assert isinstance(found, FakeAttempt)
        return found

    def add_node(self, node_id: str, resources: Mapping[str, float]) -> None:
        self.nodes[node_id] = FakeNode(dict(resources))
        self.pulse.beat()

    def drain_node(self, node_id: str, by: float) -> None:
        """Drain a node that leaves at the Unix time `by`. Until then its processes continue."""
        self.nodes[node_id].drained_by = by
        self.pulse.beat()

    def lose_node(self, node_id: str) -> None:
        """Lose a node with its ranks and spools. Supervisors run elsewhere."""
        del self.nodes[node_id]
        for attempt in self.everyone():
            attempt.lose_node(node_id)
        self.pulse.beat()

    def restart(self) -> None:
        """Replace the whole cluster by a new one of the same shape at the same address. Its nodes
        have different ids, as with Ray.
        """
        for attempt in self.everyone():
            attempt.vanish()
        self.gone += self.known.values()
        self.known.clear()
        self._sessions += 1
        self.nodes = {
            f"{node_id.split('~')[0]}~{self._sessions}": FakeNode(node.resources)
            for node_id, node in self.nodes.items()
        }
        self.pulse.beat()

    def use_elsewhere(self, node_id: str, resources: Mapping[str, float]) -> None:
        """Let other users of the cluster hold this much of a node from now on."""
        self.nodes[node_id].others = dict(resources)
        self.pulse.beat()

    async def until(
        self, probe: Callable[[], T], why: str = "it never came true", within_s: float = PATIENCE_S
    ) -> T:
        """Wait for `probe` to return a truthy value and return it. Calls `probe` whenever something
        happens on the cluster. Raises AssertionError after `within_s`.
        """
        deadline = asyncio.get_running_loop().time() + within_s
        while not (answer := probe()):
            assert asyncio.get_running_loop().time() < deadline, f"{why} (last answer: {answer!r})"
            await self.pulse.wait(deadline)
        return answer

    async def launched(self, job_id: str, attempt: int = 1) -> AttemptSpec:
        """Wait for the launch of an attempt."""

        def found() -> AttemptSpec | None:
            mine = (s for s in self.launches if (s.job_id, s.attempt) == (job_id, attempt))
            return next(mine, None)

        spec = await self.until(found, f"attempt {attempt} of {job_id} was never launched")
        assert spec is not None
        return spec

    async def reached(self, job_id: str, phase: Phase, attempt: int = 1) -> None:
        """Wait until an attempt has entered a phase."""

        def entered() -> bool:
            known = self.known.get((job_id, attempt))
            return known is not None and phase.value in known.phase_times

        await self.until(entered, f"attempt {attempt} of {job_id} never reached {phase}")

    async def forgotten(self, job_id: str, attempt: int = 1) -> None:
        """Wait until nothing of an attempt is left: no supervisor, process, slot or spool (I7)."""

        def is_gone() -> bool:
            key = (job_id, attempt)
            spools = any(key in node.spools for node in self.nodes.values())
            return key not in self.known and not self._is_left(*key) and not spools

        await self.until(is_gone, f"something of attempt {attempt} of {job_id} is left")

    async def shut_down(self) -> None:
        """End everything, when a test ends."""
        self.restart()
        for attempt in self.gone:
            if isinstance(attempt, FakeAttempt):
                await attempt.destroy()


def _ended(cursor: Mapping[str, int], cause: Cause, message: str) -> PollReply:
    lost = Outcome.unseen(cause, message)
    return PollReply(dict(cursor), Phase.ENDED, {}, (), more=False, outcome=lost, silent=())
