"""Notices which processes of a group are stopped, and not dead, and ends them.

A rank actor that is stopped neither passes on its process's output nor sees its end, and without
its rendezvous store a group can't be formed again. Once such a process is killed, its loss is dealt
with as any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from typing import Any

from ray.exceptions import RayActorError

from ray_workers.node import compat_ray
from ray_workers.node.ending import end_actor
from ray_workers.shared.contracts import AttemptSpec, ProcessKind, SilentProcess
from ray_workers.shared.machine_pace import MachinePace
from ray_workers.shared.silence import Silence, SilenceLimits
from ray_workers.supervision.worker_group import Member, WorkerGroup

LOOK_S = 2.0
"""Pause between two questions."""
PING_LIMIT_S = 2.0
STORE = "store"


class SilenceWatch:
    """Asks the rank actors and the store of one group for a sign of life, while it runs."""

    def __init__(self, spec: AttemptSpec, group: WorkerGroup, pace: MachinePace) -> None:
        self._group = group
        self._pace = pace
        self._limits = SilenceLimits(spec.silence_limit_s)
        self._silence = Silence(pace)

    async def run(self) -> None:
        """Until cancelled; then nobody is asked, and so nobody is silent."""
        try:
            while True:
                asked = [self._ask_store(), *map(self._ask_actor, self._group.running)]
                for answer in await asyncio.gather(*asked, return_exceptions=True):
                    if isinstance(answer, Exception):  # such as of a node that is gone: asked again
                        traceback.print_exception(answer)
                await asyncio.sleep(LOOK_S)
        finally:
            self._silence = Silence(self._pace)

    def silent(self) -> tuple[SilentProcess, ...]:
        """Whose silence users are told of; of a node's rank actors one, the longest silent."""
        found: dict[tuple[ProcessKind, str | None], float] = {}
        if self._is_silent(STORE):
            found[ProcessKind.STORE, None] = self._silence.since(STORE)
        for member in self._group.running:
            name, kind = compat_ray.actor_id_of(member.actor), ProcessKind.RANK_ACTOR
            if self._is_silent(name):
                since = self._silence.since(name)
                found[kind, member.node_id] = min(found.get((kind, member.node_id), since), since)
        return tuple(SilentProcess(*key, since) for key, since in found.items())

    def _is_silent(self, name: Any) -> bool:
        return self._silence.seconds(name) > self._limits.report_s

    def _is_given_up(self, name: Any) -> bool:
        """Says so at most once for each silence."""
        if self._silence.seconds(name) <= self._limits.rank_actor_s:
            return False
        self._silence.answered(name)
        self._pace.ran_out()
        print(f"ends {name}, silent for {self._limits.rank_actor_s:g} s", flush=True)  # noqa: T201
        return True

    async def _ask_actor(self, member: Member) -> None:
        name = compat_ray.actor_id_of(member.actor)
        with contextlib.suppress(TimeoutError, RayActorError):
            await self._silence.ask(name, PING_LIMIT_S, member.actor.ping.remote())
        if member.is_running and self._is_given_up(name):
            await asyncio.to_thread(end_actor, member.actor)

    async def _ask_store(self) -> None:
        with contextlib.suppress(TimeoutError, OSError):
            await self._silence.ask(STORE, PING_LIMIT_S, self._group.store_answers())
        if self._is_given_up(STORE):
            self._group.end_store()
