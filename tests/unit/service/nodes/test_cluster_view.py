"""The view of the cluster: the slots held on each node, and the jobs that hold them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from service.domain.scheduling.placement import slots
from service.nodes import node_table
from tests.unit.service.helpers import Service
from tests.unit.service.nodes.test_quarantine import see
from tests.wire import cluster_node


async def test_each_slot_is_counted_once_however_many_nodes_there_are(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting separately for each node would take long with a thousand nodes and jobs."""
    counted: Counter[str] = Counter()
    add = slots.add

    def counting(free: dict[str, float], *rest: Any) -> None:
        counted["slots"] += 1
        add(free, *rest)

    monkeypatch.setattr(slots, "add", counting)
    jobs = [await service.running() for _ in range(3)]
    see(service, *(cluster_node(f"node-{name}", {"CPU": 4.0}) for name in "abcd"))
    first, *others = (await service.queries.cluster()).nodes
    assert (first.held, first.jobs) == ({"CPU": 3.0}, jobs)
    assert [(node.held, node.jobs) for node in others] == [({}, [])] * 3
    assert counted["slots"] == 3


async def test_broken_text_of_a_node_or_of_ray_is_shown(service: Service) -> None:
    broken = "half of a character: \ud800, and NUL: \0"
    see(service, cluster_node("node-a", {"CPU": 4.0}, accepted=False, problem=broken))
    shown = "half of a character: ?, and NUL: ␀"
    (node,) = (await service.queries.cluster()).nodes
    assert node.reason == shown
    service.database.write_sync(lambda s: node_table.store(s, None, broken, service.now))
    cluster = await service.queries.cluster()
    assert (cluster.connected, cluster.reason) == (False, shown)
