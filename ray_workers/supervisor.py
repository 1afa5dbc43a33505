"""The supervisor: one detached actor per attempt, which owns everything below it.

It holds no slot and runs on control nodes only, because its death takes the group along. It
outlives the service: the training goes on while nobody polls, and what the ranks report waits
in the spools. It ends when the service acknowledges its last reply.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError

from ray_workers import node_agent, paths, releasing, spool
from ray_workers.contracts import (
    AttemptSpec,
    Cause,
    Drill,
    Frame,
    FrameKind,
    Grant,
    Outcome,
    Phase,
    PollReply,
    agent_name,
)
from ray_workers.drills import Drills
from ray_workers.forking import ForkFailed
from ray_workers.group import SlotsUnavailable, WorkerGroup
from ray_workers.guard import Guard
from ray_workers.ledger import Ledger
from ray_workers.mender import Mender
from ray_workers.seeing import Nodes, result_within
from ray_workers.spool import SpoolRead
from ray_workers.telling import Teller
from ray_workers.verdict import judge

START_LIMIT_S = 180.0
"""Longest from having the slots to every process running; above the forkserver's own limit."""
RELEASE_PAUSE_S = 1.0
IDLE_PAUSE_S = 0.05
"""After a read that came back early with nothing, such as from an agent that is restarting."""
LEDGER_S = 10.0
READ_SLACK_S = 5.0
READ_WAIT_S = 1.0
"""Longest that one read of a node agent waits; a poll is made of several."""
LAST_READ_LIMIT_S = 120.0
"""How long the outcome is held back for a node that lives and does not say what its ranks told."""


