"""Releases slots that attempts still hold in Ray although their supervisors are gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

import ray

from ray_workers.node import placement_groups

logger = logging.getLogger(__name__)

Key = tuple[str, int]
"""(job id, attempt number)."""

WAIT_S = 1.0
"""Maximum time in seconds that `are_released` waits for a release to complete."""


class UnownedSlots:
    """Releases the slots of attempts without a supervisor. For each attempt, only one release runs
    at a time."""

    def __init__(self) -> None:
        self._releases: dict[Key, asyncio.Task[frozenset[str]]] = {}
        self._released: set[Key] = set()
        self._sweeps: dict[Key, asyncio.Task[frozenset[str]]] = {}
        self._found: set[Key] = set()
        """The result of the last call to `keys`."""

    async def are_released(self, key: Key, node_ids: Collection[str]) -> bool:
        """Whether the attempt's slots are free or in quarantine.

        The first call starts the release, and later calls check whether it is complete. `node_ids`
        are the live nodes on which a process of the attempt might be running.
        """
        if key in self._released:
            return True
        if key not in self._releases:
            self._releases[key] = asyncio.ensure_future(_release(key, node_ids))
        task = self._releases[key]
        await asyncio.wait({task}, timeout=WAIT_S)
        if not task.done():
            return False
        self._releases.pop(key, None)
        task.result()
        self._released.add(key)
        return True

    async def sweep(self, key: Key, node_ids: Collection[str]) -> None:
        """Start releasing slots that a forgotten attempt might still hold. Does not wait for the
        release.

        If the release fails, the next call of `keys` returns the attempt again.
        """
        self._released.discard(key)
        if key not in self._found:
            # Most attempts no longer hold any slots, so check only the first slots of the attempt,
            # which is fast. `keys` finds attempts that still hold slots.
            try:
                first = placement_groups.slots_name(*key, 0)
                await asyncio.to_thread(ray.util.get_placement_group, first)
            except ValueError:
                return
        self._found.discard(key)
        if key not in self._sweeps:
            self._sweeps[key] = task = asyncio.ensure_future(_release(key, node_ids))
            task.add_done_callback(lambda done: self._swept(key, done))

    def _swept(self, key: Key, done: asyncio.Task[frozenset[str]]) -> None:
        del self._sweeps[key]
        if not done.cancelled() and done.exception() is not None:
            logger.warning("can't release the slots of %s attempt %d: %s", *key, done.exception())

    async def keys(self, quarantined: Collection[Key]) -> set[Key]:
        """Return all attempts that hold slots, except for attempts in `quarantined`."""
        held = {(each.job_id, each.attempt) for each in await placement_groups.held_slots()}
        self._found = held - set(quarantined)
        return set(self._found)


async def _release(key: Key, node_ids: Collection[str]) -> frozenset[str]:
    slots = [each.group for each in await placement_groups.slots_of(*key)]
    return await placement_groups.release(*key, node_ids, slots)
