"""Creates the supervisors of attempts, finds them again, and reuses shared supervisors.

A supervisor is shared if the previous attempt of the same array was short. At the end of a short
attempt, a shared supervisor is idle for at most two seconds, so that it can run the array's next
attempt. An idle supervisor holds no resources and exits on its own, so nothing depends on this
process's list of idle supervisors: a driver that restarts begins with an empty list.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from ray_workers.node import compat_ray
from ray_workers.node.ray_calls import end_actor, result_within
from ray_workers.shared.contracts import AttemptSpec
from ray_workers.shared.names import SHARED_PREFIX, supervisor_name
from ray_workers.supervision.rank_actor import RankActor
from ray_workers.supervision.supervisor import IDLE_S, Farewell, Series, Supervisor, series_of
from service.cluster.ray import launch_once
from service.cluster.ray.described_nodes import CONTROL_RESOURCE, HEAD_RESOURCE

logger = logging.getLogger(__name__)

SLIVER = 0.001
"""Amount of a marker resource that actors request so that they run on a node with this resource."""
EXPECTED_S = 10.0
"""Seconds after a short attempt during which further short attempts of its array are expected."""
RESERVE_LIMIT_S = 1.0
"""Seconds within which an idle supervisor must respond."""
BEGIN_LIMIT_S = 5.0
"""Seconds within which a reserved supervisor must respond."""


@dataclass(frozen=True)
class _Idle:
    series: Series | None
    name: str
    actor: Any
    node_id: str
    since: float
    """When the supervisor became idle, from `time.monotonic`."""


class Supervisors:
    """The supervisors of one deployment. Use each instance in only one event loop."""

    def __init__(self, deployment_id: str) -> None:
        self._deployment_id = deployment_id
        self._idle: list[_Idle] = []
        """The supervisors that might still be idle, latest last."""
        self._short_at: dict[Series | None, float] = {}
        """When attempts of each series last were short."""
        self._work: set[asyncio.Task[None]] = set()

    async def claim(self, spec: AttemptSpec, drained: Collection[str]) -> Awaitable[Any]:
        """Claim the right to launch the attempt, and return an awaitable that launches it and
        returns its supervisor. Raises LaunchedBefore.

        Idle supervisors on `drained` nodes are not reused.
        """
        series, key = series_of(spec), (spec.job_id, spec.attempt)
        idle = await self._reserve(series, drained)
        shared = self._shared_name(series) if idle is None else idle.name
        name = shared or supervisor_name(*key)
        try:
            await asyncio.to_thread(launch_once.claim_launch, self._deployment_id, *key, name)
        except BaseException:
            if idle is not None:  # else it would wait for an attempt, or stay suspended
                self._do(_end(idle.actor))
            raise
        return _create(spec, shared) if idle is None else _begin(spec, idle.actor)

    def find(self, job_id: str, attempt: int) -> Any:
        """Return the supervisor in which the attempt was launched. Raises ValueError if the
        supervisor does not exist. Blocking."""
        try:
            return ray.get_actor(supervisor_name(job_id, attempt))
        except ValueError:
            name = launch_once.shared_supervisor_of(self._deployment_id, job_id, attempt)
            if name is None:
                raise
            return ray.get_actor(name)

    async def dismiss(self, actor: Any, farewell: Farewell) -> None:
        """End a supervisor that has dropped its attempt, unless it is now idle."""
        now, series = time.monotonic(), farewell.series
        recent = {each: at for each, at in self._short_at.items() if now - at < EXPECTED_S}
        self._short_at = recent | ({series: now} if series and farewell.was_routine else {})
        if farewell.idle_as is None:
            await asyncio.to_thread(ray.kill, actor)
        else:
            idle = _Idle(series, farewell.idle_as, actor, farewell.node_id, now)
            self._idle.append(idle)
            self._do(self._see_out(idle))

    def _shared_name(self, series: Series | None) -> str | None:
        """Return the name of a new shared supervisor; None if no short attempt is expected."""
        is_expected = time.monotonic() - self._short_at.get(series, -math.inf) < EXPECTED_S
        return f"{SHARED_PREFIX}{uuid.uuid4().hex[:12]}" if is_expected else None

    async def _reserve(self, series: Series | None, drained: Collection[str]) -> _Idle | None:
        """Return an idle supervisor that now waits for an attempt."""
        while (idle := self._take(series, drained)) is not None:
            if await self._answers(idle):
                return idle
        return None

    def _take(self, series: Series | None, drained: Collection[str]) -> _Idle | None:
        """Remove and return the supervisor that became idle last."""
        since = time.monotonic() - IDLE_S
        for idle in reversed(self._idle):
            if idle.series == series and idle.since > since and idle.node_id not in drained:
                self._idle.remove(idle)
                return idle
        return None

    async def _see_out(self, idle: _Idle) -> None:
        """If no attempt was given to an idle supervisor, check that the supervisor has exited, and
        end it if it has not."""
        await asyncio.sleep(IDLE_S + RESERVE_LIMIT_S)
        if idle in self._idle:
            self._idle.remove(idle)
            if await self._answers(idle):
                self._do(_end(idle.actor))

    async def _answers(self, idle: _Idle) -> bool:
        """Reserve a supervisor, and return whether it is idle. A supervisor that does not respond
        might be suspended, in which case it would never exit by itself, so it is killed."""
        try:
            return bool(await result_within(RESERVE_LIMIT_S, idle.actor.reserve.remote()))
        except (TimeoutError, ActorUnavailableError):
            logger.warning("ending %s, which does not respond", idle.name)
            self._do(_end(idle.actor))
        except RayError:
            pass  # it has exited
        return False

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)


async def _create(spec: AttemptSpec, shared: str | None) -> Any:
    resources = await asyncio.to_thread(ray.cluster_resources)
    control = CONTROL_RESOURCE if CONTROL_RESOURCE in resources else HEAD_RESOURCE
    rank_actor_code = await asyncio.to_thread(compat_ray.export_class, RankActor)
    create = Supervisor.options(  # type: ignore[attr-defined]
        name=shared or supervisor_name(spec.job_id, spec.attempt),
        lifetime="detached",
        max_concurrency=64,
        resources={control: SLIVER},
    ).remote
    return await asyncio.to_thread(create, spec, rank_actor_code, shared)


async def _begin(spec: AttemptSpec, supervisor: Any) -> Any:
    """Hand the attempt over to a reserved supervisor. If the supervisor dies or is suspended at
    this moment, the attempt has lost its supervisor, and the next polls detect this loss."""
    with contextlib.suppress(TimeoutError, RayError):
        await result_within(BEGIN_LIMIT_S, supervisor.begin.remote(spec))
    return supervisor


async def _end(actor: Any) -> None:
    try:
        await asyncio.to_thread(end_actor, actor)
    except Exception as error:
        logger.warning("an idle supervisor can't be ended: %s", error)
