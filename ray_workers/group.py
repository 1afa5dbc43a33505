"""The worker group: slots, rank actors and training processes of one attempt, as one thing.

Each resource is recorded the moment it exists and released in the reverse order, so that a group
that was only half built is torn down by the same code as a whole one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_workers import paths, releasing, spool
from ray_workers.contracts import (
    AttemptSpec,
    Predecessor,
    RankTask,
    Slice,
    attempt_prefix,
    rank_name,
)
from ray_workers.forking import ForkedProcess
from ray_workers.pages import Place, prefix_of
from ray_workers.rank import RankActor
from ray_workers.verdict import RankExit

ROLE = "worker"
STOP_GRACE_S = 3.0
"""Between SIGTERM and SIGKILL."""


class SlotsUnavailable(Exception):
    """Ray did not give every slot in time."""


@dataclass
class Member:
    """One rank: where it lies, the actor that stands for it, and the process it has now."""

    rank: int
    local_rank: int
    part: Slice
    node_rank: int
    slots: PlacementGroup
    actor: Any
    incarnation: int = 0
    exit: asyncio.Future[RankExit] | None = None
    """Done when the process is seen gone or the actor is lost."""

    @property
    def is_running(self) -> bool:
        return self.exit is not None and not self.exit.done()


class WorkerGroup:
    """Everything below a supervisor."""

    def __init__(self, spec: AttemptSpec, own_node_id: str, own_address: str) -> None:
        self._spec = spec
        self._own_node_id = own_node_id
        self._own_address = own_address
        self._slots: list[PlacementGroup] = []
        self._store: ForkedProcess | None = None
        self._store_port = 0
        self.members: list[Member] = []

    async def acquire(self) -> None:
        """Reserve the slots, one placement group per node slice: all of them or none.

        Raises SlotsUnavailable after `start_timeout_s`; release() gives back what was reserved.
        """
        spec = self._spec
        for part in spec.slices:
            self._slots.append(
                placement_group(
                    [dict(spec.bundle)] * part.num_workers,
                    strategy="STRICT_PACK",
                    name=releasing.slots_name(spec.job_id, spec.attempt, len(self._slots)),
                    lifetime="detached",
                    bundle_label_selector=[{"ray.io/node-id": part.node_id}] * part.num_workers,
                )
            )
        deadline = time.monotonic() + spec.start_timeout_s
        waits = [
            # Ray counts this in whole seconds and cuts off the rest.
            asyncio.to_thread(slots.wait, math.ceil(max(deadline - time.monotonic(), 0.0)))
            for slots in self._slots
        ]
        if not all(await asyncio.gather(*waits)):
            raise SlotsUnavailable(
                f"Ray did not give {spec.world_size} slots within {spec.start_timeout_s:g} s; "
                "others may be using the cluster"
            )

    async def start(self) -> None:
        """Start the rendezvous store, the rank actors and the training processes."""
        store = asyncio.ensure_future(self._start_store())
        try:
            self._create_members()
        finally:
            self._store_port = await store
        await asyncio.gather(*(self._start_process(member, 0) for member in self.members))

    async def _start_store(self) -> int:
        path = paths.socket_path(self._spec.deployment_id, self._own_node_id)
        task = {"job_id": self._spec.job_id, "attempt": self._spec.attempt, "rank": -1}
        self._store = await ForkedProcess.start(path, {"op": "store", "task": task})
        with open(self._store.output, closefd=False) as output:
            return int(await asyncio.to_thread(output.readline))

    def _create_members(self) -> None:
        rank = 0
        for node_rank, (part, slots) in enumerate(zip(self._spec.slices, self._slots, strict=True)):
            for local_rank in range(part.num_workers):
                actor = self._create_actor(rank, 0, slots, local_rank)
                self.members.append(Member(rank, local_rank, part, node_rank, slots, actor))
                rank += 1

    def _create_actor(
        self, rank: int, incarnation: int, slots: PlacementGroup, local_rank: int
    ) -> Any:
        spec = self._spec
        name = rank_name(spec.job_id, spec.attempt, ROLE, rank, incarnation)
        resources = {k: v for k, v in spec.bundle.items() if k not in _NAMED_RESOURCES}
        return RankActor.options(  # type: ignore[attr-defined]
            name=name,
            num_cpus=spec.bundle.get("CPU", 0),
            num_gpus=spec.bundle.get("GPU", 0),
            memory=spec.bundle.get("memory"),
            resources=resources,
            max_concurrency=16,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                slots, placement_group_bundle_index=local_rank
            ),
        ).remote(name)

    async def _start_process(self, member: Member, generation: int) -> None:
        """Fork a process for the member, which joins the group in this generation."""
        socket_path = paths.socket_path(self._spec.deployment_id, member.part.node_id)
        await member.actor.start.remote(self._task(member, generation), socket_path)
        member.exit = asyncio.ensure_future(_exit_of(member))

    def _task(self, member: Member, generation: int) -> RankTask:
        spec = self._spec
        base = f"{spec.storage_url.rstrip('/')}/{attempt_prefix(spec.job_id, spec.attempt)}"
        *before, now = [
            self._traces(member, incarnation) for incarnation in range(member.incarnation + 1)
        ]
        return RankTask(
            job_id=spec.job_id,
            attempt=spec.attempt,
            rank=member.rank,
            incarnation=member.incarnation,
            world_size=spec.world_size,
            local_rank=member.local_rank,
            local_world_size=member.part.num_workers,
            node_rank=member.node_rank,
            master_addr=self._own_address,
            master_port=self._store_port,
            spec=dict(spec.spec),
            spool_dir=now.spool_dir,
            checkpoint_url=f"{base}/checkpoints",
            artifact_url=f"{base}/artifacts",
            resume_from=spec.resume_from,
            init_from=spec.init_from,
            data_policy=spec.data_policy,
            spool_limit_bytes=spec.spool_limit_bytes,
            worker_mtbf_s=spec.worker_mtbf_s,
            device="cuda" if spec.bundle.get("GPU") else "cpu",
            page_prefix=now.page_prefix,
            generation=generation,
            furthest_step=spec.furthest_step,
            predecessors=tuple(before),
        )

    def _traces(self, member: Member, incarnation: int) -> Predecessor:
        """Where a process of the member leaves its frames and its page."""
        spec = self._spec
        place = (spec.deployment_id, member.part.node_id, spec.job_id, spec.attempt)
        key = spool.spool_key(member.rank, incarnation, "metrics")
        return Predecessor(
            spool_dir=str(paths.spool_dir(*place) / key),
            page_prefix=prefix_of(paths.page_dir(*place), member.rank, incarnation),
        )

    @property
    def running(self) -> list[Member]:
        return [member for member in self.members if member.is_running]

    def ended(self) -> list[RankExit]:
        """How the ranks ended whose newest process has."""
        exits = (member.exit for member in self.members)
        return [exit_.result() for exit_ in exits if exit_ is not None and exit_.done()]

    async def replace(self, ranks: Sequence[int], generation: int) -> None:
        """Give each of these ranks, whose processes are gone, another one.

        A rank whose actor is gone too gets another actor in the same slot. Raises RayActorError or
        ForkFailed if that is not to be.
        """

        async def replace_one(member: Member) -> None:
            assert member.exit is not None, "it never ran"
            assert member.exit.done(), "it runs"
            member.incarnation += 1
            if member.exit.result().exit_code is None:
                with contextlib.suppress(RayActorError):
                    ray.kill(member.actor)
                member.actor = self._create_actor(
                    member.rank, member.incarnation, member.slots, member.local_rank
                )
            await self._start_process(member, generation)

        await asyncio.gather(*(replace_one(self.members[rank]) for rank in ranks))

    async def announce(self, generation: int, ranks: Sequence[int]) -> None:
        """Tell these ranks that they have a place in the next generation of the group."""
        places = {
            rank: Place(generation, rank, self._spec.world_size)
            for rank in ranks
            if self.members[rank].is_running
        }
        told = (self.members[rank].actor.announce.remote(place) for rank, place in places.items())
        # One that is gone meanwhile is the next loss.
        await asyncio.gather(*told, return_exceptions=True)

    async def ask_to_leave(self) -> None:
        """Have the group save a checkpoint and end: rank 0 does, the others can't go on then.

        A script gets a SIGTERM in each process, and does what it will.
        """
        if self._spec.spec.get("script"):
            for member in self.running:
                member.actor.terminate.remote()
        elif self.members[0].is_running:
            await asyncio.gather(
                self.members[0].actor.ask_to_leave.remote(), return_exceptions=True
            )

    async def stop_processes(self) -> None:
        """End every training process; returns when all are seen gone."""
        for member in self.running:
            member.actor.stop.remote(STOP_GRACE_S)  # not waited for: it ends with its actor
        await asyncio.gather(*(m.exit for m in self.members if m.exit is not None))

    async def store_is_lost(self) -> None:
        """Returns when the rendezvous store has ended, which nothing but a fault makes it do."""
        assert self._store is not None
        await self._store.wait()

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
        nodes = {part.node_id for part in self._spec.slices} | {self._own_node_id}
        await releasing.release(self._spec.job_id, self._spec.attempt, nodes, self._slots)

    async def has_lost_a_node(self) -> bool:
        alive = await asyncio.to_thread(releasing.alive_nodes)
        return any(part.node_id not in alive for part in self._spec.slices)


_NAMED_RESOURCES = ("CPU", "GPU", "memory")


async def _exit_of(member: Member) -> RankExit:
    try:
        ended: RankExit = await member.actor.wait.remote()
    except RayActorError:
        return RankExit(member.rank, None)
    return ended
