"""The worker group: slots, rank actors and training processes of one attempt, as one thing.

Each resource is recorded the moment it exists and released in the reverse order, so that a group
that was only half built is torn down by the same code as a whole one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_workers.node import placement_groups
from ray_workers.node.ending import end_actor
from ray_workers.node.forkserver_client import ForkedProcess, ForkFailed
from ray_workers.node.ray_calls import result_within
from ray_workers.shared import paths, spool_reader, store_proxy
from ray_workers.shared.contracts import (
    AWAITING,
    AttemptSpec,
    Cause,
    Outcome,
    RankTask,
    Seat,
    Slice,
    rank_name,
)
from ray_workers.shared.heartbeat import RankAssignment, prefix_of
from ray_workers.shared.machine_pace import MachinePace
from ray_workers.supervision.failure_attribution import RankExit
from ray_workers.supervision.rank_actor import RankActor

ROLE = "worker"
STOP_GRACE_S = 3.0
"""Between SIGTERM and SIGKILL."""
STOP_LIMIT_S = STOP_GRACE_S + 20.0
"""For a process to be seen gone after SIGKILL: above what the forkserver itself allows
(`forkserver.STUCK_S`)."""
ANNOUNCE_LIMIT_S = 5.0
GROW_TIMEOUT_S = 10.0
"""How long Ray may take to give slots that were free a moment ago."""


class SlotsUnavailable(Exception):
    """Ray did not give every slot in time."""


@dataclass
class Slots:
    """One placement group, which is what the attempt holds of one node, or a part of it."""

    part: Slice
    group: PlacementGroup
    is_held: bool = True
    """False while it is asked for and may not come."""


@dataclass
class Member:
    """One worker: where it lies, the actor that stands for it, and the process it has now."""

    seat: int
    """What it is called as long as the attempt lasts; no other member ever is."""
    rank: int
    """What it is in the group now; seats that are lost leave no gap."""
    local_rank: int
    node_rank: int
    slots: Slots
    actor: Any
    incarnation: int = 0
    """The generation of the group for which its process was started."""
    is_placed: bool = True
    """It has a place in the group; a newcomer gets one when it is ready."""
    exit: asyncio.Future[RankExit] | None = None
    """Done when the process is seen gone or the actor is lost."""

    @property
    def node_id(self) -> str:
        return self.slots.part.node_id

    @property
    def is_running(self) -> bool:
        return self.exit is not None and not self.exit.done()

    @property
    def end(self) -> RankExit:
        """How its process ended, as the rank that it was."""
        assert self.exit is not None, "it never ran"
        return replace(self.exit.result(), rank=self.rank)


class WorkerGroup:
    """Everything below a supervisor."""

    def __init__(
        self, spec: AttemptSpec, own_node_id: str, own_address: str, pace: MachinePace
    ) -> None:
        self._pace = pace
        self._spec = spec
        self._own_node_id = own_node_id
        self._own_address = own_address
        self._store: ForkedProcess | None = None
        self._store_port, self._store_secret = 0, b""
        self._num_slots_ever = 0
        self._num_seats_ever = 0
        self._node_ids = {part.node_id for part in spec.slices} | {own_node_id}
        self.slots: list[Slots] = []
        self.members: list[Member] = []
        self.log_lines_lost: dict[int, int | None] = {}
        """As `Outcome.log_lines_lost`."""

    async def acquire(self) -> None:
        """Reserve the slots, one placement group per node slice: all of them or none.

        Raises SlotsUnavailable after `start_timeout_s`; release() gives back what was reserved.
        """
        await self._acquire(self._spec.slices, self._spec.start_timeout_s)

    async def _acquire(
        self, slices: Sequence[Slice], timeout_s: float, *, is_held: bool = True
    ) -> list[Slots]:
        spec, asked = self._spec, []
        for part in slices:
            group = placement_group(
                [dict(spec.bundle)] * part.num_workers,
                strategy="STRICT_PACK",
                name=placement_groups.slots_name(spec.job_id, spec.attempt, self._num_slots_ever),
                lifetime="detached",
                bundle_label_selector=[{"ray.io/node-id": part.node_id}] * part.num_workers,
            )
            self._num_slots_ever += 1
            asked.append(Slots(part, group, is_held))
            self.slots.append(asked[-1])
        deadline = time.monotonic() + timeout_s
        waits = [
            # Ray counts this in whole seconds and cuts off the rest.
            asyncio.to_thread(slots.group.wait, math.ceil(max(deadline - time.monotonic(), 0.0)))
            for slots in asked
        ]
        if not all(await asyncio.gather(*waits)):
            num = sum(part.num_workers for part in slices)
            raise SlotsUnavailable(
                f"Ray did not give {num} slots within {timeout_s:g} s; "
                "others may be using the cluster"
            )
        return asked

    async def start(self) -> None:
        """Start the rendezvous store, the rank actors and the training processes."""
        store = asyncio.ensure_future(self._start_store())
        try:
            for node_rank, slots in enumerate(self.slots):
                self._create_members(slots, node_rank)
        finally:
            self._store_port, self._store_secret = await store
        await asyncio.gather(*(self._start_process(member, 0) for member in self.members))

    async def _start_store(self) -> tuple[int, bytes]:
        """The port and the secret of its proxy."""
        spec, node_id = self._spec, self._own_node_id
        path = paths.socket_path(spec.deployment_id, node_id)
        task = {"job_id": spec.job_id, "attempt": spec.attempt, "rank": -1}
        folder = paths.temp_dir(spec.deployment_id, node_id, spec.job_id, spec.attempt)
        request = {
            "op": "store",
            "task": task,
            "address": self._own_address,
            "temp_dir": str(folder),
        }
        self._store = await ForkedProcess.start(path, request)
        with open(self._store.output, closefd=False) as output:
            line = await asyncio.to_thread(output.readline)
        try:
            port, secret = line.split()
            return int(port), bytes.fromhex(secret)
        except ValueError:
            raise ForkFailed(f"the rendezvous store did not start: {line.strip()}") from None

    def _create_members(self, slots: Slots, node_rank: int) -> list[Member]:
        created = []
        for local_rank in range(slots.part.num_workers):
            seat = self._num_seats_ever
            self._num_seats_ever += 1
            actor = self._create_actor(seat, 0, slots, local_rank)
            created.append(Member(seat, seat, local_rank, node_rank, slots, actor))
            self.members.append(created[-1])
        return created

    def _create_actor(self, seat: int, incarnation: int, slots: Slots, local_rank: int) -> Any:
        spec = self._spec
        name = rank_name(spec.job_id, spec.attempt, ROLE, seat, incarnation)
        resources = {k: v for k, v in spec.bundle.items() if k not in _NAMED_RESOURCES}
        return RankActor.options(  # type: ignore[attr-defined]
            name=name,
            num_cpus=spec.bundle.get("CPU", 0),
            num_gpus=spec.bundle.get("GPU", 0),
            memory=spec.bundle.get("memory"),
            resources=resources,
            max_concurrency=16,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                slots.group, placement_group_bundle_index=local_rank
            ),
        ).remote(name, str(spec.spec["name"]))

    async def _start_process(self, member: Member, generation: int) -> None:
        """Fork a process for the member; after the first generation it is told its place later."""
        member.incarnation = generation
        socket_path = paths.socket_path(self._spec.deployment_id, member.node_id)
        await member.actor.start.remote(self._task(member), socket_path, self._store_secret)
        member.exit = asyncio.ensure_future(self._exit_of(member))

    def _task(self, member: Member) -> RankTask:
        spec = self._spec
        place = (spec.deployment_id, member.node_id, spec.job_id, spec.attempt)
        is_first = member.incarnation == 0
        stream = "metrics" if is_first else "early"  # a rank's own stream comes with its place
        key = spool_reader.spool_key(member.seat, member.incarnation, stream)
        seat = Seat(
            rank=member.seat,
            incarnation=member.incarnation,
            local_rank=member.local_rank,
            local_world_size=member.slots.part.num_workers,
            node_rank=member.node_rank,
            master_addr=self._own_address,
            master_port=self._store_port,
            spool_dir=str(paths.spool_dir(*place) / key),
            temp_dir=str(paths.temp_dir(*place)),
            work_dir=str(paths.work_root(spec.deployment_id) / spec.job_id),
            page_prefix=prefix_of(paths.page_dir(*place), member.seat, member.incarnation),
            generation=0 if is_first else AWAITING,
        )
        return RankTask.of(spec, seat)

    async def _exit_of(self, member: Member) -> RankExit:
        try:
            ended: RankExit = await member.actor.wait.remote()
        except RayActorError:
            self.log_lines_lost[member.seat] = None
            return RankExit(member.rank, None)
        lost = self.log_lines_lost.get(member.seat, 0)
        if ended.log_lines_lost and lost is not None:
            self.log_lines_lost[member.seat] = lost + ended.log_lines_lost
        return ended

    @property
    def placed(self) -> list[Member]:
        """The members that have a place in the group, by rank."""
        return sorted((m for m in self.members if m.is_placed), key=lambda member: member.rank)

    @property
    def running(self) -> list[Member]:
        """Those of them whose process runs."""
        return [member for member in self.placed if member.is_running]

    @property
    def num_slots(self) -> int:
        return sum(slots.part.num_workers for slots in self.slots)

    def ended(self) -> list[RankExit]:
        """How the ranks ended whose newest process has."""
        return [member.end for member in self.placed if not member.is_running]

    async def replace(self, members: Sequence[Member], generation: int) -> None:
        """Give each of these members, whose processes are gone, another one.

        One whose actor is gone too gets another actor in the same slot. Raises RayActorError or
        ForkFailed if that is not to be.
        """

        async def replace_one(member: Member) -> None:
            if member.end.exit_code is None:
                with contextlib.suppress(RayActorError):
                    ray.kill(member.actor)
                member.actor = self._create_actor(
                    member.seat, generation, member.slots, member.local_rank
                )
            await self._start_process(member, generation)

        await asyncio.gather(*map(replace_one, members))

    async def add(self, slices: Sequence[Slice], generation: int) -> list[Member]:
        """Take more slots in, with a process in each that has no place in the group yet.

        Raises SlotsUnavailable, RayActorError or ForkFailed; then nothing was taken.
        """
        self._node_ids |= {part.node_id for part in slices}
        known = list(self.slots)
        try:
            asked = await self._acquire(slices, self._pace.stretched(GROW_TIMEOUT_S), is_held=False)
            members = [m for slots in asked for m in self._create_members(slots, 0)]
            for member in members:
                member.is_placed = False
            await asyncio.gather(*(self._start_process(m, generation) for m in members))
        except BaseException:
            await self.give_back([slots for slots in self.slots if slots not in known])
            raise
        for slots in asked:
            slots.is_held = True
        return members

    async def lose_nodes(self, node_ids: Set[str]) -> list[Member]:
        """Forget what lay on nodes that are gone; the members that did."""
        lost = [slots for slots in self.slots if slots.part.node_id in node_ids]
        members = [member for member in self.members if member.slots in lost]
        await self.give_back(lost)
        return members

    async def give_back(self, slots: Sequence[Slots]) -> None:
        """End what runs in these slots, and give them back as soon as it is seen gone."""
        going = [member for member in self.members if member.slots in slots]
        for member in going:
            with contextlib.suppress(RayActorError):
                ray.kill(member.actor)
        self.members = [member for member in self.members if member not in going]
        self.slots = [each for each in self.slots if each not in slots]
        await asyncio.gather(*(m.exit for m in going if m.exit is not None))
        await placement_groups.give_back([each.group for each in slots])

    async def announce(self, generation: int) -> None:
        """Tell every member that runs and has a place which rank it has in the next generation."""
        staying = self.running
        for rank, member in enumerate(staying):
            member.rank = rank
        limit_s = self._pace.stretched(ANNOUNCE_LIMIT_S)
        places = (RankAssignment(generation, member.rank, len(staying)) for member in staying)
        told = (
            result_within(limit_s, member.actor.announce.remote(place))
            for member, place in zip(staying, places, strict=True)
        )
        # One that is gone meanwhile, or does not answer, is the next loss.
        await asyncio.gather(*told, return_exceptions=True)

    async def ask_to_leave(self) -> None:
        """Have the group save a checkpoint and end: rank 0 does, the others can't go on then.

        A script gets a SIGTERM in each process, and does what it will.
        """
        if self._spec.spec.get("script"):
            for member in self.running:
                member.actor.terminate.remote()
        else:
            asked = [
                result_within(self._pace.stretched(ANNOUNCE_LIMIT_S), m.actor.ask_to_leave.remote())
                for m in self.running
                if m.rank == 0
            ]
            await asyncio.gather(*asked, return_exceptions=True)

    async def stop_processes(self) -> None:
        """End every training process; returns when all are seen gone, or when a rank actor did not
        see that in time: what it holds is ended with it, by `release`."""
        running = [member for member in self.members if member.is_running]
        for member in running:
            member.actor.stop.remote(STOP_GRACE_S)  # not waited for: it ends with its actor
        if running:
            await asyncio.wait({m.exit for m in running if m.exit}, timeout=STOP_LIMIT_S)
            silent = [member.actor for member in running if member.is_running]
            await asyncio.gather(*(asyncio.to_thread(end_actor, actor) for actor in silent))

    async def store_answers(self) -> None:
        """Return once the rendezvous store's process has answered; OSError if nobody listens."""
        await store_proxy.hear(self._own_address, self._store_port)

    def end_store(self) -> None:
        """Kill the rendezvous store, which `store_is_lost` then tells."""
        assert self._store is not None
        self._store.signal(signal.SIGKILL)

    async def store_is_lost(self) -> Outcome:
        """When the rendezvous store has ended, which nothing but a fault makes it do."""
        assert self._store is not None
        if await self._store.wait() is None:
            message = "the forkserver of the rendezvous store's node ended, and the store with it"
            return Outcome(Cause.NODE_LOST, message)
        return Outcome(Cause.WORKER_LOST, "the group's rendezvous store is gone")

    async def release(self) -> None:
        """Give everything back; returns when the processes are seen gone and the slots free.

        Slots whose processes can't be ended stay with their node's agent (`quarantine`). May be
        repeated when it failed. The slots come last: they are offered to others at once.
        """
        for member in self.members:
            with contextlib.suppress(RayActorError):
                ray.kill(member.actor)
        if self._store is not None:
            self._store.abandon()
        groups = [slots.group for slots in self.slots]
        await placement_groups.release(
            self._spec.job_id, self._spec.attempt, self._node_ids, groups
        )

    async def has_lost_a_node(self) -> bool:
        alive = await asyncio.to_thread(placement_groups.alive_nodes)
        return not self._node_ids <= alive


_NAMED_RESOURCES = ("CPU", "GPU", "memory")
