"""Waiting for Ray's answers within a limit: a stopped process never answers."""

from __future__ import annotations

import asyncio
from typing import Any


async def result_within(limit_s: float, ref: Any) -> Any:
    """The answer of a remote call; TimeoutError when it takes longer."""
    async with asyncio.timeout(limit_s):
        return await ref
