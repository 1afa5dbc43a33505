"""Links to files of jobs. Each link is valid for one download. Browsers need such links, because
they send no token with a download.

The hash of the link's secret is stored in SQL, so that any API process can serve the link, but the
link is served only once.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy.orm import Session

from dray import views
from dray.requests import DownloadRequest
from service.db.models import DownloadLinkRow
from service.db.repositories import storage as repository
from service.db.session import Database, touch
from service.domain.errors import DownloadLinkNotFound
from service.jobs.service import found

LIFETIME = timedelta(minutes=1)
"""The download must begin within this time after the link is created."""


@dataclass(frozen=True)
class UsedLink:
    """The target of a link that has been used, and the user who requested the link."""

    job_id: str
    wanted: DownloadRequest
    owner: str
    token_id: str | None


class DownloadLinks:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(
        self, job_id: str, wanted: DownloadRequest, *, owner: str, token_id: str | None
    ) -> views.DownloadLink:
        """Return a link for a caller with this token. Raises NotFound if the job does not exist."""
        secret = secrets.token_urlsafe(32)

        def work(session: Session) -> views.DownloadLink:
            touch(session)
            found(session, job_id, lock=True)
            now = self._database.time(session)
            repository.delete_expired(session, now)
            row = DownloadLinkRow(
                secret_sha256=_digest(secret),
                job_id=job_id,
                owner=owner,
                token_id=token_id,
                target=wanted.model_dump(mode="json"),
                expires_at=now + LIFETIME,
            )
            repository.add(session, row)
            return views.DownloadLink(url=f"/v1/downloads/{secret}", expires_at=row.expires_at)

        return await self._database.write(work)

    async def use(self, secret: str) -> UsedLink:
        """Use up the link. Raises DownloadLinkNotFound if the link was used before, is too old, or
        never existed."""

        def work(session: Session) -> UsedLink:
            touch(session)
            row = repository.take(session, _digest(secret))
            if row is None or row.expires_at <= self._database.time(session):
                raise no_such_link()
            wanted = DownloadRequest.model_validate(row.target)
            return UsedLink(row.job_id, wanted, row.owner, row.token_id)

        return await self._database.write(work)


def no_such_link() -> DownloadLinkNotFound:
    return DownloadLinkNotFound(
        "this link no longer works: it has been used, is older than "
        f"{LIFETIME.total_seconds():.0f} s, or its token is no longer valid",
        hint="request another link with POST /v1/jobs/ID/downloads, or press the button again",
    )


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
