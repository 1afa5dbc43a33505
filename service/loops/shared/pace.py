"""The pace of loops that are woken often: many changes share a round."""

from __future__ import annotations

import asyncio

REST = 4.0
"""As a multiple of the time that a round took: all threads of a process share one interpreter, and
what a loop takes of it, submits and answers wait for."""
MAX_REST_S = 0.2


async def rest_after(began: float) -> None:
    """Rest for `REST` times as long as the round took that began at this time of the loop, and not
    for long: what comes meanwhile is found by the next one."""
    took_s = asyncio.get_running_loop().time() - began
    await asyncio.sleep(min(REST * took_s, MAX_REST_S))
