"""Ranks that share GPUs with other jobs: each gets its own GPU; without Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ray_workers.node import placement_groups
from ray_workers.shared.processes.machine_speed import MachineSpeed
from ray_workers.shared.slices import Slice
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.slots import Slots, SlotsUnavailable
from ray_workers.supervision.worker_group import WorkerGroup
from tests.wire import attempt_spec


class PackingNode:
    """The GPUs of a node. As Ray does, it gives a part of the GPU with the least that suffices."""

    def __init__(self, *free: float, cpus: int = 2) -> None:
        self.free = list(free)
        self.cpus = cpus

    def take(self, share: float, cpus: int) -> int | None:
        fitting = [gpu for gpu, left in enumerate(self.free) if left >= share - 1e-6]
        if not fitting or cpus > self.cpus:
            return None
        gpu = min(fitting, key=lambda each: self.free[each])
        self.free[gpu] -= share
        self.cpus -= cpus
        return gpu


class SharedCluster:
    """A worker group whose placement groups are (node, GPU, part of it)."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        nodes: dict[str, PackingNode],
        slices: tuple[Slice, ...],
        share: float,
    ) -> None:
        self.nodes = nodes
        spec = attempt_spec(slices=slices, bundle={"CPU": 1.0, "GPU": share}, start_timeout_s=5.0)
        self.group = WorkerGroup(spec, "a", "127.0.0.1", MachineSpeed(), Timings())
        monkeypatch.setattr(self.group._slots, "ask", self._ask)
        monkeypatch.setattr(self.group._slots, "_gpu_of", self._gpu_of)
        monkeypatch.setattr(placement_groups, "release_slots", self._release_slots)

    async def _ask(
        self, slices: Sequence[Slice], timeout_s: float, *, bundle: Mapping[str, float]
    ) -> list[Slots]:
        asked = []
        for part in slices:
            assert part.num_workers == 1
            cpus = int(bundle.get("CPU", 0))
            gpu = self.nodes[part.node_id].take(bundle["GPU"], cpus)
            group: Any = (part.node_id, gpu, bundle["GPU"], cpus)
            asked.append(Slots(part, group, {}))
            self.group.slots.append(asked[-1])
            if gpu is None:
                raise SlotsUnavailable("not in time")
        return asked

    async def _gpu_of(self, slots: Slots) -> str:
        there: Any = slots.group
        return str(there[1])

    async def _release_slots(self, groups: Sequence[Any]) -> None:
        for node_id, gpu, share, cpus in groups:
            if gpu is not None:
                self.nodes[node_id].free[gpu] += share
                self.nodes[node_id].cpus += cpus

    def held(self) -> list[tuple[str, int]]:
        groups: list[Any] = [slots.group for slots in self.group.slots]
        return [(node_id, gpu) for node_id, gpu, *_ in groups]


@pytest.mark.parametrize(
    ("free", "share", "workers"),
    [
        ((1.0, 1.0), 0.5, 2),
        ((0.5, 0.5), 0.5, 2),
        ((1.0, 0.5, 0.3), 0.5, 2),
        ((1.0, 1.0, 1.0, 1.0), 0.25, 4),
        ((1.0, 1.0), 0.1, 2),
    ],
)
async def test_each_rank_has_a_gpu_of_its_own_and_spare_slots_go_back(
    monkeypatch: pytest.MonkeyPatch, free: tuple[float, ...], share: float, workers: int
) -> None:
    node = PackingNode(*free, cpus=workers)
    cluster = SharedCluster(monkeypatch, {"a": node}, (Slice("a", workers),), share)
    await cluster.group.acquire()
    gpus = [gpu for _, gpu in cluster.held()]
    assert len(set(gpus)) == len(gpus) == workers == cluster.group.num_slots
    assert sum(node.free) == pytest.approx(sum(free) - workers * share)


async def test_gpus_of_two_nodes_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {"a": PackingNode(1.0, 1.0), "b": PackingNode(1.0)}
    cluster = SharedCluster(monkeypatch, nodes, (Slice("a", 2), Slice("b", 1)), 0.5)
    await cluster.group.acquire()
    assert sorted(cluster.held()) == [("a", 0), ("a", 1), ("b", 0)]
    by_rank = cluster.group._slots_by_rank()[0]
    assert [slots.part.node_id for slots in by_rank] == ["a", "a", "b"]


async def test_gpus_that_do_not_suffice_are_reported_and_every_slot_can_be_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = SharedCluster(monkeypatch, {"a": PackingNode(1.0, 0.2)}, (Slice("a", 2),), 0.5)
    with pytest.raises(SlotsUnavailable, match=r"2 slots of 0\.5 GPU on different GPUs"):
        await cluster.group.acquire()
    assert {node_id for node_id, _ in cluster.held()} == {"a"}, "the release has them all"
