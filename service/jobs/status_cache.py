"""A cache of responses about jobs. A response remains cached until its job changes.

Most requests to a training service ask for the state of a job, and most responses equal the
previous one. On SQLite, one process makes all writes. This process caches responses, and removes a
response when a change of the job is committed, so it never returns a stale response. On PostgreSQL,
other processes write too, so every response is read from the database.
"""

from __future__ import annotations

import threading

from sqlalchemy.orm import Session

from dray import views
from service.db.repositories import jobs as repository
from service.db.session import Database
from service.db.types import storable
from service.jobs import serializers
from service.jobs.deletions import not_found

MAX_ANSWERS = 4096
"""Maximum number of cached responses; the oldest is dropped first."""


def _present(session: Session, job_id: str) -> views.Job:
    """Return the job's view. Raises NotFound if the job does not exist."""
    row = repository.status(session, job_id) if storable(job_id) else None
    if row is None:
        raise not_found(job_id)
    return serializers.status(session, row)


class StatusCache:
    """The cached responses of one process. `peek` and `read` can be called from any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._answers: dict[str, bytes] = {}
        self._changes = 0
        """Number of commits. A response that was read before a commit is not cached after that
        commit."""
        if database.is_sqlite:
            database.on_commit(self._forget)

    def peek(self, job_id: str) -> bytes | None:
        """Return the job's view as JSON if it is cached."""
        return self._answers.get(job_id)

    async def read(self, job_id: str) -> bytes:
        """Read the job's view as JSON from the database. Raises NotFound if the job does not
        exist."""
        changes = self._changes
        view = await self._database.look_up(lambda s: _present(s, job_id))
        answer = view.model_dump_json().encode()
        if self._database.is_sqlite:
            with self._lock:
                if self._changes == changes:
                    self._answers[job_id] = answer
                    if len(self._answers) > MAX_ANSWERS:
                        del self._answers[next(iter(self._answers))]
        return answer

    def _forget(self, changed: frozenset[str] | None) -> None:
        """Drop the cached responses about the jobs that a commit changed. If `changed` is None, it
        is unknown which jobs changed, and all responses are dropped."""
        with self._lock:
            self._changes += 1
            if changed is None:
                self._answers.clear()
                return
            for job_id in changed:
                self._answers.pop(job_id, None)
