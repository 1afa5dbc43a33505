"""Work of a node for which several jobs may wait, such as an environment that is being built.

Each piece is done once, however many jobs ask how far it is. A failure is
answered for a while before another try.
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
"""How long a question waits for work that is under way: most is over by then."""
FAILURE_KEPT_S = 10.0
"""How long a failure that is final is answered from memory before another try."""
RETRY_PAUSES_S = (2.0, 5.0, 15.0, 60.0)
"""Between tries of work that met a server or a disk at fault."""


KNOWN_S = 600.0
"""How long a failure is remembered that nobody asks about."""
WANTED_S: Final = 60.0
"""How long work goes on without a question about it, as while the service is started again."""

Owner = str | None


class NotDone(Exception):
    """The work failed. UNREACHABLE: a server or a disk is at fault, and another try may help."""

    def __init__(
        self, message: str, state: BuildState = BuildState.FAILED, *, most_tries: int = 1
    ) -> None:
        """most_tries: before it is FAILED."""
        super().__init__(message)
        self._state = state
        self._most_tries = most_tries

    def state_after(self, tries: int) -> BuildState:
        """FAILED, or UNREACHABLE where another try may help, once so many have failed."""
        return BuildState.UNREACHABLE if tries < self._most_tries else self._state


class Abandoned(Exception):
    """The work was ended because no job needs it any more; it fails for none."""


@dataclass(frozen=True)
class Standing:
    """How far a piece of work is."""

    state: BuildState
    message: str
    """Why it failed."""


@dataclass
class _Failure:
    standing: Standing
    tries: int
    due: float
    """When another try may begin, by `time.monotonic`."""


class SharedWork:
    """The work of one kind, by key. For one event loop."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Standing]] = {}
        self._failed: dict[str, _Failure] = {}

    async def standing(self, key: str, work: Callable[[], Awaitable[None]]) -> Standing:
        """How far the work is; begins it if nobody has. Harmless to repeat.

        work: raises NotDone where it fails, and Abandoned where it was ended; of other errors
        another try is taken to help.
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
            return Standing(BuildState.BUILDING, "")  # for a job that asks since, with the next try
        except NotDone as error:
            failure = error
        except Exception as error:  # a full disk, a folder of another user
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
    """The users that want each piece of work, by key. For one event loop; `is_wanted` and `owners`
    for any thread."""

    def __init__(self) -> None:
        self._asked: dict[str, dict[Owner, float]] = {}
        """By key and user, when they asked last, by `time.monotonic`."""

    def want(self, key: str, owner: Owner) -> None:
        self._asked = {one: asked for one, asked in self._asked.items() if self.is_wanted(one)}
        self._asked.setdefault(key, {})[owner] = time.monotonic()

    def forget(self, key: str, owner: Owner) -> None:
        """None of the user's jobs needs it any more."""
        self._asked.get(key, {}).pop(owner, None)

    def is_wanted(self, key: str) -> bool:
        return bool(self.owners(key))

    def owners(self, key: str) -> list[Owner]:
        """The users that want it, who asked first before the others."""
        now = time.monotonic()
        asked = tuple(self._asked.get(key, {}).items())
        return [owner for owner, at in asked if now - at < WANTED_S]
