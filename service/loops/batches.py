"""Many items in one transaction, unless one of them spoils it for the others."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from service.domain.errors import DomainError

T = TypeVar("T")
R = TypeVar("R")

logger = logging.getLogger(__name__)


async def together_or_alone(
    items: Sequence[T], store: Callable[[Sequence[T]], Awaitable[Sequence[R]]]
) -> Sequence[R | Exception]:
    """Store all items at once; if that fails, each alone. Answers for each what `store` does, or
    why it could not be stored.

    An error of the domain, as of a database that does not answer, is that of all items and raised.
    """
    try:
        return await store(items)
    except DomainError:
        raise
    except Exception as error:
        if len(items) == 1:
            return [error]
        logger.warning(
            "%d items are stored one by one, since together they fail: %r", len(items), error
        )
    return [await _alone(item, store) for item in items]


async def _alone(item: T, store: Callable[[Sequence[T]], Awaitable[Sequence[R]]]) -> R | Exception:
    try:
        (stored,) = await store([item])
    except Exception as error:
        return error
    return stored
