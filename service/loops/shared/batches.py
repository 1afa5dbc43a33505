"""Stores many items in one transaction, or one by one if that transaction fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from service.domain.errors import DatabaseUnavailable, DomainError

T = TypeVar("T")
R = TypeVar("R")

logger = logging.getLogger(__name__)

ALONE_S = 2.0
"""Maximum time in seconds for storing items one by one. After that, the remaining items are skipped
if an item has failed with a DomainError."""


async def together_or_alone(
    items: Sequence[T], store: Callable[[Sequence[T]], Awaitable[Sequence[R]]]
) -> Sequence[R | Exception]:
    """Store all items together or, if that fails, one by one. Return the result of `store`, or the
    exception, for each item.

    DatabaseUnavailable is raised, because it affects all items. Any other DomainError might affect
    one item or all of them. If the storage doesn't respond, each try takes a long time, so the
    remaining items are skipped after `ALONE_S`.
    """
    try:
        return await store(items)
    except DatabaseUnavailable:
        raise
    except Exception as error:
        if len(items) == 1:
            return [error]
        logger.warning(
            "storing %d items one by one, because storing them together failed: %r",
            *(len(items), error),
        )
    return await _each_alone(items, store)


async def _each_alone(
    items: Sequence[T], store: Callable[[Sequence[T]], Awaitable[Sequence[R]]]
) -> Sequence[R | Exception]:
    time = asyncio.get_running_loop().time
    until = time() + ALONE_S
    answers: list[R | Exception] = []
    unavailable: DomainError | None = None
    for item in items:
        if unavailable is not None and time() >= until:
            answers.append(unavailable)
            continue
        try:
            answers.extend(await store([item]))
        except Exception as error:
            answers.append(error)
            unavailable = error if isinstance(error, DomainError) else unavailable
    return answers
