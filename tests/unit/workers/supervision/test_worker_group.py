"""A slot is given back only when the process that used it is seen gone; without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ray_workers.node import placement_groups
from ray_workers.shared.contracts import ServerSlots, Slice
from ray_workers.shared.processes.machine_pace import MachinePace
from ray_workers.supervision import worker_group
from ray_workers.supervision.rules.failure_attribution import RankExit
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.worker_group import Member, Slots, WorkerGroup
from tests.wire import attempt_spec

pytestmark = pytest.mark.anyio


class Cluster:
    """Ray, with processes that are gone once their actor was ended, unless they are stuck."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = {("a", 0), ("a", 1), ("b", 2)}
        self.stuck: set[tuple[str, int]] = set()
        self.given_back: list[Any] = []
        monkeypatch.setattr(worker_group, "end_actor", self._end)
        monkeypatch.setattr(placement_groups, "is_empty", self._is_empty)
        monkeypatch.setattr(placement_groups, "give_back", self._give_back)
        monkeypatch.setattr(placement_groups, "EMPTY_BOUND_S", 0.1)
        self.pace = MachinePace()
        self.group = WorkerGroup(attempt_spec(), "a", "127.0.0.1", self.pace, Timings())
        for node_id, seats in (("a", [0]), ("a", [1]), ("b", [2])):
            slots: Any = Slots(Slice(node_id, len(seats)), f"group of {seats}", {})  # type: ignore[arg-type]
            self.group.slots.append(slots)
            self.group.members += (
                Member(seat, seat, 0, 0, slots, 0, 1, (node_id, seat)) for seat in seats
            )

    def _end(self, actor: tuple[str, int]) -> None:
        self.left -= {actor} - self.stuck
        if actor[0] == "b":
            raise TimeoutError("its node does not answer")

    async def _is_empty(
        self, job_id: str, attempt: int, node_id: str, ranks: Sequence[int]
    ) -> bool:
        return not any((node_id, rank) in self.left for rank in ranks)

    async def _give_back(self, groups: Sequence[Any]) -> None:
        self.given_back += groups


async def test_slots_are_given_back_when_their_own_processes_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch)
    await cluster.group.give_back(cluster.group.slots[1:])
    assert cluster.left == {("a", 0)}, "the other ranks of the node train on"
    assert cluster.given_back == ["group of [1]", "group of [2]"]
    assert [member.seat for member in cluster.group.members] == [0]
    assert [slots.group for slots in cluster.group.slots] == ["group of [0]"]


async def test_slots_whose_processes_do_not_go_stay_taken_until_they_have_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch)
    cluster.stuck = {("a", 1)}
    await cluster.group.give_back(cluster.group.slots[1:])
    assert cluster.given_back == ["group of [2]"]
    kept = {slots.group: (slots.is_held, slots.is_going) for slots in cluster.group.slots}
    assert kept == {"group of [0]": (True, False), "group of [1]": (True, True)}
    assert [member.seat for member in cluster.group.members] == [0]
    assert not await cluster.group.give_back_rest()
    cluster.left -= cluster.stuck
    assert await cluster.group.give_back_rest()
    assert cluster.given_back == ["group of [2]", "group of [1]"]
    assert [slots.group for slots in cluster.group.slots] == ["group of [0]"]


@pytest.mark.parametrize(("is_stuck", "overrun"), [(True, 20.0), (False, 1.0)])
async def test_a_killed_process_that_an_overloaded_machine_does_not_end_in_time_is_excused(
    monkeypatch: pytest.MonkeyPatch, is_stuck: bool, overrun: float
) -> None:
    cluster = Cluster(monkeypatch)
    cluster.pace.learn(20.0)

    async def wait() -> RankExit:
        gone = RankExit.of(0, None)
        return replace(gone, lost_forkserver=not is_stuck, is_stuck=is_stuck)

    member = cluster.group.members[0]
    member.actor = SimpleNamespace(wait=SimpleNamespace(remote=wait))
    assert (await cluster.group._exit_of(member)).is_stuck is is_stuck
    assert cluster.pace.overrun == overrun


def test_silos_are_the_ranks_of_their_slices_also_where_a_node_has_several() -> None:
    slices = (Slice("b", 1), Slice("a", 1), Slice("b", 1))
    for sources, order in (((), ["b", "b", "a"]), ((None, None), ["b", "a", "b"])):
        spec = attempt_spec(slices=slices, silo_sources=sources)
        group = WorkerGroup(spec, "a", "127.0.0.1", MachinePace(), Timings())
        group.slots = [Slots(part, None, {}) for part in slices]  # type: ignore[arg-type]
        by_node = group._slots_by_node()
        assert [slots.part.node_id for some in by_node for slots in some] == order


async def test_servers_get_slots_of_their_own_and_the_last_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[dict[str, float]]] = []

    def placement_group(bundles: list[dict[str, float]], **options: Any) -> Any:
        asked.append(bundles)
        return SimpleNamespace(wait=lambda timeout_s: True)

    monkeypatch.setattr(worker_group, "placement_group", placement_group)
    of_worker, of_server = {"CPU": 1.0, "GPU": 1.0}, {"CPU": 4.0}
    spec = attempt_spec(
        slices=(Slice("a", 2), Slice("b", 1), Slice("a", 1)),
        bundle=of_worker,
        servers=ServerSlots(1, of_server),
    )
    group = WorkerGroup(spec, "a", "127.0.0.1", MachinePace(), Timings())
    await group.acquire()
    assert asked == [[of_worker] * 2, [of_worker], [of_server]]
    monkeypatch.setattr(group, "_create_actor", lambda *place: None)
    for node_rank, slots in enumerate(group._slots_by_node()):
        group._create_members(slots, node_rank)
    found = [(m.rank, m.node_id, dict(m.slots.bundle)) for m in group.members]
    assert found == [
        *((0, "a", of_worker), (1, "a", of_worker)),
        *((2, "b", of_worker), (3, "a", of_server)),
    ]
