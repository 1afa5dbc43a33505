"""The plan's view of the nodes over several rounds."""

from __future__ import annotations

from dataclasses import replace

from ray_workers.shared.slices import Slice
from service.cluster.port import ClusterSnapshot
from service.domain.scheduling import policy
from service.domain.scheduling.placement.slots import NUM_GPUS
from service.loops.scheduling.seen_nodes import SeenNodes
from tests.wire import cluster_node

CLUSTER = ClusterSnapshot(
    *("session-1", "ray://x", None),
    shared=False,
    nodes=tuple(cluster_node(f"node-{name}", {"CPU": 4.0, "GPU": 1.0}) for name in "ab"),
)


def look(
    seen: SeenNodes, cluster: ClusterSnapshot, *holders: policy.Holder, shares_gpus: bool = False
) -> dict[str, policy.Node]:
    nodes = seen.of(cluster, holders, set(), shares_gpus=shares_gpus)
    return {node.id: node for node in nodes}


def holds(node_id: str, **bundle: float) -> policy.Holder:
    return policy.Holder("job-1", (Slice(node_id, 1),), bundle)


def test_a_node_is_looked_at_again_when_slots_of_it_are_held_and_when_it_was_seen_anew() -> None:
    seen = SeenNodes()
    first = look(seen, CLUSTER)
    held = look(seen, CLUSTER, holds("node-a", CPU=1.0))
    assert held["node-a"].available_to_us == {"CPU": 3.0, "GPU": 1.0}
    assert held["node-b"] is first["node-b"]
    assert look(seen, CLUSTER) == first
    assert seen.total(CLUSTER) == {"CPU": 8.0, "GPU": 2.0}
    smaller = replace(CLUSTER, nodes=(cluster_node("node-b", {"CPU": 2.0}),))
    assert look(seen, smaller)["node-b"].total == {"CPU": 2.0}
    assert seen.total(smaller) == {"CPU": 2.0}
    assert seen.total(None) == {}


def test_gpus_are_counted_whole_only_while_some_are_shared() -> None:
    seen = SeenNodes()
    assert NUM_GPUS not in look(seen, CLUSTER)["node-b"].available_to_us
    half = holds("node-a", CPU=1.0, GPU=0.5)
    shared = look(seen, CLUSTER, half, shares_gpus=True)
    assert [node.available_to_us[NUM_GPUS] for node in shared.values()] == [1, 1]
    assert NUM_GPUS not in look(seen, CLUSTER)["node-b"].available_to_us
