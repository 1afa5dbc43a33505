"""Idempotency keys. A request with a key creates only one job or drill, regardless of how often the
request is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.orm import Session

from service.db.models import IdempotencyRow
from service.db.repositories.submission import idempotency as repository
from service.domain.errors import IdempotencyInFlight, IdempotencyMismatch


@dataclass(frozen=True)
class IdempotencyKey:
    """The caller's key for a request, and a hash of the request's canonical body."""

    key: str
    fingerprint: str
    caller: str | None = None
    """The user whose key it is; None if it is the owner of the job."""


class KeysInFlight:
    """The keys of first requests to which this process has not responded yet. Used by a single
    event loop.

    On PostgreSQL, an advisory lock also excludes other processes. On SQLite, there is only one
    process.
    """

    def __init__(self) -> None:
        self._held: set[tuple[str, str]] = set()

    @contextmanager
    def holding(self, owner: str, idempotency: IdempotencyKey | None) -> Iterator[None]:
        """Hold the key. Raises IdempotencyInFlight immediately if another request holds the key."""
        if idempotency is None:
            yield
            return
        held = (idempotency.caller or owner, idempotency.key)
        if held in self._held:
            raise _in_flight()
        self._held.add(held)
        try:
            yield
        finally:
            self._held.discard(held)


def reserve(
    session: Session,
    owner: str,
    idempotency: IdempotencyKey,
    job_id: str,
    now: datetime,
    *,
    drill_id: str | None = None,
) -> str | None:
    """Bind the key to the job (or its drill) that is about to be written. If the key is already
    bound, return the id of the job or drill to which it is bound. Raises IdempotencyMismatch if the
    key is bound to another request, and IdempotencyInFlight while another process is about to bind
    the key.
    """
    owner = idempotency.caller or owner
    if not repository.try_lock(session, _lock_number(owner, idempotency.key)):
        raise _in_flight()
    bound = repository.reserve(
        session,
        owner=owner,
        key=idempotency.key,
        fingerprint=idempotency.fingerprint,
        job_id=job_id,
        drill_id=drill_id,
        now=now,
    )
    return None if bound is None else _bound_to(bound, idempotency, is_drill=drill_id is not None)


def earlier_job(session: Session, owner: str, idempotency: IdempotencyKey) -> str | None:
    """Return the id of the job to which the key is bound; None if it is not bound. Raises
    IdempotencyMismatch if the key is bound to another request."""
    bound = repository.get(session, idempotency.caller or owner, idempotency.key)
    return None if bound is None else _bound_to(bound, idempotency)


def _bound_to(
    bound: IdempotencyRow, idempotency: IdempotencyKey, *, is_drill: bool = False
) -> str | None:
    if bound.fingerprint != idempotency.fingerprint:
        raise IdempotencyMismatch(
            "this Idempotency-Key was already used for another request",
            hint="use a new key for each request, and the same key only to repeat a request",
        )
    return bound.drill_id if is_drill else bound.job_id


def _lock_number(owner: str, key: str) -> int:
    """Return a signed 64-bit number for the key. After a collision, one client has to retry."""
    digest = hashlib.sha256(f"idempotency\0{owner}\0{key}".encode()).digest()
    return int.from_bytes(digest[:8], signed=True)


def _in_flight() -> IdempotencyInFlight:
    return IdempotencyInFlight(
        "a request with this Idempotency-Key is being processed",
        hint="repeat the request in a moment to get the response to the first request",
    )
