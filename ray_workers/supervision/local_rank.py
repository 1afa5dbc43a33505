"""A rank without an actor of its own: the supervisor's process does the work of the rank actor.

Starting a rank actor takes longer than everything else that dray does for a job that lasts a
second. The actor is only needed to get a GPU from Ray, to reach another node, or to keep the output
of several ranks from delaying the supervisor.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine, Iterable
from types import SimpleNamespace
from typing import Any

import ray
from ray.exceptions import RayActorError

from ray_workers.node.ray_calls import end_actor
from ray_workers.shared.contracts import AttemptSpec
from ray_workers.supervision.rank_actor import RankHost


def is_local(spec: AttemptSpec, own_node_id: str) -> bool:
    """Whether the attempt's ranks need no actors, given the supervisor's node."""
    is_fixed = spec.world_size == 1 and spec.min_workers is None
    return is_fixed and spec.slices[0].node_id == own_node_id and not spec.bundle.get("GPU")


class LocalRank:
    """A rank in this process. A local rank is called like a rank actor, `local.method.remote(...)`,
    and its calls fail with RayActorError once the rank is closed, like the calls of a dead
    actor."""

    def __init__(self, rank: RankHost) -> None:
        self._rank = rank
        self._calls: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(
            remote=lambda *given: self._begin(getattr(self._rank, method)(*given))
        )

    def _begin(self, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(self._carry_out(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    async def _carry_out(self, call: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await call
        except asyncio.CancelledError:
            if self._is_closed:
                raise RayActorError(error_msg="the rank was closed") from None
            raise

    def close(self) -> None:
        """End the rank's process, and release everything that the rank holds in this process."""
        self._is_closed = True
        for call in self._calls:
            call.cancel()
        self._rank.close()


def kill(actor: Any) -> None:
    """Make Ray end a rank actor, or close a local rank."""
    if isinstance(actor, LocalRank):
        actor.close()
    else:
        ray.kill(actor)


async def end_all(actors: Iterable[Any]) -> None:
    """Like `kill`, but also kill actors that are suspended. Errors are only logged: a node might be
    gone."""
    for error in await asyncio.gather(*map(_end, actors), return_exceptions=True):
        if isinstance(error, Exception):
            traceback.print_exception(error)


async def _end(actor: Any) -> None:
    if isinstance(actor, LocalRank):
        actor.close()
    else:
        await asyncio.to_thread(end_actor, actor)
