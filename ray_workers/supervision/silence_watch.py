"""Kills rank actors and rendezvous stores whose processes are stopped, for example by SIGSTOP.

A suspended rank actor neither forwards the output of its training process nor observes the
process's exit, and a group whose rendezvous store is suspended can't form another round. Once such
a process is killed, its loss is handled like any other loss. The supervisor itself is watched by
`service.cluster.ray.driver`.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from typing import Any

from ray.exceptions import RayActorError

from ray_workers.node import compat_ray
from ray_workers.node.ray_calls import end_actor
from ray_workers.shared.contracts import AttemptSpec, ProcessKind, SilentProcess
from ray_workers.shared.processes.machine_speed import MachineSpeed
from ray_workers.shared.processes.silence import Silence, SilenceLimits
from ray_workers.supervision.local_rank import LocalRank
from ray_workers.supervision.member import Member
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.worker_group import WorkerGroup

STORE = "store"


class SilenceWatch:
    """Pings the rank actors and the store of one group while it runs."""

    def __init__(
        self, spec: AttemptSpec, group: WorkerGroup, speed: MachineSpeed, timings: Timings
    ) -> None:
        self._group = group
        self._speed = speed
        self._timings = timings
        self._limits = SilenceLimits(spec.silence_limit_s)
        self._silence = Silence(speed)

    async def run(self) -> None:
        """Ping the processes until this task is cancelled. After the cancellation, no process
        counts as silent."""
        try:
            while True:
                asked = [self._ask_store(), *map(self._ask_actor, self._with_actors())]
                for answer in await asyncio.gather(*asked, return_exceptions=True):
                    if isinstance(answer, Exception):  # for example, the node is gone
                        traceback.print_exception(answer)
                await asyncio.sleep(self._timings.ping_period_s)
        finally:
            self._silence = Silence(self._speed)

    def silent(self) -> tuple[SilentProcess, ...]:
        """Return the silent processes to report to users. For each node, only the rank actor with
        the longest silence is included."""
        found: dict[tuple[ProcessKind, str | None], float] = {}
        if self._is_silent(STORE):
            found[ProcessKind.STORE, None] = self._silence.since(STORE)
        for member in self._with_actors():
            name, kind = compat_ray.actor_id_of(member.actor), ProcessKind.RANK_ACTOR
            if self._is_silent(name):
                since = self._silence.since(name)
                found[kind, member.node_id] = min(found.get((kind, member.node_id), since), since)
        return tuple(SilentProcess(*key, since) for key, since in found.items())

    def _with_actors(self) -> list[Member]:
        spares = [member for member in self._group.spares if member.is_running]
        watched = [*self._group.running, *spares]
        return [member for member in watched if not isinstance(member.actor, LocalRank)]

    def _is_silent(self, name: Any) -> bool:
        return self._silence.seconds(name) > self._limits.report_s

    def _give_up(self, name: Any) -> bool:
        """Return whether the process has been silent for too long, and restart the measurement of
        its silence if it has."""
        if self._silence.seconds(name) <= self._limits.rank_actor_s:
            return False
        self._silence.answered(name)
        self._speed.ran_out()
        print(f"killing {name}: no response for {self._limits.rank_actor_s:g} s", flush=True)  # noqa: T201
        return True

    async def _ask_actor(self, member: Member) -> None:
        name = compat_ray.actor_id_of(member.actor)
        with contextlib.suppress(TimeoutError, RayActorError):
            await self._silence.ask(name, self._timings.ping_limit_s, member.actor.ping.remote())
        if member.is_running and self._give_up(name):
            await asyncio.to_thread(end_actor, member.actor)

    async def _ask_store(self) -> None:
        with contextlib.suppress(TimeoutError, OSError):
            limit_s = self._timings.ping_limit_s
            await self._silence.ask(STORE, limit_s, self._group.store_answers())
        if self._give_up(STORE):
            self._group.end_store()
