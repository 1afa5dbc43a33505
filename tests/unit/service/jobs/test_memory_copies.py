"""Copies of a model's state that can't fit into the memory of the cluster are refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from dray.spec import JobSpec
from ray_workers.shared.memory_limit import human
from service.cluster.port import ClusterSnapshot
from service.domain.errors import OutOfMemory
from service.nodes import node_table
from service.planning.model.memory import copies_bytes, memory_of
from service.planning.model.shapes import shapes_of
from tests.marks import ON_SQLITE
from tests.unit.service.helpers import Service
from tests.wire import cluster_node


def copied(num_workers: int = 2, copies: int = 1, **parts: Any) -> JobSpec:
    """A model with 85 million parameters, which is divided among all workers."""
    return JobSpec.model_validate(
        {
            "recipe": "language_model",
            "model": {"num_layers": 12, "num_heads": 12, "width": 768},
            "data": {"source": "file:///text.txt"},
            "train": {"global_batch_size": 2 * num_workers},
            "resources": {"num_workers": num_workers},
            "parallel": {"shard": num_workers},
            "checkpoint": {"in_memory": {"every_steps": 10, "copies": copies}},
            **parts,
        }
    )


def see_nodes(service: Service, nodes: Sequence[tuple[float, int | None]]) -> None:
    """nodes: (CPUs, memory in bytes) of each node."""
    found = tuple(
        cluster_node(f"node-{number}", {"CPU": cpus}, memory_bytes=memory)
        for number, (cpus, memory) in enumerate(nodes)
    )
    seen = ClusterSnapshot("session-1", "ray://x", "http://dash", False, found)
    service.database.write_sync(lambda s: node_table.store(s, seen, None, service.now))


@ON_SQLITE
async def test_only_nodes_that_can_have_a_worker_are_counted(service: Service) -> None:
    spec = copied(resources={"num_workers": 2, "gpus_per_worker": 1})
    needed = copies_bytes(spec, shapes_of(spec))
    gpus = [
        cluster_node(f"gpu-{n}", {"CPU": 4.0, "GPU": 1.0}, memory_bytes=needed) for n in range(2)
    ]
    large = cluster_node("head", {"CPU": 64.0}, memory_bytes=64 * needed)
    seen = ClusterSnapshot("session-1", "ray://x", "http://dash", False, (large, *gpus))
    service.database.write_sync(lambda s: node_table.store(s, seen, None, service.now))
    with pytest.raises(OutOfMemory) as refused:
        await service.jobs.submit(spec)
    sizes = f"({human(needed / 2)} on the largest node, {human(needed)} on all nodes that"
    assert sizes in refused.value.message


async def test_a_job_whose_copies_fit_on_no_node_is_refused_and_nothing_is_stored(
    service: Service,
) -> None:
    spec = copied()
    needed = copies_bytes(spec, shapes_of(spec))
    see_nodes(service, [(1.0, 2 * needed - 2), (8.0, 2 * needed)])
    with pytest.raises(OutOfMemory, match="at most 50% of a node's memory can be used") as refused:
        await service.jobs.submit(spec)
    assert refused.value.pointer == "/checkpoint/in_memory"
    assert "on each of 2 workers" in refused.value.message
    assert str(refused.value.hint).startswith("set checkpoint.in_memory to off")
    assert (await service.jobs.list()).items == []
    await service.jobs.submit(copied(checkpoint={"in_memory": "off"}))
    see_nodes(service, [(1.0, 2 * needed), (8.0, 2 * needed)])
    await service.jobs.submit(spec)


@ON_SQLITE
async def test_the_number_of_copies_that_fit_is_proposed(service: Service) -> None:
    spec = copied(num_workers=4, copies=3)
    needed = copies_bytes(spec, shapes_of(spec))
    see_nodes(service, [(1.0, int(2.1 * needed * 3 / 4))] * 4)  # for two copies and the own share
    with pytest.raises(OutOfMemory) as refused:
        await service.jobs.submit(spec)
    assert refused.value.hint == "set checkpoint.in_memory.copies to 2"
    await service.jobs.submit(copied(num_workers=4, copies=2))


@ON_SQLITE
@pytest.mark.parametrize(
    ("nodes", "parts"),
    [
        ([(8.0, 1024), (8.0, None)], {}),
        ([(8.0, 1024)], {"checkpoint": {"in_memory": "auto"}}),
        ([(8.0, 1024)], {"model": {"tokenizer": "file:///tokenizer.json"}}),
    ],
    ids=["unknown memory", "auto", "an assumed size of the model"],
)
async def test_what_is_not_known_is_no_reason_to_refuse(
    service: Service, nodes: Sequence[tuple[float, int | None]], parts: dict[str, Any]
) -> None:
    see_nodes(service, nodes)
    await service.jobs.submit(copied(**parts))


def test_copies_are_in_the_memory_of_the_host_and_not_of_the_gpu() -> None:
    on_gpus = {"num_workers": 2, "gpus_per_worker": 1}
    spec = copied(resources=on_gpus)
    without = copied(resources=on_gpus, checkpoint={"in_memory": "off"})
    shapes = shapes_of(spec)
    assert memory_of(spec, shapes) == memory_of(without, shapes)
    assert copies_bytes(spec, shapes) == copies_bytes(copied(), shapes) > 0


@ON_SQLITE
async def test_any_job_is_refused_exactly_if_its_workers_have_no_place(service: Service) -> None:
    draw = random.Random(44)
    verdicts, proposed = set(), set()
    for _ in range(40):
        num_workers = draw.choice([2, 3, 4])
        copies = draw.randrange(1, num_workers)
        spec = copied(num_workers, copies)
        needed = copies_bytes(spec, shapes_of(spec))
        nodes = [
            (float(draw.randrange(1, 4)), draw.randrange(1, 6 * needed))
            for _ in range(draw.randrange(2, 5))
        ]
        if sum(cpus for cpus, _ in nodes) < num_workers:
            continue
        see_nodes(service, nodes)
        places = 0
        for cpus, memory in nodes:
            while cpus >= 1 and memory >= 2 * needed:
                cpus, memory, places = cpus - 1, memory - 2 * needed, places + 1
        try:
            await service.jobs.submit(spec)
        except OutOfMemory as refused:
            assert places < num_workers, nodes
            if "copies to" in str(refused.hint):  # the proposed number is accepted
                fewer = int(str(refused.hint).rpartition(" ")[2])
                await service.jobs.submit(copied(num_workers, fewer))
                proposed.add(fewer)
        else:
            assert places >= num_workers, nodes
        verdicts.add(places >= num_workers)
    assert verdicts == {True, False}
    assert proposed
