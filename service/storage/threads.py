"""Threads for calls of the storage, which may hang: they use up no threads of other work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 16
_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="dray-storage")


async def in_storage_thread(work: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> T:
    """The result of `work`, which reads or writes the storage. As `asyncio.to_thread`, whose few
    threads also parse bodies, start Ray and compute forecasts."""
    call = partial(work, *args, **options)
    return await asyncio.get_running_loop().run_in_executor(_threads, call)
