"""A slot is released only when the end of its process is observed; without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from ray_workers.node import placement_groups
from ray_workers.shared.contracts import AWAITING
from ray_workers.shared.processes.machine_speed import MachineSpeed
from ray_workers.shared.slices import RoleSlots, Slice
from ray_workers.supervision import local_rank, worker_group
from ray_workers.supervision.member import Member
from ray_workers.supervision.rules.failure_attribution import RankExit
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.slots import Slots
from ray_workers.supervision.worker_group import WorkerGroup
from tests.wire import attempt_spec, traits


class Cluster:
    """Ray, with processes that exit when their actor is ended, unless they are stuck."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = {("a", 0), ("a", 1), ("b", 2)}
        self.stuck: set[tuple[str, int]] = set()
        self.released: list[Any] = []
        monkeypatch.setattr(local_rank, "end_actor", self._end)
        monkeypatch.setattr(placement_groups, "is_empty", self._is_empty)
        monkeypatch.setattr(placement_groups, "release_slots", self._release_slots)
        monkeypatch.setattr(placement_groups, "EMPTY_BOUND_S", 0.1)
        self.speed = MachineSpeed()
        self.group = WorkerGroup(attempt_spec(), "a", "127.0.0.1", self.speed, Timings())
        for node_id, indices in (("a", [0]), ("a", [1]), ("b", [2])):
            slots: Any = Slots(Slice(node_id, len(indices)), f"group of {indices}", {})  # type: ignore[arg-type]
            self.group.slots.append(slots)
            self.group.members += (
                Member(index, index, 0, 0, slots, 0, 1, (node_id, index)) for index in indices
            )

    def _end(self, actor: tuple[str, int]) -> None:
        self.left -= {actor} - self.stuck
        if actor[0] == "b":
            raise TimeoutError("its node does not answer")

    async def _is_empty(
        self, job_id: str, attempt: int, node_id: str, ranks: Sequence[int]
    ) -> bool:
        return not any((node_id, rank) in self.left for rank in ranks)

    async def _release_slots(self, groups: Sequence[Any]) -> None:
        self.released += groups


async def test_slots_are_released_when_their_own_processes_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch)
    await cluster.group.release_slots(cluster.group.slots[1:])
    assert cluster.left == {("a", 0)}, "the other ranks of the node train on"
    assert cluster.released == ["group of [1]", "group of [2]"]
    assert [member.index for member in cluster.group.members] == [0]
    assert [slots.group for slots in cluster.group.slots] == ["group of [0]"]


async def test_slots_whose_processes_do_not_go_stay_taken_until_they_have_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch)
    cluster.stuck = {("a", 1)}
    await cluster.group.release_slots(cluster.group.slots[1:])
    assert cluster.released == ["group of [2]"]
    kept = {slots.group: (slots.is_held, slots.is_going) for slots in cluster.group.slots}
    assert kept == {"group of [0]": (True, False), "group of [1]": (True, True)}
    assert [member.index for member in cluster.group.members] == [0]
    assert not await cluster.group.release_rest()
    cluster.left -= cluster.stuck
    assert await cluster.group.release_rest()
    assert cluster.released == ["group of [2]", "group of [1]"]
    assert [slots.group for slots in cluster.group.slots] == ["group of [0]"]


@pytest.mark.parametrize(("is_stuck", "overrun"), [(True, 20.0), (False, 1.0)])
async def test_a_killed_process_that_an_overloaded_machine_does_not_end_in_time_is_excused(
    monkeypatch: pytest.MonkeyPatch, is_stuck: bool, overrun: float
) -> None:
    cluster = Cluster(monkeypatch)
    cluster.speed.learn(20.0)

    async def wait() -> RankExit:
        gone = RankExit.of(0, None)
        return replace(gone, lost_forkserver=not is_stuck, is_stuck=is_stuck)

    member = cluster.group.members[0]
    member.actor = SimpleNamespace(wait=SimpleNamespace(remote=wait))
    assert (await cluster.group._exit_of(member)).is_stuck is is_stuck
    assert cluster.speed.overrun == overrun


