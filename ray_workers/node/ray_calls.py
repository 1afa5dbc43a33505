"""Waiting for Ray's answers, with a limit each: a process that is stopped never answers."""

from __future__ import annotations

import asyncio
from typing import Any


async def result_within(limit_s: float, ref: Any) -> Any:
    """What a remote call answers; TimeoutError when it takes longer."""
    async with asyncio.timeout(limit_s):
        return await ref
