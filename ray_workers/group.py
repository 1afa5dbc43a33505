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
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_workers import paths, spool
from ray_workers.contracts import (
    AttemptSpec,
    RankTask,
    Slice,
    agent_name,
    attempt_prefix,
    rank_name,
)
from ray_workers.forking import ForkedProcess
from ray_workers.rank import RankActor
from ray_workers.verdict import RankExit

ROLE = "worker"
STOP_GRACE_S = 3.0
"""Between SIGTERM and SIGKILL."""
RELEASE_TIMEOUT_S = 30.0
"""How long slots may take to be seen free in Ray's books before that is an error."""
CHECK_S = 0.02


class SlotsUnavailable(Exception):
    """Ray did not give every slot in time."""


@dataclass
class Member:
    """One rank: where it lies and the actor that stands for it."""

    rank: int
    local_rank: int
    part: Slice
    node_rank: int
    actor: Any


class WorkerGroup:
    """Everything below a supervisor."""

    def __init__(self, spec: AttemptSpec, own_node_id: str, own_address: str) -> None:
        self._spec = spec
        self._own_node_id = own_node_id
        self._own_address = own_address
        self._slots: list[PlacementGroup] = []
        self._members: list[Member] = []
        self._store: ForkedProcess | None = None

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
                    name=f"dray:{spec.job_id}:{spec.attempt}:slots:{len(self._slots)}",
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
            self._create_actors()
        finally:
            port = await store
        socket_paths = {
            part.node_id: paths.socket_path(self._spec.deployment_id, part.node_id)
            for part in self._spec.slices
        }
        await asyncio.gather(
            *(
                member.actor.start.remote(
                    self._task(member, port), socket_paths[member.part.node_id]
                )
                for member in self._members
            )
        )

    async def _start_store(self) -> int:
        path = paths.socket_path(self._spec.deployment_id, self._own_node_id)
        task = {"job_id": self._spec.job_id, "attempt": self._spec.attempt, "rank": -1}
        self._store = await ForkedProcess.start(path, {"op": "store", "task": task})
        with open(self._store.output, closefd=False) as output:
            return int(await asyncio.to_thread(output.readline))

    def _create_actors(self) -> None:
        spec, rank = self._spec, 0
        for node_rank, (part, slots) in enumerate(zip(spec.slices, self._slots, strict=True)):
            for local_rank in range(part.num_workers):
                name = rank_name(spec.job_id, spec.attempt, ROLE, rank, 0)
                resources = {k: v for k, v in spec.bundle.items() if k not in _NAMED_RESOURCES}
                actor = RankActor.options(  # type: ignore[attr-defined]
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
                self._members.append(Member(rank, local_rank, part, node_rank, actor))
                rank += 1

    def _task(self, member: Member, master_port: int) -> RankTask:
        spec = self._spec
        spools = paths.spool_dir(spec.deployment_id, member.part.node_id, spec.job_id, spec.attempt)
        base = f"{spec.storage_url.rstrip('/')}/{attempt_prefix(spec.job_id, spec.attempt)}"
        return RankTask(
            job_id=spec.job_id,
            attempt=spec.attempt,
            rank=member.rank,
            incarnation=0,
            world_size=spec.world_size,
            local_rank=member.local_rank,
            local_world_size=member.part.num_workers,
            node_rank=member.node_rank,
            master_addr=self._own_address,
            master_port=master_port,
            spec=dict(spec.spec),
            spool_dir=str(spools / spool.spool_key(member.rank, 0, "metrics")),
            checkpoint_url=f"{base}/checkpoints",
            artifact_url=f"{base}/artifacts",
            resume_from=spec.resume_from,
            init_from=spec.init_from,
            data_policy=spec.data_policy,
            spool_limit_bytes=spec.spool_limit_bytes,
            worker_mtbf_s=spec.worker_mtbf_s,
            device="cuda" if spec.bundle.get("GPU") else "cpu",
        )

    def exits(self) -> list[asyncio.Future[RankExit]]:
        """One future per rank, done when its process is seen gone or its actor is lost."""

        async def exit_of(member: Member) -> RankExit:
            try:
                ended: RankExit = await member.actor.wait.remote()
            except RayActorError:
                return RankExit(member.rank, None)
            return ended

        return [asyncio.ensure_future(exit_of(member)) for member in self._members]

    async def stop_processes(self, exits: Sequence[asyncio.Future[RankExit]]) -> None:
        """End every training process; returns when all are seen gone."""
        for member, exit_ in zip(self._members, exits, strict=True):
            if not exit_.done():
                member.actor.stop.remote(STOP_GRACE_S)  # not waited for: it ends with its actor
        await asyncio.gather(*exits)

    async def release(self) -> None:
        """Give everything back; returns when the processes are seen gone and the slots free.

        May be repeated when it failed. The slots come last: they are offered to others at once.
        """
        for member in self._members:
            with contextlib.suppress(RayActorError):
                ray.kill(member.actor)
        if self._store is not None:
            self._store.abandon()
        nodes = {part.node_id for part in self._spec.slices} | {self._own_node_id}
        while not all(await asyncio.gather(*map(self._is_empty, nodes))):
            await asyncio.sleep(CHECK_S)
        for slots in reversed(self._slots):
            await asyncio.to_thread(remove_placement_group, slots)
        deadline = time.monotonic() + RELEASE_TIMEOUT_S
        while not all(await asyncio.gather(*(_is_removed(slots) for slots in self._slots))):
            if time.monotonic() > deadline:
                raise TimeoutError(f"Ray still holds slots after {RELEASE_TIMEOUT_S:g} s")
            await asyncio.sleep(CHECK_S)

    async def _is_empty(self, node_id: str) -> bool:
        """Whether no process of the attempt is left there: seen, or the node itself is gone."""
        try:
            agent = await asyncio.to_thread(ray.get_actor, agent_name(node_id))
            return not await agent.running.remote(self._spec.job_id, self._spec.attempt)
        except (ValueError, RayActorError):
            return node_id not in await asyncio.to_thread(alive_nodes)

    async def has_lost_a_node(self) -> bool:
        alive = await asyncio.to_thread(alive_nodes)
        return any(part.node_id not in alive for part in self._spec.slices)


def alive_nodes() -> set[str]:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"] for node in nodes if node["Alive"]}


_NAMED_RESOURCES = ("CPU", "GPU", "memory")


async def _is_removed(slots: PlacementGroup) -> bool:
    table = await asyncio.to_thread(placement_group_table, slots)
    return table.get("state") in (None, "REMOVED")