class Actor:
    """The actor of a rank, whose process ends with it."""

    def __init__(self, starts: list[Any], problem: BaseException | None = None) -> None:
        async def start(task: Any, socket_path: str, secret: bytes) -> int:
            starts.append((self, task.incarnation))
            if problem is not None:
                raise problem
            return 1

        async def wait() -> RankExit:
            await self.is_gone.wait()
            raise RayActorError

        self.is_gone = asyncio.Event()
        self.start = SimpleNamespace(remote=start)
        self.wait = SimpleNamespace(remote=wait)


class Replacing:
    """A group whose member should get another process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.starts: list[tuple[Any, int]] = []
        self.ended: list[Any] = []
        self.killed: list[Any] = []
        monkeypatch.setattr(local_rank, "end_actor", self._end)
        monkeypatch.setattr(local_rank.ray, "kill", self.killed.append)
        self._loop = asyncio.get_running_loop()
        spec = attempt_spec()
        self.group = WorkerGroup(spec, "a", "127.0.0.1", MachineSpeed(), Timings())
        monkeypatch.setattr(self.group, "_create_actor", self._create)
        slots = Slots(Slice("a", 1), None, {})  # type: ignore[arg-type]
        self.member = Member(0, 0, 0, 0, slots, 0, 1, Actor(self.starts), incarnation=3)
        self.group.members.append(self.member)

    def _end(self, actor: Actor) -> None:
        self.ended.append(actor)
        self._loop.call_soon_threadsafe(actor.is_gone.set)

    def _create(self, *_: Any) -> Actor:
        return Actor(self.starts)

    def ends_with(self, code: int | None) -> None:
        self.member.exit = self._loop.create_future()
        self.member.exit.set_result(RankExit.of(0, code))

    async def replace(self) -> None:
        await self.group.replace([self.member], 2)


async def test_a_member_whose_process_runs_still_gets_another_one_once_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For example, a replacement that was stopped before it was ready."""
    job = Replacing(monkeypatch)
    before = job.member.actor
    job.member.exit = asyncio.ensure_future(job.group._exit_of(job.member))
    await job.replace()
    assert (job.ended, job.killed) == ([before], [before])
    assert job.member.actor is not before, "its process ended with the actor"
    assert job.starts == [(job.member.actor, 4)], "files of the one before have its number"
    assert job.member.is_running
    job.member.exit.cancel()


@pytest.mark.parametrize(("code", "gets_another_actor"), [(-9, False), (None, True)])
async def test_a_member_keeps_its_actor_as_long_as_that_lives(
    monkeypatch: pytest.MonkeyPatch, code: int | None, gets_another_actor: bool
) -> None:
    job = Replacing(monkeypatch)
    before = job.member.actor
    job.ends_with(code)
    await job.replace()
    assert (job.member.actor is not before) is gets_another_actor
    assert job.starts == [(job.member.actor, 4)]
    assert job.ended == []
    assert job.member.exit is not None
    job.member.exit.cancel()


@pytest.mark.parametrize("problem", [RayActorError(), asyncio.CancelledError()])
async def test_an_actor_that_did_not_answer_a_start_is_not_asked_for_another(
    monkeypatch: pytest.MonkeyPatch, problem: BaseException
) -> None:
    """It may be gone, or may still start a process in addition to the next one."""
    job = Replacing(monkeypatch)
    job.ends_with(-9)
    silent = job.member.actor = Actor(job.starts, problem)
    with pytest.raises(type(problem)):
        await job.replace()
    assert not job.member.is_running
    await job.replace()
    assert job.killed == [silent]
    assert [number for _, number in job.starts] == [4, 5]
    assert job.starts[-1][0] is job.member.actor is not silent
    assert job.member.exit is not None
    job.member.exit.cancel()


