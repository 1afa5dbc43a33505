"""Replies of an attempt that can't be stored as they come, for what its ranks reported.

Each report is checked when it is decoded, so that this takes an error of ours. Yet an attempt whose
reply is asked for again for ever would keep its slots for ever, also when it is cancelled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from service.db.session import is_of_values
from service.ingest.attempt_results import Received
from service.ingest.supervisor_frames import is_from_supervisor

TRIES = 3
"""Times that a reply fails before it is stored without the ranks' reports, and as many more before
without any."""


@dataclass
class Leniency:
    """Takes out of the replies of one attempt the reports that keep them from being stored."""

    _failures: int = 0
    _why: str = ""

    def note(self, error: Exception) -> None:
        """A reply could not be stored."""
        if is_of_values(error):
            self._failures += 1
            self._why = type(error).__name__

    def reset(self) -> None:
        """A reply was stored."""
        self._failures = 0

    def reduce(self, received: Received) -> Received:
        """The reply, without what can't be stored."""
        if self._failures < TRIES:
            return received
        frames = received.reply.frames
        keeps_some = self._failures < 2 * TRIES
        kept = tuple(frame for frame in frames if keeps_some and is_from_supervisor(frame))
        number = len(frames) - len(kept) + len(received.in_storage)
        message = (
            f"{number} reports of this attempt are left out: they can't be stored ({self._why}); "
            "the log of the service has the whole error"
        )
        reply = replace(received.reply, frames=kept)
        return replace(received, reply=reply, in_storage=(), left_out=message)
