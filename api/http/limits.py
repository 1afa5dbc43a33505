"""Limits on the connections and requests of a server and of its callers."""

from __future__ import annotations

import resource
from collections import Counter
from dataclasses import dataclass

from api.problems import Refused
from service.config.settings import Settings

RESERVED_DESCRIPTORS = 512
"""Descriptors reserved for the database, files, pipes, and connections that will be refused."""
DESCRIPTORS = 1 << 16
"""Maximum number of descriptors to request. Some systems allow a billion descriptors, but some
programs iterate over all possible descriptors."""
SPARE = 32
"""Number of connections accepted above the limit, so that a refused caller can receive the 503."""


@dataclass(frozen=True)
class Limits:
    """Limits on the callers of one server."""

    connections: int = 2048
    per_client: int = 1024
    head_bytes: int = 64 << 10
    """Maximum size of the request line and headers, and of the framing of a chunked body."""
    num_headers: int = 128
    head_within_s: float = 20.0
    """Maximum number of seconds for the head of a request to arrive, counted from the opening of
    the connection for the first request, and from the first byte for later requests."""
    body_within_s: float = 60.0
    """Maximum number of seconds for a body to arrive, in addition to a second for each MiB."""
    send_within_s: float = 120.0
    """Maximum number of seconds for which a caller can pause reading its response."""
    linger_s: float = 2.0
    """Seconds for which the server continues to read from a refused caller. If the socket were
    closed with unread bytes, the connection would be reset before the response arrived."""
    keep_alive_s: int = 75
    """Seconds after which an idle connection is closed. This is longer than the pause between two
    polls, so that polls reuse a connection."""

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        """Return the limits in the settings, reduced to fit this process's descriptor limit."""
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors == resource.RLIM_INFINITY:
            descriptors = DESCRIPTORS
        available = max(descriptors - RESERVED_DESCRIPTORS, SPARE)
        connections = min(settings.max_connections, available)
        per_client = settings.max_connections_per_client or max(connections // 2, 1)
        return cls(connections=connections, per_client=min(per_client, connections))


def raise_descriptor_limit() -> None:
    """Raise the soft limit on open files of this process and its children to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Admission:
    """Counts the requests in progress of one application, and refuses requests above the limit with
    503."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num = 0
        self._of_client: Counter[str] = Counter()

    def enter(self, client: str) -> Refused | None:
        """Count a request. Returns an error if too many requests are already in progress."""
        self._num += 1
        self._of_client[client] += 1
        if self._num > self._limits.connections:
            detail = f"the limit is {self._limits.connections} concurrent requests"
        elif self._of_client[client] > self._limits.per_client:
            detail = f"the limit is {self._limits.per_client} concurrent requests per client"
        else:
            return None
        hint = "try again in a moment, or raise DRAY_MAX_CONNECTIONS[_PER_CLIENT] and the limit on "
        return Refused("unavailable", detail, None, hint + "open files", {"Connection": "close"})

    def leave(self, client: str) -> None:
        self._num -= 1
        self._of_client[client] -= 1
        if not self._of_client[client]:
            del self._of_client[client]
