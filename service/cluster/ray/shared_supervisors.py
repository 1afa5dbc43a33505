"""The idle supervisors that a driver can give the next short attempt of the same owner.

A supervisor is idle for at most two seconds and holds no resources, so nothing depends on this
memory: a driver that restarts knows no idle supervisors, and they exit on their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from ray_workers.node.ray_calls import end_actor, result_within
from ray_workers.shared.names import SHARED_PREFIX
from ray_workers.supervision.supervisor import IDLE_S, Farewell

logger = logging.getLogger(__name__)

EXPECTED_S = 10.0
"""Seconds after a short attempt during which further short attempts of its owner are expected."""
RESERVE_LIMIT_S = 1.0
"""Seconds within which an idle supervisor must respond."""


@dataclass(frozen=True)
class IdleSupervisor:
    name: str
    actor: Any
    node_id: str
    since: float
    """When it became idle, from `time.monotonic`."""


class SharedSupervisors:
    """Idle shared supervisors by owner. Use each instance in only one event loop."""

    def __init__(self) -> None:
        self._idle: defaultdict[str | None, list[IdleSupervisor]] = defaultdict(list)
        self._short_at: dict[str | None, float] = {}
        self._ends: set[asyncio.Future[None]] = set()

    def name(self, owner: str | None) -> str | None:
        """Return the name of a new shared supervisor; None if no short attempt is expected. A
        supervisor that can't be reused has the name of its attempt."""
        is_expected = time.monotonic() - self._short_at.get(owner, -EXPECTED_S) < EXPECTED_S
        return f"{SHARED_PREFIX}{uuid.uuid4().hex[:12]}" if is_expected else None

    def dropped(self, farewell: Farewell, actor: Any) -> None:
        """Record the end of an attempt."""
        now = time.monotonic()
        if farewell.was_routine:
            self._short_at[farewell.owner] = now
        if farewell.idle_as is not None:
            idle = IdleSupervisor(farewell.idle_as, actor, farewell.node_id, now)
            self._idle[farewell.owner].append(idle)

    async def reserve(self, owner: str | None, drained: Collection[str]) -> IdleSupervisor | None:
        """Return an idle supervisor that waits for an attempt of this owner, but not on a `drained`
        node. Supervisors that don't respond are ended."""
        idle = self._idle[owner]
        while idle:
            newest = idle.pop()
            if time.monotonic() - newest.since > IDLE_S or newest.node_id in drained:
                continue
            try:
                if await result_within(RESERVE_LIMIT_S, newest.actor.reserve.remote()):
                    return newest
            except TimeoutError:  # it might be suspended, and would never exit
                logger.warning("ending an idle supervisor that does not respond: %s", newest.name)
                end = asyncio.ensure_future(asyncio.to_thread(_end, newest.actor))
                self._ends.add(end)
                end.add_done_callback(self._ends.discard)
            except RayError:
                continue  # it has exited
        return None


def _end(actor: Any) -> None:
    try:
        end_actor(actor)
    except Exception as error:
        logger.warning("an idle supervisor can't be ended: %s", error)
