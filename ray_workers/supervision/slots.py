"""Reserves and releases the slots of an attempt. Slots are Ray placement groups."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_workers.node import placement_groups
from ray_workers.shared.contracts import AttemptSpec
from ray_workers.shared.slices import RoleSlots, Slice, by_bundle
from ray_workers.supervision.rank_actor import RankActor
from ray_workers.supervision.rules.timings import Timings

BLOCK_LIMIT_S = 2.0
"""Time limit for reserving fractions of GPUs only so that Ray chooses other GPUs."""
PROBE_LIMIT_S = 10.0
"""Minimum time limit for the actor that finds out which GPU Ray has chosen."""


class SlotsUnavailable(Exception):
    """Ray did not reserve all slots in time."""


@dataclass
class Slots:
    """A placement group with some or all of the attempt's slots on one node."""

    part: Slice
    group: PlacementGroup
    bundle: Mapping[str, float]
    """The Ray resources of each worker in these slots."""
    is_held: bool = True
    """False while the slots are requested but not yet reserved."""
    is_going: bool = False
    """Whether the slots will be released as soon as the processes in them have exited."""


class AttemptSlots:
    """All slots of one attempt, including requested slots."""

    def __init__(self, spec: AttemptSpec, timings: Timings) -> None:
        self._spec = spec
        self._timings = timings
        self.held: list[Slots] = []
        """Slots that are requested or reserved."""
        self.num_ever = 0
        """Number of placement groups requested so far."""

    async def acquire(self) -> None:
        """Reserve all slots, in one placement group per slice. Slots with a fraction of a GPU get
        one placement group per worker, each on a different GPU.

        Raises SlotsUnavailable if Ray does not reserve all slots within `start_timeout_s`. After
        this error, `held` contains the slots that were reserved.
        """
        spec, deadline = self._spec, time.monotonic() + self._spec.start_timeout_s
        if not 0 < spec.bundle.get("GPU", 0) < 1:
            await self.ask(spec.slices, spec.start_timeout_s, roles=spec.roles)
            return
        kept = [s for part in spec.slices for s in await self._acquire_apart(part, deadline)]
        await self.release_slots([slots for slots in self.held if slots not in kept])
        self.held = kept

    async def _acquire_apart(self, part: Slice, deadline: float) -> list[Slots]:
        """Reserve slots for the workers of one slice, each on a different GPU of the node.

        Ray chooses the fullest GPU that has enough capacity, so it would put the second slot on the
        same GPU as the first slot. The second slot is then released, and the rest of the GPU is
        temporarily blocked, piece by piece, until Ray chooses another GPU.
        """
        kept: dict[str, Slots] = {}
        bundle = self._spec.bundle
        while (lacking := part.num_workers - len(kept)) > 0:
            try:
                found = await self._acquire_seen(part.node_id, lacking, bundle, deadline)
            except (SlotsUnavailable, TimeoutError):
                raise SlotsUnavailable(
                    f"Ray did not provide {part.num_workers} slots of {bundle['GPU']:g} GPU on "
                    f"different GPUs of the same node within {self._spec.start_timeout_s:g} s"
                ) from None
            again = [slots for slots, gpu in found if kept.setdefault(gpu, slots) is not slots]
            await self.release_slots(again)
            await self._block(part.node_id, len(again), set(kept), deadline)
        return list(kept.values())

    async def _block(self, node_id: str, number: int, gpus: Set[str], deadline: float) -> None:
        """Reserve `number` fractions of these GPUs, or fewer if the GPUs do not have enough
        capacity."""
        known = list(self.held)
        part = {"GPU": self._spec.bundle["GPU"]}
        soon = min(deadline, time.monotonic() + BLOCK_LIMIT_S)
        blocking: list[Slots] = []
        with contextlib.suppress(SlotsUnavailable, TimeoutError):
            found = await self._acquire_seen(node_id, number, part, soon)
            blocking = [slots for slots, gpu in found if gpu in gpus]
        await self.release_slots([s for s in self.held if s not in known and s not in blocking])

    async def _acquire_seen(
        self, node_id: str, number: int, bundle: Mapping[str, float], deadline: float
    ) -> list[tuple[Slots, str]]:
        """Reserve `number` slots with a fraction of a GPU, each in a separate placement group.
        Returns the slots with their GPUs."""
        limit_s = max(0.0, deadline - time.monotonic())
        asked = await self.ask([Slice(node_id, 1)] * number, limit_s, bundle=bundle)
        async with asyncio.timeout(max(PROBE_LIMIT_S, deadline - time.monotonic())):
            gpus = await asyncio.gather(*map(self._gpu_of, asked))
        return list(zip(asked, gpus, strict=True))

    async def ask(
        self,
        slices: Sequence[Slice],
        timeout_s: float,
        *,
        is_held: bool = True,
        bundle: Mapping[str, float] | None = None,
        roles: Sequence[RoleSlots] = (),
    ) -> list[Slots]:
        """Reserve slots. `bundle` is the bundle of each slot, if it differs from the bundle of a
        worker. Pass `roles` only if the slots are for the entire group."""
        spec, asked = self._spec, []
        for part, own in by_bundle(slices, bundle or spec.bundle, roles):
            group = placement_group(
                [dict(own)] * part.num_workers,
                strategy="STRICT_PACK",
                name=placement_groups.slots_name(spec.job_id, spec.attempt, self.num_ever),
                lifetime="detached",
                bundle_label_selector=[{"ray.io/node-id": part.node_id}] * part.num_workers,
            )
            self.num_ever += 1
            asked.append(Slots(part, group, own, is_held))
            self.held.append(asked[-1])
        deadline = time.monotonic() + timeout_s
        waits = [
            # Ray truncates the timeout to whole seconds.
            asyncio.to_thread(slots.group.wait, math.ceil(max(deadline - time.monotonic(), 0.0)))
            for slots in asked
        ]
        if not all(await asyncio.gather(*waits)):
            num = sum(part.num_workers for part in slices)
            raise SlotsUnavailable(f"Ray did not provide {num} slots within {timeout_s:g} s")
        return asked

    async def _gpu_of(self, slots: Slots) -> str:
        """Find out which GPU Ray has chosen for a slot, by starting an actor in the slot."""
        strategy = PlacementGroupSchedulingStrategy(slots.group, placement_group_bundle_index=0)
        looks = RankActor.options(  # type: ignore[attr-defined]
            num_cpus=0, num_gpus=self._spec.bundle["GPU"], scheduling_strategy=strategy
        ).remote("", self._spec.job_name, self._timings)
        try:
            (gpu,) = await looks.gpus.remote()
            return str(gpu)
        finally:
            ray.kill(looks)

    async def release_slots(self, slots: Sequence[Slots]) -> None:
        """Release slots in which no process is running."""
        await placement_groups.release_slots([each.group for each in slots])
        self.held = [each for each in self.held if each not in slots]
