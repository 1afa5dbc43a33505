"""Work of a node for which several jobs may wait, such as an environment that is being built.

Each piece is done once, however many ask; whoever asks learns how far it is. A failure is
answered for a while before another try.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ray_workers.shared.node_needs import BuildState

FIRST_ANSWER_S = 2.0
"""How long a question waits for work that is under way: most is over by then."""
FAILURE_KEPT_S = 10.0
"""How long a failure that is final is answered from memory before another try."""
RETRY_PAUSES_S = (2.0, 5.0, 15.0, 60.0)
"""Between tries of work that met a server or a disk at fault."""


class NotDone(Exception):
    """The work failed; `state` says whether another try may help."""

    def __init__(self, message: str, state: BuildState = BuildState.FAILED) -> None:
        super().__init__(message)
        self.state = state


@dataclass(frozen=True)
class Standing:
    """How far a piece of work is."""

    state: BuildState
    message: str
    """Why it failed."""


class SharedWork:
    """The work of one kind, by key. For one event loop."""

    def __init__(self, limit: int) -> None:
        """limit: how many pieces are worked on at a time."""
        self._tasks: dict[str, asyncio.Task[NotDone | None]] = {}
        self._failed: dict[str, tuple[NotDone, float]] = {}
        """The last failure of a key, and when another try may begin, by `time.monotonic`."""
        self._tries: dict[str, int] = {}
        self._working = asyncio.Semaphore(limit)

    async def standing(self, key: str, work: Callable[[], Awaitable[None]]) -> Standing:
        """How far the work is; begins it if nobody has. Harmless to repeat.

        work: raises NotDone where it fails; of other errors another try is taken to help.
        """
        failure, due = self._failed.get(key, (None, 0.0))
        if failure is not None and time.monotonic() < due:
            return Standing(failure.state, str(failure))
        if key not in self._tasks:
            self._tasks[key] = asyncio.ensure_future(self._run(key, work))
        task = self._tasks[key]
        await asyncio.wait({task}, timeout=FIRST_ANSWER_S)
        if not task.done():
            return Standing(BuildState.BUILDING, "")
        failure = task.result()
        if failure is not None:
            return Standing(failure.state, str(failure))
        return Standing(BuildState.READY, "")

    async def _run(self, key: str, work: Callable[[], Awaitable[None]]) -> NotDone | None:
        try:
            async with self._working:
                await work()
        except NotDone as error:
            failure = error
        except Exception as error:  # a full disk, a folder of another user
            traceback.print_exc()
            failure = NotDone(f"{type(error).__name__}: {error}", BuildState.UNREACHABLE)
        else:
            self._failed.pop(key, None)
            self._tries.pop(key, None)
            return None
        finally:
            self._tasks.pop(key, None)
        tries = self._tries[key] = self._tries.get(key, 0) + 1
        is_final = failure.state is BuildState.FAILED
        last = len(RETRY_PAUSES_S)
        pause_s = FAILURE_KEPT_S if is_final else RETRY_PAUSES_S[min(tries, last) - 1]
        self._failed[key] = (failure, time.monotonic() + pause_s)
        return failure
