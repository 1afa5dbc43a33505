"""Browsers that stay signed in.

The secret of a session's cookie permits reading, and the session's write key is needed in addition
for changes. Both are random, and only their hashes are stored in SQL, so that every API process
recognises the browser. The session ends in all processes as soon as one process deletes its row.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from service.db.models import BrowserSessionRow
from service.db.repositories import browser_sessions as repository
from service.db.repositories.scheduling.cluster import ensure_deployment
from service.db.session import Database, touch

LIFETIME = timedelta(days=30)
MOST = 100
"""Maximum number of sessions of one user. Another sign-in ends the oldest session."""


@dataclass(frozen=True)
class NewSession:
    """A session that was opened for a user, with its secrets."""

    owner: str
    cookie: str
    write_key: str
    expires_at: datetime

    @property
    def lasts_s(self) -> int:
        return int(LIFETIME.total_seconds())


@dataclass(frozen=True)
class BrowserSession:
    """A session that has not expired."""

    owner: str
    token_id: str
    key_sha256: str

    def has_key(self, write_key: str) -> bool:
        return hmac.compare_digest(_digest(write_key), self.key_sha256)


class BrowserSessions:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._deployment_id: str | None = None

    async def deployment_id(self) -> str:
        """Return the id of the deployment. All services over one database return the same id."""
        if self._deployment_id is None:
            self._deployment_id = await self._database.write(self._ensured)
        return self._deployment_id

    def _ensured(self, session: Session) -> str:
        touch(session)
        return ensure_deployment(session, self._database.time(session))

    async def open(self, owner: str, token_id: str, replaced: Collection[str]) -> NewSession:
        """Open a session for a user with this token. `replaced` are the cookies that the browser
        already has; their sessions end."""
        cookie, write_key = secrets.token_urlsafe(32), secrets.token_urlsafe(32)

        def work(session: Session) -> NewSession:
            touch(session)
            now = self._database.time(session)
            repository.delete_expired(session, now)
            repository.remove(session, _digests(replaced))
            row = BrowserSessionRow(
                cookie_sha256=_digest(cookie),
                key_sha256=_digest(write_key),
                owner=owner,
                token_id=token_id,
                created_at=now,
                expires_at=now + LIFETIME,
            )
            repository.add(session, row)
            session.flush()
            repository.remove_of(session, owner, but_newest=MOST)
            return NewSession(owner, cookie, write_key, row.expires_at)

        return await self._database.write(work)

    async def find(self, cookies: Collection[str]) -> list[BrowserSession]:
        """Return the sessions with these cookies that have not expired."""
        digests = _digests(cookies)
        rows = await self._database.look_up(lambda session: repository.find(session, digests))
        # A clock that differs from the database's by minutes doesn't matter to a session of weeks,
        # and the database's time would take another statement.
        now = self._database.clock()
        return [
            BrowserSession(row.owner, row.token_id, row.key_sha256)
            for row in rows
            if row.expires_at > now
        ]

    async def close(self, cookies: Collection[str]) -> None:
        """End the sessions with these cookies."""
        digests = _digests(cookies)

        def work(session: Session) -> None:
            touch(session)
            repository.remove(session, digests)

        await self._database.write(work)

    async def close_all(self, owner: str) -> None:
        """End all sessions of a user."""

        def work(session: Session) -> None:
            touch(session)
            repository.remove_of(session, owner)

        await self._database.write(work)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def _digests(secrets: Collection[str]) -> list[str]:
    return [_digest(secret) for secret in secrets]
