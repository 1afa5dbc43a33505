"""Many items in one transaction, unless one of them spoils it for the others."""

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
"""Seconds after which no more items are tried alone, if an error of the domain was among them."""


async def together_or_alone(
    items: Sequence[T], store: Callable[[Sequence[T]], Awaitable[Sequence[R]]]
) -> Sequence[R | Exception]:
    """Store all items at once; if that fails, each alone. Answers for each what `store` does, or
    why it could not be stored.

    A database that does not answer is the trouble of all items, so DatabaseUnavailable is raised.
    Another error of the domain may be that of one item, as of a job whose folder is spoilt, or of
    all, as of a storage that does not answer: this takes long, and then the rest is not tried.
    """
    try:
        return await store(items)
    except DatabaseUnavailable:
        raise
    except Exception as error:
        if len(items) == 1:
            return [error]
        logger.warning(
            "%d items are stored one by one, since together they fail: %r", len(items), error
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
