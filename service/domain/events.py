"""Names in the data of jobs' events that several modules write or read."""

from __future__ import annotations

ACTOR = "actor"
"""Where the data of an event has the name of who caused it."""
ANONYMOUS = "anonymous"
"""The actor on a server without tokens."""
SYNC_PLAN = "sync_plan"
"""Where the data of the event `submitted` has the choice of `sync: auto`."""
