"""Ending what attempts left in Ray when their supervisor is gone: on the Ray side of the seam."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection

import ray

from ray_workers import releasing

Key = tuple[str, int]
"""A job and its attempt."""

LOOK_S = 1.0
"""How long one question waits for the release to come to its end."""


class UnownedSlots:
    """Releases the slots of attempts without a supervisor, once at a time for each."""

    def __init__(self) -> None:
        self._releases: dict[Key, asyncio.Task[frozenset[str]]] = {}
        self._released: set[Key] = set()

    async def are_released(self, key: Key, node_ids: Collection[str]) -> bool:
        """Whether nothing of the attempt is left, or what is left is in quarantine.

        The first call begins to give back, and later ones look how far that is. node_ids: the
        living nodes that may run a process of it.
        """
        if key in self._released:
            return True
        self.begin(key, node_ids)
        task = self._releases[key]
        await asyncio.wait({task}, timeout=LOOK_S)
        if not task.done():
            return False
        del self._releases[key]
        task.result()
        self._released.add(key)
        return True

    def begin(self, key: Key, node_ids: Collection[str]) -> None:
        if key not in self._releases:
            self._releases[key] = asyncio.ensure_future(_release(key, node_ids))

    async def sweep(self, key: Key, node_ids: Collection[str]) -> None:
        """The attempt is forgotten: give back what it may still hold, without being waited for."""
        self._released.discard(key)
        task = self._releases.get(key)
        if task is not None and task.done():
            del self._releases[key]
        first = releasing.slots_name(*key, 0)
        with contextlib.suppress(ValueError):  # Ray knows no such group
            await asyncio.to_thread(ray.util.get_placement_group, first)
            self.begin(key, node_ids)

    async def keys(self, quarantined: Collection[Key]) -> set[Key]:
        """Attempts that hold slots, without those whose slots are known to be in quarantine."""
        held = {(each.job_id, each.attempt) for each in await releasing.held_slots()}
        return held - set(quarantined)


async def _release(key: Key, node_ids: Collection[str]) -> frozenset[str]:
    slots = [e.group for e in await releasing.held_slots() if (e.job_id, e.attempt) == key]
    return await releasing.release(*key, node_ids, slots)
