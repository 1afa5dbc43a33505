"""Long polls, and requests that the concurrency limiter delays.

A wait ends when there is something to return, when its time is up, when the server is asked to stop
(so that waits don't delay the stop), or when the caller disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from fastapi import Request

from api.context import Context, caller_of, context_of
from api.http.concurrency import ConcurrencyLimiter
from api.problems import Refused
from service.db.notifications import LOOK_AGAIN_S

T = TypeVar("T")

MAX_WAIT_S = 60.0


async def _gone(request: Request) -> None:
    """Wait until the caller has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_over(
    context: Context, request: Request | None, work: Coroutine[Any, Any, T]
) -> T | None:
    """Return the result of `work`, or None if the server stops or the caller disconnects first.

    If `request` is None, the function doesn't notice when the caller disconnects.
    """
    wanted = asyncio.ensure_future(work)
    others: list[asyncio.Future[Any]] = [asyncio.ensure_future(context.stopping.wait())]
    if request is not None:
        others.append(asyncio.ensure_future(_gone(request)))
    try:
        await asyncio.wait([wanted, *others], return_when=asyncio.FIRST_COMPLETED)
        return wanted.result() if wanted.done() else None
    finally:
        for task in (wanted, *others):
            task.cancel()
        await asyncio.gather(wanted, *others, return_exceptions=True)


async def long_poll(
    context: Context,
    request: Request,
    topics: str | tuple[str, ...],
    wait_s: float,
    look: Callable[[], Awaitable[T]],
    enough: Callable[[T], bool],
    *,
    is_of_client: bool = False,
) -> T:
    """Call `look` repeatedly. Returns the first result for which `enough` is true, or the last
    result after `wait_s` seconds.

    is_of_client: whether the caller is a client of a federated job; `look` then checks its token.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    every = (topics,) if isinstance(topics, str) else topics
    with context.runtime.signals.subscribe(*every) as woken:
        while True:
            found = await look()
            left_s = deadline - loop.time()
            if enough(found) or left_s <= 0:
                return found
            pause = woken.wait(min(left_s, LOOK_AGAIN_S))
            if await unless_over(context, request, pause) is None:
                return found
            if not is_of_client:
                await context.sign_in.caller(request)  # raises Refused if the token was removed


@asynccontextmanager
async def limited(
    request: Request, limiter: ConcurrencyLimiter | None = None
) -> AsyncIterator[None]:
    """Limit how many long-running requests of a caller run concurrently. `limiter` is the context's
    general limiter by default.

    A caller is identified by the name of its token or, on a server without tokens, by its address.
    If the caller disconnects, its request stops waiting and does not run.
    """
    context = context_of(request)
    host = request.client.host if request.client else ""
    who = await caller_of(request) if context.authority.has_tokens else host
    async with AsyncExitStack() as held:

        async def enter() -> bool:
            await held.enter_async_context((limiter or context.limiter).acquire(who))
            return True

        if await unless_over(context, request, enter()) is None:
            raise Refused("unavailable", "the server is stopping", None, "try again soon")
        yield
