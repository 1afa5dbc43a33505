"""Use cases of fine-tuning jobs that are created with OpenAI's protocol."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from sqlalchemy.orm import Session

from dray import views
from dray.spec import JobSpec
from service.db.models import JobRow
from service.db.repositories.submission import tuning_requests as repository
from service.db.session import Database
from service.db.types import storable
from service.jobs import serializers
from service.jobs.deletions import not_found
from service.jobs.idempotency import IdempotencyKey, earlier_job
from service.jobs.service import Jobs, NewJob, found
from service.lifecycle.transitions import remark

MAX_BETWEEN_TRIES: Final = timedelta(days=1)
"""Maximum time between two tries of a request."""


@dataclass(frozen=True)
class TuningJob:
    job: views.Job
    request: dict[str, Any]
    """The fields of the request that responses repeat."""


class TuningRequests:
    """The use cases."""

    def __init__(self, database: Database, jobs: Jobs) -> None:
        self._database = database
        self._jobs = jobs

    async def key(
        self, owner: str, fingerprint: str, *, repeats_within: timedelta | None
    ) -> IdempotencyKey:
        """Return the idempotency key of a request whose client sends no key. fingerprint: of the
        body. repeats_within: the maximum time since the previous try of the request; None for a
        first try, which always gets a new key."""
        new_key = f"openai-{uuid.uuid4()}"

        def work(session: Session) -> str:
            now = self._database.time(session)
            within = repeats_within
            since = None if within is None else now - min(within, MAX_BETWEEN_TRIES)
            return repository.key_of(session, owner, fingerprint, new_key, now, since)

        return IdempotencyKey(await self._database.write(work), fingerprint)

    async def earlier(self, owner: str, idempotency: IdempotencyKey) -> TuningJob | None:
        """Return the job that an earlier request with this key has created; None if there is none.
        Raises IdempotencyMismatch if the key was used for another request."""
        job_id = await self._database.read(lambda s: earlier_job(s, owner, idempotency))
        return None if job_id is None else await self.get(job_id)

    async def create(
        self,
        spec: JobSpec,
        request: dict[str, Any],
        notes: Sequence[str],
        owner: str,
        actor: str,
        idempotency: IdempotencyKey | None = None,
    ) -> TuningJob:
        """Submit a job with its request, and return both. Each note becomes an event. If the key
        was used before, return the job and the request of the earlier call. Raises the errors of a
        submission."""

        def store(session: Session, new: NewJob) -> JobRow:
            row = self._jobs.store(session, new)
            stored = found(session, row.id, lock=True)
            repository.insert(session, row.id, owner, request)
            for note in notes:
                remark(
                    session,
                    stored,
                    type_="openai",
                    code="ignored_option",
                    message=note,
                    now=new.now,
                )
            return row

        job, is_created = await self._jobs.submit(
            spec, owner=owner, actor=actor, store=store, idempotency=idempotency
        )
        return TuningJob(job, request) if is_created else await self.get(job.id)

    async def get(self, job_id: str) -> TuningJob:
        """Return a job with its request. Raises NotFound if the job does not exist, or was created
        in another way."""

        def work(session: Session) -> TuningJob:
            row = found(session, job_id)
            request = repository.get(session, row.id)
            if request is None:
                raise not_found(job_id)
            return TuningJob(serializers.job(session, row), request)

        return await self._database.read(work)

    async def page(self, owner: str, after: str | None, limit: int) -> list[TuningJob]:
        """Return the owner's jobs that are older than the job `after`, newest first."""
        if after is not None and not storable(after):
            return []

        def work(session: Session) -> list[TuningJob]:
            return _jobs(session, repository.page(session, owner, after, limit))

        return await self._database.read(work)

    async def succeeded(self, owner: str, limit: int) -> list[TuningJob]:
        """Return the owner's jobs that have fine-tuned a model, newest first."""

        def work(session: Session) -> list[TuningJob]:
            return _jobs(session, repository.succeeded(session, owner, limit))

        return await self._database.read(work)


def _jobs(session: Session, rows: Sequence[tuple[JobRow, dict[str, Any]]]) -> list[TuningJob]:
    jobs = serializers.jobs(session, [row for row, _ in rows])
    return [TuningJob(job, request) for job, (_, request) in zip(jobs, rows, strict=True)]
