"""The answer about a job, kept until the job changes.

Most requests to a training service ask for the state of a job, and most answers are the same as
the one before. On SQLite one process does all the writing, so it knows of every change the moment
it is committed: there an answer is kept, and never a stale one given. On PostgreSQL other processes
write, too, and every answer comes from the database.
"""

from __future__ import annotations

import threading

from sqlalchemy.orm import Session

from dray import views
from service.db.repositories import jobs as repository
from service.db.session import Database
from service.db.types import storable
from service.jobs import serializers
from service.jobs.service import not_found

MAX_ANSWERS = 4096
"""Answers that are kept; the oldest goes first."""


def _present(session: Session, job_id: str) -> views.Job:
    """NotFound if there is no such job."""
    row = repository.status(session, job_id) if storable(job_id) else None
    if row is None:
        raise not_found(job_id)
    return serializers.status(row)


class StatusCache:
    """The answers of one process. `peek` and `read` may be called from any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._answers: dict[str, bytes] = {}
        self._changes = 0
        """Counts commits, so that an answer that was read before one is not kept after it."""
        if database.is_sqlite:
            database.on_commit(self._forget)

    def peek(self, job_id: str) -> bytes | None:
        """The job's view as JSON if it is kept."""
        return self._answers.get(job_id)

    async def read(self, job_id: str) -> bytes:
        """The same from the database. NotFound if there is no such job."""
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
        """A commit that says which jobs it changed leaves the answers of the others."""
        with self._lock:
            self._changes += 1
            if changed is None:
                self._answers.clear()
                return
            for job_id in changed:
                self._answers.pop(job_id, None)
