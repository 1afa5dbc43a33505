"""Releases the slots of an attempt. Each slot is released once its processes have ended.

Slots are placement groups whose lifetime does not depend on the supervisor. Therefore, when a
supervisor dies, a GPU is not offered to other jobs while a process still holds it. The service
finds a group without a supervisor by the group's name and releases it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group_table,
    remove_placement_group,
)

from ray_workers.node.ray_calls import result_within
from ray_workers.shared.names import agent_name

EMPTY_BOUND_S = 20.0
"""Seconds after which an attempt's slots are quarantined if its processes still exist. This limit
is longer than the forkserver's own limit (`forkserver.server.STUCK_S`)."""
RELEASE_TIMEOUT_S = 30.0
"""Seconds within which Ray must list slots as free."""
ANSWER_LIMIT_S = 10.0
"""Seconds within which a node agent must have searched for an attempt's processes."""
CHECK_S = 0.02


@dataclass(frozen=True)
class HeldSlots:
    """A placement group of an attempt, as Ray lists it."""

    job_id: str
    attempt: int
    group: PlacementGroup
    node_ids: frozenset[str]
    num_slots: int
    resources: Mapping[str, float]


def slots_name(job_id: str, attempt: int, number: int) -> str:
    """Return the name of an attempt's placement group. Numbers are unique within an attempt."""
    return f"dray:{job_id}:{attempt}:slots:{number}"


async def held_slots() -> list[HeldSlots]:
    """Return every attempt's placement groups that Ray still has."""
    table = await asyncio.to_thread(placement_group_table)
    found = []
    for identity, entry in table.items():
        match entry["name"].split(":"):
            case ["dray", job_id, attempt, "slots", _] if entry["state"] != "REMOVED":
                group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(identity)))
                nodes = entry["bundles_to_node_id"]
                placed = frozenset(node for node in nodes.values() if node)
                resources = Counter[str]()
                for bundle in entry["bundles"].values():
                    resources.update(bundle)
                found.append(
                    HeldSlots(job_id, int(attempt), group, placed, len(nodes), dict(resources))
                )
    return found


async def slots_of(job_id: str, attempt: int) -> list[HeldSlots]:
    """Return the placement groups of one attempt that Ray still has."""
    key = (job_id, attempt)
    return [each for each in await held_slots() if (each.job_id, each.attempt) == key]


async def release(
    job_id: str, attempt: int, node_ids: Iterable[str], slots: Sequence[PlacementGroup]
) -> frozenset[str]:
    """Release the slots of an attempt whose processes have been asked to end, and return the nodes
    whose slots are in quarantine.

    `node_ids` are all nodes on which a process of the attempt might be running. Raises TimeoutError
    if Ray does not remove the slots in time; the call can be repeated.
    """
    busy = await busy_nodes(job_id, attempt, node_ids)
    kept = frozenset([node for node in busy if await _quarantine(job_id, attempt, node)])
    if kept:
        quarantined = [held.group.id for held in await held_slots() if held.node_ids & kept]
        slots = [group for group in slots if group.id not in quarantined]
    await release_slots(slots)
    return kept


async def busy_nodes(
    job_id: str, attempt: int, node_ids: Iterable[str], ranks: Sequence[int] | None = None
) -> set[str]:
    """Return the nodes on which processes of the attempt still exist after `EMPTY_BOUND_S`. If
    `ranks` is given, check only the processes of these ranks."""
    busy, deadline = set(node_ids), time.monotonic() + EMPTY_BOUND_S
    while busy and time.monotonic() < deadline:
        answers = await asyncio.gather(*(is_empty(job_id, attempt, node, ranks) for node in busy))
        busy = {node for node, empty in zip(busy, answers, strict=True) if not empty}
        if busy:
            await asyncio.sleep(CHECK_S)
    return busy


async def is_empty(
    job_id: str, attempt: int, node_id: str, ranks: Sequence[int] | None = None
) -> bool:
    """Whether no process of the attempt (or of the given ranks) remains on the node. True if the
    node no longer exists."""
    try:
        agent = await asyncio.to_thread(ray.get_actor, agent_name(node_id))
        return not await result_within(ANSWER_LIMIT_S, agent.running.remote(job_id, attempt, ranks))
    except (ValueError, RayActorError, TimeoutError):
        return node_id not in await asyncio.to_thread(alive_nodes)


async def _quarantine(job_id: str, attempt: int, node_id: str) -> bool:
    """Make the node's agent put the attempt's slots into quarantine. Return False if nothing of the
    attempt remains."""
    try:
        agent = await asyncio.to_thread(ray.get_actor, agent_name(node_id))
        call: Any = agent.quarantine.remote(job_id, attempt)
        return bool(await result_within(ANSWER_LIMIT_S, call))
    except (ValueError, RayActorError, TimeoutError):
        # The agent does not respond. The slots stay reserved, and are released later, like the
        # slots of an attempt without a supervisor.
        return node_id in await asyncio.to_thread(alive_nodes)


async def release_slots(slots: Sequence[PlacementGroup]) -> None:
    """Remove placement groups, newest first, and wait until Ray lists them as removed."""
    for group in reversed(slots):
        await asyncio.to_thread(remove_placement_group, group)
    deadline = time.monotonic() + RELEASE_TIMEOUT_S
    while not all(await asyncio.gather(*map(_is_removed, slots))):
        if time.monotonic() > deadline:
            raise TimeoutError(f"Ray still holds slots after {RELEASE_TIMEOUT_S:g} s")
        await asyncio.sleep(CHECK_S)


async def _is_removed(group: PlacementGroup) -> bool:
    table = await asyncio.to_thread(placement_group_table, group)
    return table.get("state") in (None, "REMOVED")


def alive_nodes() -> set[str]:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"] for node in nodes if node["Alive"]}