def test_silos_are_the_ranks_of_their_slices_also_where_a_node_has_several() -> None:
    slices = (Slice("b", 1), Slice("a", 1), Slice("b", 1))
    for are_silos, order in ((False, ["b", "b", "a"]), (True, ["b", "a", "b"])):
        spec = attempt_spec(slices=slices, traits=traits({}, is_tied_to_nodes=are_silos))
        group = WorkerGroup(spec, "a", "127.0.0.1", MachineSpeed(), Timings())
        group.slots[:] = [Slots(part, None, {}) for part in slices]  # type: ignore[arg-type]
        assert [slots.part.node_id for slots in group._slots_by_rank()[0]] == order


class NamedActors:
    """Rank actors that are only their names."""

    def options(self, name: str, **resources: Any) -> Any:
        return SimpleNamespace(remote=lambda *_: name)


async def test_roles_get_slots_of_their_own_and_keep_their_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[dict[str, float]]] = []

    def placement_group(bundles: list[dict[str, float]], **options: Any) -> Any:
        asked.append(bundles)
        return SimpleNamespace(wait=lambda timeout_s: True)

    monkeypatch.setattr("ray_workers.supervision.slots.placement_group", placement_group)
    of_worker, of_server = {"CPU": 1.0, "GPU": 1.0}, {"CPU": 4.0}
    script_roles = {"worker": {"num_workers": 3}, "ps": {"resources": {"cpus": 4}}}
    spec = attempt_spec(
        spec={"name": "j", "script": {"entrypoint": "a.py", "roles": script_roles}},
        slices=(Slice("a", 2), Slice("b", 1), Slice("a", 1)),
        bundle=of_worker,
        roles=(RoleSlots("ps", 3, 1, of_server),),
    )
    group = WorkerGroup(spec, "a", "127.0.0.1", MachineSpeed(), Timings())
    await group.acquire()
    assert asked == [[of_worker] * 2, [of_worker], [of_server]]
    monkeypatch.setattr(worker_group, "RankActor", NamedActors())
    monkeypatch.setattr(worker_group, "PlacementGroupSchedulingStrategy", lambda *_, **at: at)
    group._create_members(group._slots_by_rank()[0])
    found = [(m.actor, m.node_id, dict(m.slots.bundle)) for m in group.members]
    assert found == [
        ("dray:job:1:worker:0:0", "a", of_worker),
        ("dray:job:1:worker:1:0", "a", of_worker),
        ("dray:job:1:worker:2:0", "b", of_worker),
        ("dray:job:1:ps:3:0", "a", of_server),
    ]
    on_node = [(m.local_rank, m.local_world_size, m.node_rank) for m in group.members]
    assert on_node == [(0, 3, 0), (1, 3, 0), (0, 1, 1), (2, 3, 0)]


def test_a_rank_that_is_restarted_alone_has_its_rank_at_once() -> None:
    roles = {"chief": {}, "worker": {}}
    script = {"entrypoint": "a.py", "framework": "tensorflow", "roles": roles}
    spec = attempt_spec(spec={"name": "j", "script": script}, slices=(Slice("a", 2),))
    group = WorkerGroup(spec, "a", "127.0.0.1", MachineSpeed(), Timings())
    slots: Any = Slots(spec.slices[0], None, {})  # type: ignore[arg-type]
    again = [
        Member(index, index, index, 0, slots, index, 2, None, incarnation=1) for index in (0, 1)
    ]
    tasks = [group._task(member) for member in again]
    assert [task.generation for task in tasks] == [AWAITING, 0]
    assert [task.spool_dir.rpartition(".")[2] for task in tasks] == ["early", "metrics"]


def test_the_last_slots_are_the_spares_and_the_ranks_of_a_node_are_consecutive() -> None:
    slices = (Slice("a", 1), Slice("b", 1), Slice("a", 1), Slice("b", 1))
    spec = attempt_spec(slices=slices, traits=traits({}, most_ranks=3))
    assert (spec.num_slots, spec.world_size) == (4, 3)
    group = WorkerGroup(spec, "a", "127.0.0.1", MachineSpeed(), Timings())
    group.slots[:] = [Slots(part, None, {}) for part in slices]  # type: ignore[arg-type]
    ranks, spares = group._slots_by_rank()
    assert [slots.part.node_id for slots in ranks] == ["a", "a", "b"]
    assert spares == [group.slots[-1]]
