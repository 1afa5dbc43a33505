"""The work of a node that jobs want, which the service shows by asking again and again."""

from __future__ import annotations

import time
from typing import Final

WANTED_S: Final = 60.0
"""How long work goes on without a question about it, as while the service is started again."""

Owner = str | None


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
