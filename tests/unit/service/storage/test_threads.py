"""Calls to hanging storage do not block other work."""

from __future__ import annotations

import asyncio
import threading

from service.storage.storage import THREADS, in_storage_thread


async def test_more_calls_that_hang_than_there_are_threads_hold_up_no_other_work() -> None:
    answers = threading.Event()
    calls = [asyncio.ensure_future(in_storage_thread(answers.wait)) for _ in range(2 * THREADS)]
    try:
        assert await asyncio.to_thread(int, "7") == 7
        assert not any(call.done() for call in calls)
    finally:
        answers.set()
    assert all(await asyncio.gather(*calls))
