"""Calls of Ray: waiting for an answer within a limit, and their errors in a line."""

from __future__ import annotations

import asyncio
import re
from typing import Any


async def result_within(limit_s: float, ref: Any) -> Any:
    """The answer of a remote call; TimeoutError when it takes longer: a stopped process never
    answers."""
    async with asyncio.timeout(limit_s):
        return await ref


def brief(error: BaseException) -> str:
    """The last line of an error that has words, without the module of the error's class: Ray's
    messages hold whole remote tracebacks."""
    lines = [line for line in str(error).splitlines() if re.search(r"\w", line)]
    if not lines:
        return type(error).__name__
    return re.sub(r"^(?:\w+\.)+(?=\w+: )", "", lines[-1].strip())
