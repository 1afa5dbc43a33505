"""Creates the supervisors of attempts, finds them again, and reuses shared supervisors.

A supervisor is shared if its owner's previous attempt was short. At the end of a short attempt, a
shared supervisor is idle for at most two seconds, so that it can run the owner's next attempt. An
idle supervisor holds no resources and exits on its own, so nothing depends on this process's list
of idle supervisors: a driver that restarts begins with an empty list.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Collection
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from ray_workers.node import compat_ray
from ray_workers.node.ray_calls import end_actor, result_within
from ray_workers.shared.contracts import AttemptSpec
from ray_workers.shared.names import SHARED_PREFIX, supervisor_name
from ray_workers.supervision.rank_actor import RankActor
from ray_workers.supervision.supervisor import IDLE_S, Farewell, Supervisor
from service.cluster.ray import launch_once
from service.cluster.ray.described_nodes import CONTROL_RESOURCE, HEAD_RESOURCE

logger = logging.getLogger(__name__)

SLIVER = 0.001
"""Amount of a marker resource that actors request so that they run on a node with this resource."""
EXPECTED_S = 10.0
"""Seconds after a short attempt during which further short attempts of its owner are expected."""
RESERVE_LIMIT_S = 1.0
"""Seconds within which an idle supervisor must respond."""
BEGIN_LIMIT_S = 5.0
"""Seconds within which a reserved supervisor must respond."""


@dataclass(frozen=True)
class _Idle:
    name: str
    actor: Any
    node_id: str
    since: float
    """When the supervisor became idle, from `time.monotonic`."""


class Supervisors:
    """The supervisors of one deployment. Use each instance in only one event loop."""

    def __init__(self, deployment_id: str) -> None:
        self._deployment_id = deployment_id
        self._idle: defaultdict[str | None, list[_Idle]] = defaultdict(list)
        """The supervisors that might still be idle, by owner."""
        self._short_at: dict[str | None, float] = {}
        self._ends: set[asyncio.Future[None]] = set()

    async def claim(self, spec: AttemptSpec, drained: Collection[str]) -> Awaitable[Any]:
        """Claim the right to launch the attempt, and return an awaitable that launches it and
        returns its supervisor. Raises LaunchedBefore.

        Idle supervisors on `drained` nodes are not reused.
        """
        owner = spec.environment_policy.owner
        idle = await self._reserve(owner, drained)
        shared_name = self._shared_name(owner) if idle is None else idle.name
        key = (spec.job_id, spec.attempt)
        name = shared_name or supervisor_name(*key)
        await asyncio.to_thread(launch_once.claim_launch, self._deployment_id, *key, name)
        return _create(spec, shared_name) if idle is None else _begin(spec, idle.actor)

    def find(self, job_id: str, attempt: int) -> Any:
        """Return the supervisor in which the attempt was launched. Raises ValueError if it does not
        exist. Blocking."""
        try:
            return ray.get_actor(supervisor_name(job_id, attempt))
        except ValueError:
            name = launch_once.shared_supervisor_of(self._deployment_id, job_id, attempt)
            if name is None:
                raise
            return ray.get_actor(name)

    async def dismiss(self, actor: Any, farewell: Farewell) -> None:
        """End a supervisor that has dropped its attempt, unless it is now idle."""
        now = time.monotonic()
        if farewell.was_routine:
            self._short_at[farewell.owner] = now
        if farewell.idle_as is None:
            await asyncio.to_thread(ray.kill, actor)
        else:
            idle = _Idle(farewell.idle_as, actor, farewell.node_id, now)
            self._idle[farewell.owner].append(idle)

    def _shared_name(self, owner: str | None) -> str | None:
        """Return the name of a new shared supervisor; None if no short attempt is expected."""
        is_expected = time.monotonic() - self._short_at.get(owner, -EXPECTED_S) < EXPECTED_S
        return f"{SHARED_PREFIX}{uuid.uuid4().hex[:12]}" if is_expected else None

    async def _reserve(self, owner: str | None, drained: Collection[str]) -> _Idle | None:
        """Return an idle supervisor that now waits for an attempt. Supervisors that don't respond
        are ended."""
        idle = self._idle[owner]
        while idle:
            newest = idle.pop()
            if time.monotonic() - newest.since > IDLE_S or newest.node_id in drained:
                continue
            try:
                if await result_within(RESERVE_LIMIT_S, newest.actor.reserve.remote()):
                    return newest
            except TimeoutError:  # it might be suspended, and would not exit
                logger.warning("ending %s: no response for %g s", newest.name, RESERVE_LIMIT_S)
                end = asyncio.ensure_future(asyncio.to_thread(_end, newest.actor))
                self._ends.add(end)
                end.add_done_callback(self._ends.discard)
            except RayError:
                continue  # it has exited
        return None


async def _create(spec: AttemptSpec, shared_name: str | None) -> Any:
    resources = await asyncio.to_thread(ray.cluster_resources)
    control = CONTROL_RESOURCE if CONTROL_RESOURCE in resources else HEAD_RESOURCE
    rank_actor_code = await asyncio.to_thread(compat_ray.export_class, RankActor)
    create = Supervisor.options(  # type: ignore[attr-defined]
        name=shared_name or supervisor_name(spec.job_id, spec.attempt),
        lifetime="detached",
        max_concurrency=64,
        resources={control: SLIVER},
    ).remote
    return await asyncio.to_thread(create, spec, rank_actor_code, shared_name)


async def _begin(spec: AttemptSpec, supervisor: Any) -> Any:
    """Hand the attempt over to a reserved supervisor. If the supervisor dies or is suspended at
    this moment, the attempt has lost its supervisor, which the next polls find out."""
    with contextlib.suppress(TimeoutError, RayError):
        await result_within(BEGIN_LIMIT_S, supervisor.begin.remote(spec))
    return supervisor


def _end(actor: Any) -> None:
    try:
        end_actor(actor)
    except Exception as error:
        logger.warning("an idle supervisor can't be ended: %s", error)
