"""The node agent: one detached actor per node, which keeps the node ready to start ranks.

The agent runs the forkserver, which has already imported torch, so that a rank starts in
milliseconds. The agent also serves the spool files of the node's ranks, even after the ranks and
their supervisor have died.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import platform
import signal
import socket
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import ray

import dray
from ray_workers.node import (
    attempt_residue,
    compat_ray,
    orphans,
    placement_groups,
    session_records,
    silo_gate,
    stack_collector,
)
from ray_workers.node.attempt_residue import AttemptResidue
from ray_workers.node.environments.environments import Environments
from ray_workers.node.folders.code_fetches import CodeFetches
from ray_workers.node.folders.folder_keeper import FolderKeeper
from ray_workers.node.folders.git_commit import CodeRefused, CodeUnreachable
from ray_workers.node.folders.job_folders import FilesKept, FolderPlan
from ray_workers.node.forkserver.client import ForkFailed, list_tasks, send_to_rank
from ray_workers.node.forkserver.manager import ForkserverManager
from ray_workers.node.gpu_health import GpuHealth
from ray_workers.node.gpu_memory import GpuMemory, NvmlMemory
from ray_workers.node.node_address import own_address
from ray_workers.node.node_report import NodeReport
from ray_workers.node.node_spools import NodeSpools
from ray_workers.node.self_test.runner import SelfTests
from ray_workers.node.silo_gate import Opening
from ray_workers.node.system_metrics.sampler import SystemMetricsSampler
from ray_workers.shared import spool_reader
from ray_workers.shared.contracts import Frame
from ray_workers.shared.folders import work_dir
from ray_workers.shared.folders.disk_space import why_full
from ray_workers.shared.folders.removal import remove_tree
from ray_workers.shared.heartbeat import NodeObservation, RankObservation, observe_ranks
from ray_workers.shared.memory_limit import memory_here
from ray_workers.shared.node_needs import (
    BuildState,
    CodeProblem,
    CodeRef,
    JobNeed,
    NodeEnvironment,
    NodeNeeds,
    RemoteCodeRef,
)
from ray_workers.shared.paths import (
    deployment_root,
    page_dir,
    preloaded_path,
    runtime_dir,
    socket_path,
    temp_dir,
    work_root,
)
from ray_workers.shared.processes.machine_speed import WaitMeter
from ray_workers.shared.processes.procfs import (
    Activity,
    activity_of,
    children_of,
    count_idle_workers,
)
from ray_workers.shared.processes.silence import SilenceLimits
from ray_workers.shared.quarantine import QuarantineBook, Quarantined
from ray_workers.shared.self_tests import NodeTest
from ray_workers.shared.spool_reader import SpoolRead

ORPHANS_BOUND_S = 10.0
"""Seconds after which this node is refused if processes of dead nodes still exist on this
machine."""
QUARANTINE_PERIOD_S = 3.0
"""Seconds between two checks of the slots in quarantine."""


@ray.remote(num_cpus=0, max_restarts=-1)
class NodeAgent:
    """The node agent (see the module's docstring). Methods run concurrently on one event loop."""

    def __init__(self, deployment_id: str, silence_limit_s: float) -> None:
        self._deployment_id = deployment_id
        self._node_id: str = ray.get_runtime_context().get_node_id()
        self._directory = runtime_dir(deployment_id, self._node_id)
        # Make the files of this process and its children private to this user, regardless of how
        # Ray was started on this node.
        os.umask(0o077)
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._raylet = compat_ray.raylet_pid()
        self._parents = {self._raylet, os.getppid()}
        """The possible parents of Ray's workers, some of which are forked (`worker_forks`)."""
        session_records.write_owner(self._directory, self._raylet)
        self._socket_path = socket_path(deployment_id, self._node_id)
        self._forkserver = ForkserverManager(
            self._directory,
            self._socket_path,
            "ray_workers.node.forkserver.server",
            SilenceLimits(silence_limit_s),
        )
        self._gpu_memory: GpuMemory = NvmlMemory()
        sessions = session_records.sessions_dir(self._directory)
        self._system_metrics = SystemMetricsSampler(sessions)
        records = functools.partial(session_records.read_sessions, sessions)
        self._gpu_health = GpuHealth(records, self._directory / "gpu_faults.json")
        self._self_tests = SelfTests(records)
        self._book = QuarantineBook(self._directory / "quarantine")
        self._waits = WaitMeter()
        self._folders = FolderKeeper(deployment_id, self._node_id)
        self._tasks: list[asyncio.Task[None]] = []
        self._spools = NodeSpools(deployment_id, self._node_id)
        self._environments = Environments(preloaded_path(self._socket_path))
        self._code_fetches = CodeFetches()

    def _begin(self) -> None:
        """Start the background tasks on the first call."""
        self._gpu_health.begin()
        if not self._tasks:
            self._tasks = [
                asyncio.ensure_future(self._forkserver.run()),
                asyncio.ensure_future(self._tend_quarantine()),
                asyncio.ensure_future(self._environments.clear_up()),
            ]

    async def describe(self, nonce_path: Path | None) -> NodeReport:
        """Return once ranks can start on this node, or report why they can't."""
        self._begin()
        problem = await self._problem()
        return NodeReport(
            node_id=self._node_id,
            hostname=socket.gethostname(),
            address=own_address(),
            version=dray.__version__,
            python=platform.python_version(),
            storage_nonce=_read_text(nonce_path) if nonce_path else None,
            problem=problem,
            full=await asyncio.to_thread(why_full, self._directory),
            quarantined=tuple(self._book.entries()),
            idle_workers=await asyncio.to_thread(count_idle_workers, self._raylet),
            has_silo_source=silo_gate.has_source(os.environ),
            gpu_faults=self._gpu_health.faults(),
            memory_bytes=memory_here(),
        )

    async def ping(self, silence_limit_s: float) -> float | None:
        """Return the time at which the forkserver stopped responding; None if it responds.
        `silence_limit_s` replaces the limit given at the start: the agent can outlive the service,
        whose settings can change."""
        self._forkserver.limits = SilenceLimits(silence_limit_s)
        return self._forkserver.silent_since

    async def check(self, check_id: str, num_held: int) -> NodeTest:
        """`SelfTests.check`."""
        return await self._self_tests.check(check_id, num_held)

    async def _problem(self) -> str | None:
        """Return why ranks can't start: there is no forkserver, or processes of a dead node are
        still alive."""
        deployment = deployment_root(self._deployment_id)
        others = [node for node in session_records.nodes_of(deployment) if node != self._directory]
        left = await asyncio.to_thread(orphans.reap_within, others, ORPHANS_BOUND_S)
        # Orphans of this node's own ranks only delay the release of their attempts' slots, so don't
        # wait for the orphans before starting ranks.
        await asyncio.to_thread(orphans.reap_within, [self._directory], 0.0)
        removed = await asyncio.to_thread(orphans.remove_dead_nodes, deployment, self._directory)
        for folder in removed:
            print(f"removed the folder of a dead node, {folder}", flush=True)  # noqa: T201
        if left:
            pids = [pid for orphan in left for pid in orphan.pids]
            return f"processes of a dead node on this machine can't be killed: {pids[:5]}"
        return await self._forkserver.problem()

    async def running(self, job_id: str, attempt: int, ranks: Sequence[int] | None = None) -> int:
        """Return the number of remaining processes of an attempt, or of the given ranks, plus the
        number of GPUs on which memory is still held for dead processes."""
        return len(await self._left(job_id, attempt, ranks))

    async def _left(
        self, job_id: str, attempt: int, ranks: Sequence[int] | None = None
    ) -> AttemptResidue:
        try:
            tasks = await list_tasks(self._socket_path)
        except ForkFailed:
            # The ranks died with the forkserver; the records list the processes that they started.
            tasks = []
        directory = session_records.sessions_dir(self._directory)
        return await asyncio.to_thread(
            attempt_residue.of_attempt, directory, tasks, job_id, attempt, self._gpu_memory, ranks
        )

    async def _end_left(self, job_id: str, attempt: int) -> AttemptResidue:
        """Return what remains of an attempt after its processes were asked to end. Kill remaining
        processes, in case suspended rank actors keep the forkserver from killing them."""
        left = await self._left(job_id, attempt)
        if left:
            with contextlib.suppress(ForkFailed):
                for task in await list_tasks(self._socket_path):
                    if (task["job_id"], task["attempt"]) == (job_id, attempt):
                        rank = (job_id, attempt, task["rank"])
                        await send_to_rank(self._socket_path, *rank, signal.SIGKILL)
        return left

    async def quarantine(self, job_id: str, attempt: int) -> bool:
        """Put an attempt's slots on this node into quarantine until no process or GPU memory of the
        attempt remains. Return False if nothing remains."""
        left = await self._end_left(job_id, attempt)
        if not left:
            return False
        held = await self._slots_of(job_id, attempt)
        resources = Counter[str]()
        for each in held:
            resources.update(each.resources)
        known = self._book.get(job_id, attempt)
        entry = Quarantined(
            job_id,
            attempt,
            slots=sum(each.num_slots for each in held),
            resources=dict(resources),
            reason=left.sentence(),
            since=known.since if known else time.time(),
        )
        self._book.put(entry)
        print(f"slots in quarantine: {entry}", flush=True)  # noqa: T201
        return True

    async def _slots_of(self, job_id: str, attempt: int) -> list[placement_groups.HeldSlots]:
        found = await placement_groups.slots_of(job_id, attempt)
        return [each for each in found if self._node_id in each.node_ids]

    async def _tend_quarantine(self) -> None:
        """Release slots in quarantine once no process or GPU memory of their attempt remains."""
        while True:
            for entry in self._book.entries():
                try:
                    await self._try_again(entry)
                except Exception:
                    traceback.print_exc()
            await asyncio.sleep(QUARANTINE_PERIOD_S)

    async def _try_again(self, entry: Quarantined) -> None:
        left = await self._end_left(entry.job_id, entry.attempt)
        if left:
            if left.sentence() != entry.reason:
                self._book.put(replace(entry, reason=left.sentence()))
            return
        held = await self._slots_of(entry.job_id, entry.attempt)
        await placement_groups.release_slots([each.group for each in held])
        self._book.remove(entry.job_id, entry.attempt)
        print(f"released slots that are now clean: {entry}", flush=True)  # noqa: T201

    async def read(
        self, job_id: str, attempt: int, cursor: Mapping[str, int], max_bytes: int, wait_s: float
    ) -> SpoolRead:
        """`NodeSpools.read`."""
        return await self._spools.read(job_id, attempt, cursor, max_bytes, wait_s)

    async def read_left(
        self, job_id: str, attempt: int, cursor: Mapping[str, int], max_bytes: int
    ) -> dict[str, bytes]:
        """`NodeSpools.read_left`."""
        return self._spools.read_left(job_id, attempt, cursor, max_bytes)

    async def errors(self, job_id: str, attempt: int) -> list[Frame]:
        """`NodeSpools.errors`."""
        return self._spools.errors(job_id, attempt)

    async def stacks(
        self, job_id: str, attempt: int, ranks: Sequence[int], wait_s: float
    ) -> dict[int, str]:
        """Return the stacks of all threads of these ranks. Ranks that write no stacks within
        `wait_s` are omitted."""
        directory = page_dir(self._deployment_id, self._node_id, job_id, attempt)
        try:
            found = await stack_collector.collect(
                self._socket_path, directory, job_id, attempt, ranks, wait_s
            )
        except ForkFailed:
            return {}  # all ranks died with the forkserver
        masker = self._spools.masker(job_id, attempt)
        shown = {}
        for rank, text in found.items():
            silo = self._spools.silo(job_id, attempt, rank)
            shown[rank] = masker.text(text if silo is None else silo.stacks(text))
        return shown

    async def observe(
        self, job_id: str, attempt: int, with_speed: bool, with_system_metrics: bool
    ) -> NodeObservation:
        """Observe an attempt's training processes, including dead ones. Slowness and system metrics
        are included if requested."""
        metrics: dict[int, dict[str, float]] = {}
        # Sample the metrics first, because the ranks make progress during the sampling.
        if with_system_metrics:
            metrics = await self._system_metrics.sample(job_id, attempt)
            metrics = {
                rank: values
                for rank, values in metrics.items()
                if (silo := self._spools.silo(job_id, attempt, rank)) is None
                or Opening.SYSTEM_METRICS in silo.opens
            }
        ranks = self._observe_ranks(job_id, attempt)
        return NodeObservation(tuple(ranks), self._slowness(ranks) if with_speed else None, metrics)

    def _observe_ranks(self, job_id: str, attempt: int) -> list[RankObservation]:
        return observe_ranks(page_dir(self._deployment_id, self._node_id, job_id, attempt))

    async def activity(self, job_id: str, attempt: int) -> dict[tuple[int, int], Activity]:
        """Return the work that each live training process has done so far, keyed by rank and
        incarnation."""
        seen = [one for one in self._observe_ranks(job_id, attempt) if one.state]
        found = await asyncio.to_thread(lambda: [activity_of(one.status.pid) for one in seen])
        return {(s.rank, s.incarnation): each for s, each in zip(seen, found, strict=True)}

    async def slowness(self, job_id: str, attempt: int) -> float:
        """Return the largest factor by which waiting for a CPU slows down any process on this node
        that belongs to the attempt or to Ray (`ray_workers.shared.processes.machine_speed`)."""
        return self._slowness(self._observe_ranks(job_id, attempt))

    def _slowness(self, ranks: Sequence[RankObservation]) -> float:
        alive = [one.status.training_thread for one in ranks if one.state]
        of_ray = [child for parent in self._parents for child in children_of(parent)]
        return self._waits.sample([*alive, self._raylet, *of_ray])

    async def signal(self, job_id: str, attempt: int, rank: int, number: int) -> bool:
        """Send a signal to all processes of a rank. Return False if this node runs no process of
        the rank."""
        try:
            return bool(await send_to_rank(self._socket_path, job_id, attempt, rank, number))
        except ForkFailed:
            return False

    async def drop(self, job_id: str, attempt: int) -> None:
        """Delete an attempt's folders, temporary files, heartbeat pages and spools, including its
        spools on dead nodes of this machine. Call this method once all frames are stored. The
        spools are deleted last, because they identify the attempts."""
        temporary = temp_dir(self._deployment_id, self._node_id, job_id, attempt)
        await asyncio.to_thread(remove_tree, temporary)
        self._system_metrics.forget(job_id, attempt)
        await self._folders.drop((job_id, attempt))
        spool_reader.remove(page_dir(self._deployment_id, self._node_id, job_id, attempt))
        self._spools.drop(job_id, attempt)

    async def put_code(
        self, job_id: str, code: CodeRef | RemoteCodeRef, storage_url: str
    ) -> CodeProblem | None:
        """Put a job's code into its directory. Return the problem, or None if successful."""
        directory = work_root(self._deployment_id) / job_id
        try:
            await self._code_fetches.put_into(code, storage_url, directory)
        except (CodeRefused, CodeUnreachable) as error:
            return CodeProblem(str(error), is_final=isinstance(error, CodeRefused))
        except Exception as error:  # storage clients can raise anything
            traceback.print_exc()
            return CodeProblem(f"{type(error).__name__}: {error}", is_final=False)
        return None

    async def prepare(self, needs: NodeNeeds) -> NodeEnvironment:
        """Return the state of the code and environment that a job needs on this node, and start
        preparing them if necessary. Idempotent."""
        if silo_gate.has_source(os.environ):  # a setup command is user code
            need = JobNeed.CODE if needs.environment is None else JobNeed.ENVIRONMENT
            message = silo_gate.FOR_SILOS_ALONE
            return NodeEnvironment(need, BuildState.FAILED, message, (), (), log="")
        asked = []
        if needs.code is not None:
            asked.append(self._code_fetches.prepare(needs.code, needs.policy.owner))
        if needs.environment is not None:
            asked.append(
                self._environments.prepare(
                    needs.environment, needs.policy, keeps_all=needs.keeps_all
                )
            )
        answers = await asyncio.gather(*asked)
        return min(reversed(answers), key=lambda answer: _READINESS.index(answer.state))

    async def forget(self, needs: NodeNeeds) -> None:
        """Record that `needs.policy.owner` no longer has jobs with these needs, and stop preparing
        code and environments that no other job needs. Idempotent."""
        if needs.code is not None:
            self._code_fetches.forget(needs.code, needs.policy.owner)
        if needs.environment is not None:
            await self._environments.forget(
                needs.environment, needs.policy, keeps_all=needs.keeps_all
            )

    async def begin_folders(self, job_id: str, attempt: int, plan: FolderPlan) -> str | None:
        """Create the folders of a script's attempt. Return the reason for a failure, or None."""
        return await self._folders.begin((job_id, attempt), plan)

    async def output_sizes(self, job_id: str, attempt: int) -> dict[str, int] | None:
        """See `FolderKeeper.sizes`. The attempt must have no more processes on this node."""
        return await self._folders.sizes((job_id, attempt))

    async def keep_output(
        self, job_id: str, attempt: int, taken: Sequence[str], num_bytes: int = 0
    ) -> FilesKept | str:
        """`FolderKeeper.keep`. Call this once no process of the attempt runs on this node."""
        kept = await self._folders.keep((job_id, attempt), taken, num_bytes)
        masker = self._spools.masker(job_id, attempt)
        if isinstance(kept, str):
            return masker.text(kept)
        problem = kept.problem and masker.text(kept.problem)
        left_out, left_behind = map(masker.text, (kept.left_out, kept.left_behind))
        return replace(kept, problem=problem, left_out=left_out, left_behind=left_behind)

    async def kept_jobs(self) -> list[str]:
        """Return the jobs that have a directory on this machine."""
        return work_dir.jobs_in(work_root(self._deployment_id))

    async def drop_jobs(self, job_ids: Sequence[str]) -> None:
        """Delete the directories of deleted jobs."""
        await asyncio.to_thread(work_dir.remove, work_root(self._deployment_id), job_ids)

    async def spooled(self) -> list[tuple[str, int]]:
        """`NodeSpools.attempts`."""
        return self._spools.attempts()


_READINESS = (BuildState.FAILED, BuildState.UNREACHABLE, BuildState.BUILDING, BuildState.READY)


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
