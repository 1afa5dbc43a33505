"""One attempt in its supervisor: the supervisor's entire state and work for this attempt.

A run owns the slots and processes of the attempt, and ends when its supervisor drops it.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, assert_never

import ray
from ray.exceptions import RayActorError

from ray_workers.node.forkserver.client import ForkFailed
from ray_workers.node.node_address import own_address
from ray_workers.node.ray_calls import brief, result_within
from ray_workers.shared import paths, spool_reader
from ray_workers.shared.commands import Command, Drill, Grant, Leave, Limit, Recall, Stop
from ray_workers.shared.contracts import (
    FIRST_SIGNS,
    AttemptSpec,
    Cause,
    Frame,
    Outcome,
    Phase,
    PollReply,
)
from ray_workers.shared.heartbeat import TimeCategory
from ray_workers.shared.names import agent_name
from ray_workers.shared.processes.machine_speed import MachineSpeed
from ray_workers.shared.spool_reader import SpoolRead
from ray_workers.shared.supervisor_frames import LedgerReport
from ray_workers.supervision.fault_injection import FaultInjector
from ray_workers.supervision.group_monitor import GroupMonitor
from ray_workers.supervision.node_clients import CodeUnfetchable, NodeClients
from ray_workers.supervision.preparation import Preparation
from ray_workers.supervision.recovery import RecoveryController
from ray_workers.supervision.reporter import Reporter
from ray_workers.supervision.resizing import Resizing
from ray_workers.supervision.rules.failure_attribution import (
    errors_of,
    excused,
    judge,
    with_role,
)
from ray_workers.supervision.rules.slot_time import SlotTimeLedger
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.script_folders import ScriptFolders
from ray_workers.supervision.slots import SlotsUnavailable
from ray_workers.supervision.spares import Spares
from ray_workers.supervision.system_metrics import SystemMetricsReporter
from ray_workers.supervision.worker_group import WorkerGroup

BRIEF_PHASES = frozenset({Phase.STARTING, Phase.STOPPING})
"""Phases that usually last less than a second, so that polls don't return when they begin."""


