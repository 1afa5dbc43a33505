"""Work that is done once on a node while several jobs may wait for it, such as building an
environment.

Each piece of work is done once, no matter how many jobs ask for its state. After a failure,
requests return this failure for a while before the work is tried again.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from ray_workers.shared.node_needs import BuildState

FIRST_ANSWER_S = 2.0
"""Seconds for which a request waits for running work. Most work is finished within this time."""
FAILURE_KEPT_S = 10.0
"""Seconds for which a recorded final failure is returned before the work is tried again."""
RETRY_PAUSES_S = (2.0, 5.0, 15.0, 60.0)
"""Seconds between retries of work that failed because of a server or a disk."""


KNOWN_S = 600.0
"""Seconds for which a failure is remembered if there are no further requests."""
WANTED_S: Final = 60.0
"""Seconds for which work continues if there are no further requests, for example while the service
restarts."""

Owner = str | None


class NotDone(Exception):
    """The work failed. UNREACHABLE means that a server or a disk is at fault, so that another try
    might succeed."""

    def __init__(
        self, message: str, state: BuildState = BuildState.FAILED, *, most_tries: int = 1
    ) -> None:
        """`most_tries` is the number of failures after which the work's state is `state`. After
        fewer failures, the state is UNREACHABLE."""
        super().__init__(message)
        self._state = state
        self._most_tries = most_tries

    def state_after(self, tries: int) -> BuildState:
        """Return the state after this many failed tries."""
        return BuildState.UNREACHABLE if tries < self._most_tries else self._state


class Abandoned(Exception):
    """The work was stopped because no job needs it. This does not count as a failure."""


@dataclass(frozen=True)
class Standing:
    """The state of a piece of work."""

    state: BuildState
    message: str
    """Why the work failed."""


@dataclass
class _Failure:
    standing: Standing
    tries: int
    due: float
    """When another try may begin, on the clock of `time.monotonic`."""


class SharedWork:
    """All work of one kind, by key. Use each instance from only one event loop."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Standing]] = {}
        self._failed: dict[str, _Failure] = {}

    async def standing(self, key: str, work: Callable[[], Awaitable[None]]) -> Standing:
        """Return the state of the work, and start the work if necessary. Idempotent.

        `work` raises NotDone if it fails, and Abandoned if it was stopped. After any other error,
        the work is tried again.
        """
        self._forget()
        failure = self._failed.get(key)
        if failure is not None and time.monotonic() < failure.due:
            return failure.standing
        if key not in self._tasks:
            self._tasks[key] = asyncio.ensure_future(self._run(key, work))
        task = self._tasks[key]
        await asyncio.wait({task}, timeout=FIRST_ANSWER_S)
        return task.result() if task.done() else Standing(BuildState.BUILDING, "")

    async def _run(self, key: str, work: Callable[[], Awaitable[None]]) -> Standing:
        try:
            await work()
        except Abandoned:
            return Standing(BuildState.BUILDING, "")  # the next request starts another try
        except NotDone as error:
            failure = error
        except Exception as error:  # a full disk, another user's folder
            traceback.print_exc()
            failure = NotDone(f"{type(error).__name__}: {error}", BuildState.UNREACHABLE)
        else:
            self._failed.pop(key, None)
            return Standing(BuildState.READY, "")
        finally:
            self._tasks.pop(key, None)
        before = self._failed.get(key)
        tries = 1 if before is None else before.tries + 1
        standing = Standing(failure.state_after(tries), str(failure))
        pauses = RETRY_PAUSES_S if standing.state is BuildState.UNREACHABLE else (FAILURE_KEPT_S,)
        pause_s = pauses[min(tries, len(pauses)) - 1]
        self._failed[key] = _Failure(standing, tries, time.monotonic() + pause_s)
        return standing

    def _forget(self) -> None:
        long_ago = time.monotonic() - KNOWN_S
        self._failed = {key: one for key, one in self._failed.items() if one.due > long_ago}


class WantedWork:
    """For each piece of work, the users whose jobs need it. Use each instance in only one event
    loop, except for `is_wanted` and `owners`, which can be called from any thread."""

    def __init__(self) -> None:
        self._asked: dict[str, dict[Owner, float]] = {}
        """When each user last asked for each piece of work (`time.monotonic`), keyed by work and
        user."""

    def want(self, key: str, owner: Owner) -> None:
        self._asked = {one: asked for one, asked in self._asked.items() if self.is_wanted(one)}
        self._asked.setdefault(key, {})[owner] = time.monotonic()

    def forget(self, key: str, owner: Owner) -> None:
        """Record that none of the user's jobs needs the work any more."""
        self._asked.get(key, {}).pop(owner, None)

    def is_wanted(self, key: str) -> bool:
        return bool(self.owners(key))

    def owners(self, key: str) -> list[Owner]:
        """Return the users who need the work, in the order of their first requests."""
        now = time.monotonic()
        asked = tuple(self._asked.get(key, {}).items())
        return [owner for owner, at in asked if now - at < WANTED_S]