@ray.remote(num_cpus=0, max_restarts=0)
class Supervisor:
    """Runs one attempt from slots to release, and answers polls meanwhile and after."""

    def __init__(self, spec: AttemptSpec) -> None:
        self._spec = spec
        self._group = WorkerGroup(
            spec, ray.get_runtime_context().get_node_id(), node_agent.own_address()
        )
        self._phase = Phase.ACQUIRING
        self._phase_times = {Phase.ACQUIRING.value: time.time()}
        self._outcome: Outcome | None = None
        self._changed = asyncio.Event()
        own_node_id = ray.get_runtime_context().get_node_id()
        nodes = dict.fromkeys([*(part.node_id for part in spec.slices), own_node_id])
        self._agents = {node_id: ray.get_actor(agent_name(node_id)) for node_id in nodes}
        self._nodes = Nodes(spec, self._agents)
        self._teller = Teller(
            paths.spool_dir(spec.deployment_id, own_node_id, spec.job_id, spec.attempt),
            spec.spool_limit_bytes,
        )
        self._drills = Drills(self._teller)
        self._mender = Mender(
            spec, self._group, self._nodes, self._teller, self._drills, self._book_slots
        )
        self._guard = Guard(
            spec, self._group, self._nodes, self._teller, self._drills, self._mender
        )
        self._ledger = Ledger()
        self._task = asyncio.ensure_future(self._run())

    def __repr__(self) -> str:
        return f"dray:{self._spec.job_id}:{self._spec.attempt}:supervisor"

    async def poll(self, cursor: Mapping[str, int], wait_s: float, max_bytes: int) -> PollReply:
        """What happened after `cursor`; answers at once when there is something."""
        deadline = time.monotonic() + wait_s
        phase = self._phase
        while True:
            ended = self._phase is Phase.ENDED
            read, silent = await self._read(cursor, max_bytes, deadline - time.monotonic())
            over = ended and not read.data and await self._are_given_up(silent)
            news = read.data or over or self._phase is not phase
            if news or time.monotonic() >= deadline:
                return self._reply(cursor, read, over)
            await asyncio.sleep(IDLE_PAUSE_S)

    async def _read(
        self, cursor: Mapping[str, int], max_bytes: int, wait_s: float
    ) -> tuple[SpoolRead, set[str]]:
        """New frames from every node, and the nodes that did not answer; returns early when the
        phase changes."""
        ended = self._phase is Phase.ENDED
        wait_s = 0.0 if ended else min(max(wait_s, 0.0), READ_WAIT_S)
        share = max_bytes // len(self._agents)
        of_attempt = (self._spec.job_id, self._spec.attempt, dict(cursor), share, wait_s)
        node_ids = list(self._agents)
        reads = asyncio.gather(
            *(
                result_within(wait_s + READ_SLACK_S, self._agents[node_id].read.remote(*of_attempt))
                for node_id in node_ids
            ),
            return_exceptions=True,
        )
        self._changed.clear()
        changed = asyncio.ensure_future(self._changed.wait())
        either: set[asyncio.Future[Any]] = {reads, changed}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        if not reads.done():
            return SpoolRead({}, False), set(node_ids)  # a read changes nothing: it is asked again
        answers = dict(zip(node_ids, reads.result(), strict=True))
        told = [answer for answer in answers.values() if isinstance(answer, SpoolRead)]
        found = {key: chunk for answer in told for key, chunk in answer.data.items()}
        silent = {n for n, answer in answers.items() if not isinstance(answer, SpoolRead)}
        return SpoolRead(found, any(answer.more for answer in told)), silent

    async def _are_given_up(self, silent: set[str]) -> bool:
        """Whether what nodes that do not answer have of an attempt that ended is not waited for:
        they are dead, or it has been too long. An agent that died comes back and has it all."""
        if not silent or time.time() - self._phase_times[Phase.ENDED.value] > LAST_READ_LIMIT_S:
            return True
        return not silent & await asyncio.to_thread(releasing.alive_nodes)

    def _reply(self, cursor: Mapping[str, int], read: SpoolRead, over: bool) -> PollReply:
        frames: list[Frame] = []
        advanced = dict(cursor)
        for key, chunk in read.data.items():
            frames += spool.decode(key, chunk)
            advanced[key] = advanced.get(key, 0) + len(chunk)
        if self._phase is Phase.STARTING and any(f.kind is FrameKind.METRICS for f in frames):
            self._enter(Phase.RUNNING)
        return PollReply(
            cursor=advanced,
            phase=self._phase,
            phase_times=dict(self._phase_times),
            frames=tuple(frames),
            more=read.more,
            outcome=self._outcome if over else None,
        )

    async def stop(self) -> None:
        """End the attempt: the job is being cancelled."""
        self._guard.stop()

    async def preempt(self, grace_s: float) -> None:
        """Have the group save a checkpoint and leave within `grace_s` seconds."""
        self._guard.leave(grace_s)

    async def grow(self, grant: Grant) -> None:
        """Take these slots in, which were claimed for the attempt; once by the grant's number."""
        self._mender.grow(grant)

    async def drill(self, drill: Drill) -> None:
        """Inject a fault, once by the drill's id."""
        self._drills.add(drill)

    async def acknowledge(self) -> None:
        """The last reply is stored: delete the spools. Whoever asked then ends this actor."""
        drops = [
            agent.drop.remote(self._spec.job_id, self._spec.attempt)
            for agent in self._agents.values()
        ]
        await asyncio.gather(*drops, return_exceptions=True)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._phase_times[phase.value] = time.time()
        self._changed.set()

    async def _run(self) -> None:
        booking = asyncio.ensure_future(self._keep_books())
        try:
            outcome = await self._train()
        except SlotsUnavailable as error:
            outcome = Outcome(Cause.SLOTS_UNAVAILABLE, str(error))
        except (ForkFailed, RayActorError) as error:
            outcome = Outcome(Cause.WORKER_LOST, f"a worker could not be started: {error}")
        except Exception as error:
            traceback.print_exc()
            outcome = Outcome(Cause.INFRASTRUCTURE, f"{type(error).__name__}: {error}")
        booking.cancel()
        await self._release()
        await self._tell_ledger()
        if outcome.cause is Cause.WORKER_LOST and await self._group.has_lost_a_node():
            outcome = replace(outcome, cause=Cause.NODE_LOST)
        self._outcome = outcome
        self._enter(Phase.ENDED)

    async def _keep_books(self) -> None:
        """Tell now and then what the slots are used for."""
        while True:
            await asyncio.sleep(LEDGER_S)
            await self._tell_ledger()

    def _book_slots(self) -> None:
        self._ledger.hold(self._group.num_slots, time.monotonic())

    async def _tell_ledger(self) -> None:
        sights = await self._guard.see()
        self._book_slots()
        if self._ledger.held_s:
            slot_seconds = self._ledger.look(sights, self._guard.use)
            self._teller.tell(FrameKind.LEDGER, {"slot_seconds": slot_seconds})

    async def _release(self) -> None:
        """Until it is done: an attempt whose slots are not seen free has not ended."""
        while True:
            try:
                return await self._group.release()
            except Exception:
                traceback.print_exc()
                await asyncio.sleep(RELEASE_PAUSE_S)

    async def _train(self) -> Outcome:
        asked = asyncio.ensure_future(self._guard.asked_to_end())
        building = asyncio.ensure_future(self._build())
        await asyncio.wait({asked, building}, return_when=asyncio.FIRST_COMPLETED)
        if not building.done():
            building.cancel()
            await asyncio.wait({building})
            return asked.result()
        asked.cancel()
        building.result()
        outcome = await self._guard.watch()
        ended = self._group.ended()  # the others are ended by us
        self._enter(Phase.STOPPING)
        await self._group.stop_processes()
        under_nccl = bool(self._spec.bundle.get("GPU")) and len(self._group.placed) > 1
        return outcome or judge(ended, await self._nodes.errors(), under_nccl=under_nccl)

    async def _build(self) -> None:
        await self._group.acquire()
        self._book_slots()
        self._enter(Phase.STARTING)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await self._group.start()
        except TimeoutError:
            raise ForkFailed(f"the group was not up within {START_LIMIT_S:g} s") from None
        if self._spec.spec.get("script"):
            self._enter(Phase.RUNNING)  # a script need not report steps