class AttemptRun:
    """Runs one attempt, from acquiring its slots to releasing them, and answers the service's
    polls."""

    def __init__(self, spec: AttemptSpec) -> None:
        self._spec = spec
        self._speed = speed = MachineSpeed()
        self._timings = timings = Timings()
        own_node_id = ray.get_runtime_context().get_node_id()
        self._group = WorkerGroup(spec, own_node_id, own_address(), speed, timings)
        self._phase = Phase.ACQUIRING
        self._phase_times = {Phase.ACQUIRING.value: time.time()}
        self._started_at: float | None = None
        """Time at which the slots were reserved, from `time.monotonic`. `max_runtime_s` is measured
        from this time."""
        self._outcome: Outcome | None = None
        self._changed = asyncio.Event()
        nodes = dict.fromkeys([*(part.node_id for part in spec.slices), own_node_id])
        agents = {node_id: _agent_of(node_id) for node_id in nodes}
        self._without_agent = [node_id for node_id, agent in agents.items() if agent is None]
        self._agents = {n: agent for n, agent in agents.items() if agent is not None}
        self._reporter = Reporter(
            paths.spool_dir(spec.deployment_id, own_node_id, spec.job_id, spec.attempt),
            spec.spool_limit_bytes,
        )
        self._system_metrics = SystemMetricsReporter(self._reporter, spec.system_metrics_s)
        self._nodes = NodeClients(spec, self._agents, speed, self._system_metrics, timings)
        self._folders = ScriptFolders(spec, self._nodes, timings, self._reporter.report)
        self._drills = FaultInjector(self._reporter)
        parts = (spec, self._group, self._nodes, self._reporter)
        starts = Preparation(self._group, self._nodes, self._prepare, speed, timings)
        recovery = RecoveryController(*parts, self._book_slots, starts, speed, timings)
        self._resizing = Resizing(spec, self._group, self._nodes, recovery, starts, timings)
        spares = Spares(*parts, recovery, starts, speed, timings)
        changes = (recovery, self._resizing, spares)
        self._monitor = GroupMonitor(*parts, self._drills, *changes, speed, timings)
        self._ledger = SlotTimeLedger()
        self._was_commanded = False
        self._task = asyncio.ensure_future(self._run())

    async def poll(self, cursor: Mapping[str, int], wait_s: float, max_bytes: int) -> PollReply:
        """Return the frames after `cursor`. Waits up to `wait_s` for frames, or for a change of the
        phase."""
        deadline = time.monotonic() + wait_s
        phase = self._phase
        while True:
            ended = self._phase is Phase.ENDED
            read, unread = await self._read(cursor, max_bytes, deadline - time.monotonic())
            over = ended and not read.more and await self._are_not_awaited(unread)
            if over and unread and self._outcome is not None:
                ranks = [m.index for m in self._group.members if m.node_id in unread]
                self._outcome = _without_reports(self._outcome, len(unread), ranks)
            has_just_ended = self._phase is Phase.ENDED and not ended
            if has_just_ended and not read.data:
                continue  # the last frames can be read now
            news = read.data or over or self._phase is not phase
            if news or time.monotonic() >= deadline:
                return self._reply(cursor, read, over)
            await asyncio.sleep(self._timings.idle_pause_s)

    async def _read(
        self, cursor: Mapping[str, int], max_bytes: int, wait_s: float
    ) -> tuple[SpoolRead, set[str]]:
        """Return new frames from all nodes, and the nodes that did not respond. Returns early when
        the phase changes.

        `wait_s` is the time in seconds until the poll's deadline. Responses can arrive up to
        `poll_slack_s` later.
        """
        ended = self._phase is Phase.ENDED
        limit_s = max(wait_s, 0.0) + self._timings.poll_slack_s
        is_only = len(self._agents) == 1
        most_s = self._timings.only_read_wait_s if is_only else self._timings.read_wait_s
        wait_s = 0.0 if ended else min(max(wait_s, 0.0), most_s)
        share = max_bytes // max(1, len(self._agents))
        since = (dict(cursor), share, wait_s)
        node_ids = list(self._agents)
        reads = asyncio.gather(
            *(self._read_node(node_id, wait_s, *since) for node_id in node_ids),
            return_exceptions=True,
        )
        self._changed.clear()
        changed = asyncio.ensure_future(self._changed.wait())
        either: set[asyncio.Future[Any]] = {reads, changed}
        await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        if not reads.done():
            return SpoolRead({}, False), set(node_ids)  # the next poll repeats the read
        answers = dict(zip(node_ids, reads.result(), strict=True))
        read = [answer for answer in answers.values() if isinstance(answer, SpoolRead)]
        found = {key: chunk for answer in read for key, chunk in answer.data.items()}
        unread = {n for n, answer in answers.items() if not isinstance(answer, SpoolRead)}
        return SpoolRead(found, any(answer.more for answer in read)), unread

    async def _read_node(self, node_id: str, wait_s: float, *cursor: Any) -> SpoolRead:
        is_silent, timings = self._nodes.is_silent(node_id), self._timings
        slack_s = timings.silent_read_slack_s if is_silent else timings.read_slack_s
        limit_s = wait_s + slack_s
        answer: SpoolRead = await self._nodes.ask(node_id, "read", *cursor, limit_s=limit_s)
        return answer

    async def _are_not_awaited(self, node_ids: Set[str]) -> bool:
        """Whether to stop waiting for the last reports of the ranks on these nodes. Always true if
        the job is being cancelled."""
        return self._monitor.asked.is_stopping or await self._nodes.are_given_up(node_ids)

    def _reply(self, cursor: Mapping[str, int], read: SpoolRead, over: bool) -> PollReply:
        frames: list[Frame] = []
        advanced = dict(cursor)
        for key, chunk in read.data.items():
            frames += spool_reader.decode(key, chunk)
            advanced[key] = advanced.get(key, 0) + len(chunk)
        if self._phase is Phase.STARTING and any(f.kind in FIRST_SIGNS for f in frames):
            self._enter(Phase.RUNNING)
        return PollReply(
            cursor=advanced,
            phase=self._phase,
            phase_times=dict(self._phase_times),
            frames=tuple(frames),
            more=read.more,
            outcome=self._outcome if over else None,
            silent=(*self._nodes.silent(), *self._monitor.silent()),
        )

    async def carry_out(self, command: Command) -> None:
        """Carry out a command from the service. Repeating a command has no effect."""
        self._was_commanded = True
        match command:
            case Stop():
                self._monitor.asked.stop()
            case Leave(grace_s):
                self._monitor.asked.leave(grace_s)
            case Drill():
                self._drills.add(command)
                self._monitor.look()
            case Grant():
                self._resizing.grow(command)
                self._monitor.look()
            case Recall():
                self._resizing.recall(command)
            case Limit():
                self._monitor.running_time.set_limit(command)
            case _:
                assert_never(command)

    async def drop(self) -> None:
        """Delete the spools, because the service has stored the last reply, and release everything
        that the run holds in this process."""
        key, limit_s = (self._spec.job_id, self._spec.attempt), self._timings.drop_limit_s
        drops = [result_within(limit_s, a.drop.remote(*key)) for a in self._agents.values()]
        await asyncio.gather(*drops, return_exceptions=True)
        self._group.close()
        self._reporter.close()
        self._task.cancel()

    @property
    def was_routine(self) -> bool:
        """Whether the attempt was short and successful, and nothing unusual happened. A process
        that has run only such attempts exports no progress to Ray and has read no secrets."""
        outcome = self._outcome
        if outcome is None or outcome.cause is not Cause.SUCCEEDED or outcome.ran_s is None:
            return False
        is_short = outcome.ran_s < self._timings.short_s
        has_secrets = bool((self._spec.spec.get("environment") or {}).get("secrets"))
        was_disturbed = self._was_commanded or self._nodes.was_one_silent
        is_first = all(member.incarnation == 0 for member in self._group.members)
        return is_short and is_first and not has_secrets and not was_disturbed

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._phase_times[phase.value] = time.time()
        if phase in BRIEF_PHASES:
            asyncio.get_running_loop().call_later(self._timings.brief_phase_s, self._changed.set)
        else:
            self._changed.set()

    async def _run(self) -> None:
        chores = [
            asyncio.ensure_future(chore) for chore in (self._keep_books(), self._refresh_speed())
        ]
        try:
            outcome = await self._train()
        except SlotsUnavailable as error:
            outcome = Outcome.of(Cause.SLOTS_UNAVAILABLE, str(error))
        except _NodesLeft as error:
            outcome = Outcome.of(Cause.NODE_LOST, str(error))
        except ForkFailed as error:  # for example, another job killed the forkserver
            outcome = Outcome.of(Cause.NODE_LOST, _not_started(error))
        except RayActorError as error:
            outcome = Outcome.of(Cause.WORKER_LOST, _not_started(error))
        except CodeUnfetchable as error:
            outcome = Outcome.of(Cause.CANNOT_RUN, str(error))
        except Exception as error:
            traceback.print_exc()
            outcome = Outcome.of(Cause.INFRASTRUCTURE, f"{type(error).__name__}: {error}")
        for chore in chores:
            chore.cancel()
        await self._release()
        outcome = await self._folders.keep(outcome, self._are_not_awaited)
        await self._report_ledger()
        is_of_node = self._nodes.was_one_silent or await self._group.has_lost_a_node()
        if outcome.cause is Cause.WORKER_LOST and is_of_node:
            outcome = replace(outcome, cause=Cause.NODE_LOST)
        outcome = with_role(excused(outcome, self._speed.overrun), self._spec.traits.role_names)
        lost, ran_s = dict(self._group.log_lines_lost), self._ran_s()
        self._outcome = replace(outcome, log_lines_lost=lost, ran_s=ran_s)
        self._enter(Phase.ENDED)

    def _ran_s(self) -> float | None:
        return None if self._started_at is None else time.monotonic() - self._started_at

    async def _refresh_speed(self) -> None:
        while True:
            await self._nodes.refresh_speed()
            await asyncio.sleep(self._timings.speed_period_s)

    async def _keep_books(self) -> None:
        """Periodically report how the slots and the machines are used."""
        while True:
            await asyncio.sleep(self._timings.ledger_period_s)
            self._system_metrics.ask()
            await self._report_ledger()

    def _book_slots(self) -> None:
        self._ledger.hold(self._group.num_slots, time.monotonic())

    async def _report_ledger(self) -> None:
        slot_seconds = await self._slot_seconds()
        if self._ledger.held_s:
            self._reporter.report(LedgerReport(slot_seconds))

    async def _slot_seconds(self, otherwise: TimeCategory | None = None) -> dict[str, float]:
        """Return the slot-seconds by category so far. `otherwise` is the category for time that no
        process has accounted for; the default is the monitor's estimate."""
        observations = await self._monitor.observe()
        self._book_slots()
        return self._ledger.account(observations, otherwise or self._monitor.use)

    async def _release(self) -> None:
        """Release the slots, retrying until this succeeds, because an attempt ends only when its
        slots are free."""
        while True:
            try:
                return await self._group.release()
            except Exception:
                traceback.print_exc()
                await asyncio.sleep(self._timings.release_pause_s)

    async def _train(self) -> Outcome:
        asked = asyncio.ensure_future(self._monitor.asked.before_training())
        building = asyncio.ensure_future(self._build())
        await asyncio.wait({asked, building}, return_when=asyncio.FIRST_COMPLETED)
        if not building.done():
            building.cancel()
            await asyncio.wait({building})
            return asked.result()
        asked.cancel()
        building.result()
        outcome = await self._monitor.watch()
        ended = self._group.ended()  # before this supervisor ends the others
        ranks = {(m.index, m.incarnation): m.rank for m in self._group.placed}
        self._enter(Phase.STOPPING)
        await self._group.stop_processes()
        under_nccl = bool(self._spec.bundle.get("GPU")) and len(self._group.placed) > 1
        if outcome is not None:
            return outcome
        errors = {}
        if any(rank.exit_code != 0 for rank in ended):
            frames = await self._nodes.all_errors(self._are_not_awaited)
            errors = errors_of(frames, ranks)
        is_script = self._spec.traits.is_script
        return judge(ended, errors, under_nccl=under_nccl, is_script=is_script)

    async def _prepare(self, node_ids: Collection[str]) -> None:
        """Prepare these nodes for ranks: put the job's code into the job's directory, and create
        the script's folders. Raises CodeUnavailable or CodeUnfetchable."""
        await asyncio.gather(
            self._nodes.put_code(self._spec, node_ids), self._folders.begin(node_ids)
        )

    async def _build(self) -> None:
        if self._without_agent:
            nodes = ", ".join(self._without_agent)
            raise _NodesLeft(f"dray's agent was not found on {nodes}")
        code = asyncio.ensure_future(self._prepare([p.node_id for p in self._spec.slices]))
        try:
            await self._group.acquire()
            self._book_slots()
            self._enter(Phase.STARTING)
            self._started_at = time.monotonic()
            await code
        finally:
            code.cancel()
        limit_s = self._timings.start_limit_s
        try:
            await self._speed.within(limit_s, self._group.start())
        except TimeoutError:
            message = f"the group did not start within {limit_s:g} s{self._speed.why()}"
            raise ForkFailed(message) from None
        if self._spec.traits.is_script:
            self._enter(Phase.RUNNING)  # scripts do not have to report steps
        self._system_metrics.ask()
        await self._slot_seconds(TimeCategory.STARTING)


class _NodesLeft(Exception):
    """Nodes were removed after the scheduler had chosen them, for example by an autoscaler that
    removes idle nodes."""


def _agent_of(node_id: str) -> Any:
    try:
        return ray.get_actor(agent_name(node_id))
    except ValueError:
        return None


def _without_reports(outcome: Outcome, num_nodes: int, ranks: Sequence[int]) -> Outcome:
    """Return the outcome of an attempt whose last reports are lost. Such an attempt never counts as
    a success.

    `ranks` contains the ranks on nodes that did not report, numbered as in the names of their logs.
    """
    lost = {**(outcome.log_lines_lost or {}), **dict.fromkeys(ranks)}
    outcome = replace(outcome, log_lines_lost=lost)
    if outcome.cause is not Cause.SUCCEEDED:
        return outcome
    nodes = "a node" if num_nodes == 1 else f"{num_nodes} nodes"
    message = f"every rank succeeded, but the last reports from {nodes} never arrived"
    return replace(outcome, cause=Cause.NODE_LOST, message=message)


def _not_started(error: BaseException) -> str:
    return f"a worker could not be started: {brief(error)}"
