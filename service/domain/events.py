"""The data of events of jobs."""

from __future__ import annotations

ACTOR = "actor"
"""Where the data of an event has the name of who caused it."""
ANONYMOUS = "anonymous"
"""The actor on a server without tokens."""
