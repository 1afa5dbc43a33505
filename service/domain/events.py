"""Names in the data of jobs' events that several modules write or read."""

from __future__ import annotations

ACTOR = "actor"
"""Key of the name of the user who caused an event."""
ANONYMOUS = "anonymous"
"""The actor on a server without tokens."""
SYNC_PLAN = "sync_plan"
"""Key of the choice of `sync: auto` in the event `submitted`."""
