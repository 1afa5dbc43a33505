"""The worker group: the slots, rank actors and training processes of one attempt.

Each resource is recorded as soon as it exists, and resources are released in reverse order, so the
same code can release complete and partially started groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dray.ranks import kind_of
from ray_workers.node import placement_groups
from ray_workers.node.forkserver.client import ForkedProcess, ForkFailed
from ray_workers.node.ray_calls import result_within
from ray_workers.shared import paths, spool_reader
from ray_workers.shared.contracts import (
    AWAITING,
    AttemptSpec,
    Cause,
    Outcome,
    ProcessSpec,
    RankTask,
)
from ray_workers.shared.heartbeat import RankAssignment, prefix_of
from ray_workers.shared.names import rank_name
from ray_workers.shared.peers import store_proxy
from ray_workers.shared.processes.machine_speed import MachineSpeed
from ray_workers.shared.slices import Slice
from ray_workers.supervision.local_rank import LocalRank, end_all, is_local, kill
from ray_workers.supervision.member import Member
from ray_workers.supervision.rank_actor import RankActor, RankHost
from ray_workers.supervision.rules.failure_attribution import RankExit
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.slots import AttemptSlots, Slots


class WorkerGroup:
    """The slots, actors and processes owned by one supervisor."""

    def __init__(
        self,
        spec: AttemptSpec,
        own_node_id: str,
        own_address: str,
        speed: MachineSpeed,
        timings: Timings,
    ) -> None:
        self._speed = speed
        self._timings = timings
        self._spec = spec
        self._own_node_id = own_node_id
        self._own_address = own_address
        self._store: ForkedProcess | None = None
        self._store_port, self._store_secret = 0, b""
        self._peers: tuple[str, ...] = ()
        self._num_workers_ever = 0
        self._slots = AttemptSlots(spec, timings)
        self._node_ids = {part.node_id for part in spec.slices} | {own_node_id}
        self.members: list[Member] = []
        self._going: list[Member] = []
        """Members that have left the group but whose slots have not been released yet."""
        self.log_lines_lost: dict[int, int | None] = {}
        """See `Outcome.log_lines_lost`."""

    @property
    def slots(self) -> list[Slots]:
        """All slots that the attempt has requested or holds."""
        return self._slots.held

    async def acquire(self) -> None:
        """Reserve all slots. Raises SlotsUnavailable on failure; call `release` to release the
        slots that were reserved."""
        await self._slots.acquire()

    async def start(self) -> None:
        """Start the rendezvous store, the rank actors and the training processes. The processes of
        spares are started later (`Spares`)."""
        store = asyncio.ensure_future(self._start_store())
        try:
            ranks, spares = self._slots_by_rank()
            self._create_members(ranks)
            for member in self._create_members(spares):
                member.is_placed, member.is_spare = False, True
        finally:
            self._store_port, self._store_secret = await store
        if self._spec.traits.has_peer_ports:
            addresses = await asyncio.gather(*(m.actor.reserve_port.remote() for m in self.members))
            self._peers = tuple(addresses)
        await asyncio.gather(*(self._start_process(member, 0) for member in self.placed))

    async def _start_store(self) -> tuple[int, bytes]:
        """Start the store, and return the port and the secret of its proxy."""
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

    def _slots_by_rank(self) -> tuple[list[Slots], list[Slots]]:
        """Return the slots in rank order, and the slots of the spares, which are last.
        The ranks on a node are consecutive, except for silos and roles with their own resources,
        whose ranks follow the order of the slices."""
        num_spares = self._spec.num_slots - self._spec.world_size
        at = len(self.slots) - num_spares
        of_ranks, of_spares = self.slots[:at], self.slots[at:]
        if self._spec.traits.is_tied_to_nodes or self._spec.roles:
            return of_ranks, of_spares
        by_node: dict[str, list[Slots]] = {}
        for slots in of_ranks:
            by_node.setdefault(slots.part.node_id, []).append(slots)
        return [slots for of_node in by_node.values() for slots in of_node], of_spares

    def _create_members(self, of_group: Sequence[Slots]) -> list[Member]:
        """Create a member for each slot. Local and node ranks are numbered within these slots."""
        sizes = Counter[str]()
        for slots in of_group:
            sizes[slots.part.node_id] += slots.part.num_workers
        node_ranks = {node_id: number for number, node_id in enumerate(sizes)}
        seen = Counter[str]()
        created = []
        for slots, bundle in [(s, n) for s in of_group for n in range(s.part.num_workers)]:
            node_id, index = slots.part.node_id, self._num_workers_ever
            self._num_workers_ever += 1
            actor = self._create_actor(index, 0, slots, bundle)
            ranks = (index, index, seen[node_id], node_ranks[node_id])
            seen[node_id] += 1
            created.append(Member(*ranks, slots, bundle, sizes[node_id], actor))
            self.members.append(created[-1])
        return created

    def _create_actor(self, index: int, incarnation: int, slots: Slots, bundle: int) -> Any:
        spec = self._spec
        kind = kind_of(index, self._spec.traits.role_names)
        name = rank_name(spec.job_id, spec.attempt, kind, index, incarnation)
        if is_local(spec, self._own_node_id):
            return LocalRank(RankHost(name, spec.job_name, self._timings))
        resources = {k: v for k, v in slots.bundle.items() if k not in ("CPU", "GPU", "memory")}
        return RankActor.options(  # type: ignore[attr-defined]
            name=name,
            num_cpus=slots.bundle.get("CPU", 0),
            num_gpus=slots.bundle.get("GPU", 0),
            memory=slots.bundle.get("memory"),
            resources=resources,
            max_concurrency=16,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                slots.group, placement_group_bundle_index=bundle
            ),
        ).remote(name, spec.job_name, self._timings)

    async def _start_process(self, member: Member, round_number: int) -> None:
        """Fork a process for the member. If the ranks form a process group, a process that is
        started after the first round gets its rank only when it joins a round."""
        member.incarnation = round_number
        socket_path = paths.socket_path(self._spec.deployment_id, member.node_id)
        try:
            await member.actor.start.remote(self._task(member), socket_path, self._store_secret)
        except BaseException:
            # The actor might have started a process, so the next process needs a new actor.
            member.exit = asyncio.get_running_loop().create_future()
            member.exit.set_result(RankExit.of(member.rank, None))
            raise
        member.exit = asyncio.ensure_future(self._exit_of(member))

    def _task(self, member: Member) -> RankTask:
        spec = self._spec
        attempt_key = (spec.deployment_id, member.node_id, spec.job_id, spec.attempt)
        has_rank = member.incarnation == 0 or member.index in self._spec.traits.restarted_alone
        stream = "metrics" if has_rank else "early"  # the stream of a rank starts with its rank
        key = spool_reader.spool_key(member.index, member.incarnation, stream)
        process = ProcessSpec(
            rank=member.index,
            incarnation=member.incarnation,
            local_rank=member.local_rank,
            local_world_size=member.local_world_size,
            node_rank=member.node_rank,
            master_addr=self._own_address,
            master_port=self._store_port,
            spool_dir=str(paths.spool_dir(*attempt_key) / key),
            temp_dir=str(paths.temp_dir(*attempt_key)),
            work_dir=str(paths.work_root(spec.deployment_id) / spec.job_id),
            folders_dir=str(paths.folders_dir(*attempt_key)),
            page_prefix=prefix_of(paths.page_dir(*attempt_key), member.index, member.incarnation),
            generation=0 if has_rank else AWAITING,
            peers=self._peers,
        )
        return RankTask.of(spec, process)

    async def _exit_of(self, member: Member) -> RankExit:
        try:
            ended: RankExit = await member.actor.wait.remote()
        except RayActorError:
            self.log_lines_lost[member.index] = None
            return RankExit.of(member.rank, None)
        lost = self.log_lines_lost.get(member.index, 0)
        if ended.log_lines_lost and lost is not None:
            self.log_lines_lost[member.index] = lost + ended.log_lines_lost
        if ended.is_stuck:
            self._speed.ran_out()
        return ended

    @property
    def placed(self) -> list[Member]:
        """The members that have a rank in the group, sorted by rank."""
        return sorted((m for m in self.members if m.is_placed), key=lambda member: member.rank)

    @property
    def running(self) -> list[Member]:
        """The members that have a rank and whose process is running."""
        return [member for member in self.placed if member.is_running]

    @property
    def spares(self) -> list[Member]:
        return [member for member in self.members if member.is_spare]

    @property
    def held(self) -> list[Slots]:
        """The slots that the attempt keeps. Slots that only spares use are last, because they are
        the first ones to be released."""
        others = [member.slots for member in self.members if not member.is_spare]
        of_spares = [m.slots for m in self.spares if m.slots not in others]
        held = [slots for slots in self.slots if slots.is_held]
        return sorted(held, key=lambda slots: slots in of_spares)

    @property
    def num_slots(self) -> int:
        return sum(slots.part.num_workers for slots in self.slots)

    def ended(self) -> list[RankExit]:
        """Return the exits of the ranks whose latest process has exited."""
        return [member.end for member in self.placed if not member.is_running]

    async def replace(self, members: Sequence[Member], round_number: int) -> None:
        """Replace the processes of these members, and end any that are still running.

        If the actor of a member is gone, or did not start a process, the member gets another actor
        in the same slot. Raises RayActorError or ForkFailed if a member can't be replaced.
        """

        async def replace_one(member: Member) -> None:
            if member.is_running and member.exit is not None:
                await end_all([member.actor])
                await member.exit
            # An earlier process might have created files named after `round_number` without ever
            # joining that round.
            number = max(round_number, member.incarnation + 1)
            if member.has_vanished:
                with contextlib.suppress(RayActorError):
                    kill(member.actor)
                member.actor = self._create_actor(member.index, number, member.slots, member.bundle)
            await self._start_process(member, number)

        await asyncio.gather(*map(replace_one, members))

    async def add(self, slices: Sequence[Slice], round_number: int) -> list[Member]:
        """Reserve more slots, and start a process without a rank in each of them.

        If this fails, the slots are released, and SlotsUnavailable, RayActorError or ForkFailed is
        raised.
        """
        self._node_ids |= {part.node_id for part in slices}
        known = list(self.slots)
        try:
            limit_s = self._speed.stretched(self._timings.grow_limit_s)
            asked = await self._slots.ask(slices, limit_s, is_held=False)
            members = [m for slots in asked for m in self._create_members([slots])]
            for member in members:
                member.is_placed = False
            await asyncio.gather(*(self._start_process(m, round_number) for m in members))
        except BaseException:
            await self.release_slots([slots for slots in self.slots if slots not in known])
            raise
        for slots in asked:
            slots.is_held = True
        return members

    async def lose_nodes(self, node_ids: Set[str]) -> list[Member]:
        """Release the slots on dead nodes. Returns the members that had these slots."""
        lost = [slots for slots in self.slots if slots.part.node_id in node_ids]
        members = [member for member in self.members if member.slots in lost]
        for member in members:
            with contextlib.suppress(RayActorError):
                kill(member.actor)
        self.members = [member for member in self.members if member not in members]
        await asyncio.gather(*(member.exit for member in members if member.exit is not None))
        await self._slots.release_slots(lost)
        return members

    async def release_slots(self, slots: Sequence[Slots]) -> None:
        """End the processes in these slots, and release the slots once the processes have ended. If
        processes do not end in time, the attempt keeps their slots (`is_going`) until
        `release_rest`, or until `release` at the end."""
        going = [member for member in self.members if member.slots in slots]
        self.members = [member for member in self.members if member not in going]
        for each in slots:
            each.is_going = True
        self._going += going
        await end_all([member.actor for member in going])
        await self.release_rest()

    async def release_rest(self) -> bool:
        """Release the slots that are marked for release (`is_going`) and in which no process is
        running. Returns whether any slots were released."""
        slots = [each for each in self.slots if each.is_going]
        going = self._going
        nodes, indices = {member.node_id for member in going}, [member.index for member in going]
        key = (self._spec.job_id, self._spec.attempt)
        busy = await placement_groups.busy_nodes(*key, nodes, indices)
        free = [each for each in slots if each.part.node_id not in busy]
        for each in slots:
            each.is_held = each not in free
        await self._slots.release_slots(free)
        self._going = [member for member in self._going if member.slots in self.slots]
        return bool(free)

    async def announce(
        self, round_number: int, members: Sequence[Member], batch_size: int | None
    ) -> None:
        """Announce the next round to its members, given in rank order. `batch_size` is the global
        batch size, if the service has chosen one."""
        for rank, member in enumerate(members):
            member.rank = rank
        limit_s = self._speed.stretched(self._timings.announce_limit_s)
        announced = (
            result_within(
                limit_s,
                member.actor.announce.remote(
                    RankAssignment(round_number, member.rank, len(members), batch_size)
                ),
            )
            for member in members
        )
        # Ignore errors: a member that has exited or does not respond is handled as a lost rank.
        await asyncio.gather(*announced, return_exceptions=True)

    async def ask_to_leave(self) -> None:
        """Ask rank 0 to save a checkpoint and exit. The other ranks can't continue without rank 0.

        The processes of a script get SIGTERM instead.
        """
        if self._spec.traits.is_script:
            for member in self.running:
                member.actor.terminate.remote()
        else:
            limit_s = self._speed.stretched(self._timings.announce_limit_s)
            asked = [
                result_within(limit_s, m.actor.ask_to_leave.remote())
                for m in self.running
                if m.rank == 0
            ]
            await asyncio.gather(*asked, return_exceptions=True)

    async def stop_processes(self) -> None:
        """End all training processes, and return when they have exited. If a rank actor does not
        observe the exit of its process in time, the actor is killed, and `release` ends the
        process."""
        grace_s = self._timings.stop_grace_s
        running = [member for member in self.members if member.is_running]
        for member in running:
            # Not awaited, because the actor might be killed first. A spare has nothing to save.
            member.actor.stop.remote(0.0 if member.is_spare else grace_s)
        if running:
            limit_s = grace_s + self._timings.kill_limit_s
            await asyncio.wait({m.exit for m in running if m.exit}, timeout=limit_s)
            await end_all([member.actor for member in running if member.is_running])

    async def store_answers(self) -> None:
        """Wait for the rendezvous store to respond. Raises OSError if the store is not
        listening."""
        await store_proxy.hear(self._own_address, self._store_port)

    def end_store(self) -> None:
        """Kill the rendezvous store, which makes `store_is_lost` return."""
        assert self._store is not None
        self._store.signal(signal.SIGKILL)

    async def store_is_lost(self) -> Outcome:
        """Wait until the rendezvous store has exited because of a fault. Return the outcome."""
        assert self._store is not None
        if await self._store.wait() is None:
            message = "the node's forkserver exited, which stopped the group's rendezvous store"
            return Outcome.of(Cause.NODE_LOST, message)
        return Outcome.of(Cause.WORKER_LOST, "the group's rendezvous store exited unexpectedly")

    async def release(self) -> None:
        """Release all resources. Returns when the processes have exited and the slots are free.

        If processes can't be ended, the node's agent keeps their slots (`quarantine`). This method
        can be called again after a failure. The slots are released last, because other jobs can
        use released slots immediately.
        """
        if not self._slots.num_ever:
            return  # without slots, there are no processes
        for member in self.members:
            with contextlib.suppress(RayActorError):
                kill(member.actor)
        if self._store is not None:
            self._store.abandon()
        groups = [slots.group for slots in self.slots]
        await placement_groups.release(
            self._spec.job_id, self._spec.attempt, self._node_ids, groups
        )

    def close(self) -> None:
        """Release what the group still holds in this process after `release`."""
        if self._store is not None:
            os.close(self._store.output)

    async def has_lost_a_node(self) -> bool:
        alive = await asyncio.to_thread(placement_groups.alive_nodes)
        return not self._node_ids <= alive
