"""Waiting on behalf of a caller: until it is worth answering, and no longer than anyone cares.

A wait ends when its time is up, when the server is asked to stop (so that a stop takes no
longer than a request), and when the caller has gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request

from api.context import Context

T = TypeVar("T")

MAX_WAIT_S = 60.0
LOOK_AGAIN_S = 5.0
"""A signal may get lost between processes; looking again costs one query."""


async def _gone(request: Request) -> None:
    """Returns when the caller has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_over(
    context: Context, request: Request | None, work: Coroutine[Any, Any, T]
) -> T | None:
    """The result of `work`; None if the server stops or the caller goes before it is there.

    Without a request, somebody else looks whether the caller has gone.
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
    topic: str,
    wait_s: float,
    look: Callable[[], Awaitable[T]],
    enough: Callable[[T], bool],
) -> T:
    """What `look` finds as soon as that is `enough`, or when `wait_s` seconds are over."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    with context.runtime.signals.subscribe(topic) as woken:
        while True:
            found = await look()
            left_s = deadline - loop.time()
            if enough(found) or left_s <= 0:
                return found
            pause = woken.wait(min(left_s, LOOK_AGAIN_S))
            if await unless_over(context, request, pause) is None:
                return found
            context.authority.caller(request)  # Refused once the token is no more
