"""Use cases for the owner of a federated job: inviting clients outside the cluster."""

from __future__ import annotations

from sqlalchemy.orm import Session

from dray import views
from dray.views import JobState
from service.db.models import JobRow
from service.db.repositories import federation as repository
from service.db.session import Database, touch
from service.domain.errors import ClientNotFound, JobFinished, NotFederated, TooManyClients
from service.federation.client_rounds import names_of_sent
from service.federation.tokens import digest_of, new_token
from service.ingest import open_rounds
from service.jobs.service import found


class Invitations:
    """Invitations of clients. Each client has a number and a token. Only the token's hash is
    stored."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def invite(self, job_id: str, count: int, *, by: str) -> views.InvitationPage:
        """Create tokens for `count` more clients. Raises TooManyClients if the document doesn't
        allow that many."""
        tokens = [new_token() for _ in range(count)]  # outside the transaction
        digests = [digest_of(token) for token in tokens]

        def work(session: Session) -> list[int]:
            touch(session)
            job = _federated(session, job_id)
            if JobState(job.state).is_terminal:
                raise JobFinished(f"job {job_id} is {job.state}: it will have no more rounds")
            taken = repository.client_numbers(session, job_id)
            most = job.spec["federated"]["clients"]
            free = [number for number in range(most) if number not in taken][:count]
            if len(free) < count:
                raise TooManyClients(
                    f"federated.clients is {most}, and {len(taken)} clients have already been "
                    "invited",
                    hint=f"`dray federate revoke {job_id} CLIENT` removes a client",
                )
            now = self._database.time(session)
            common = {"job_id": job_id, "invited_by": by, "created_at": now, "num_sent": 0}
            rows = [
                {"token_sha256": digest, "number": number, **common}
                for digest, number in zip(digests, free, strict=True)
            ]
            repository.add_clients(session, rows)
            return free

        numbers = await self._database.write(work)
        return views.InvitationPage(
            items=[
                views.Invitation(client=number, token=token)
                for number, token in zip(numbers, tokens, strict=True)
            ]
        )

    async def clients(self, job_id: str) -> views.FederatedClientPage:
        def work(session: Session) -> views.FederatedClientPage:
            job = _federated(session, job_id, lock=False)
            rows = repository.clients(session, job_id)
            items = [
                views.FederatedClient(
                    client=row.number,
                    invited_by=row.invited_by,
                    created_at=row.created_at,
                    joined_at=row.joined_at,
                    sent_at=row.sent_at,
                    num_sent=row.num_sent,
                )
                for row in rows
            ]
            newest = repository.newest_round(session, job_id)
            if newest is None:
                return views.FederatedClientPage(items=items)
            return views.FederatedClientPage(
                items=items,
                round=newest.number,
                is_open=newest.is_open,
                closes_at=newest.closes_at,
                quorum=newest.quorum,
                num_sent=sum(row.sent_round in names_of_sent(newest.name) for row in rows),
                missing=open_rounds.missing(session, job, newest) if newest.is_open else [],
            )

        return await self._database.read(work)

    async def revoke(self, job_id: str, number: int) -> None:
        """Revoke the client's token."""

        def work(session: Session) -> None:
            touch(session)
            _federated(session, job_id)
            if not repository.remove_client(session, job_id, number):
                raise ClientNotFound(
                    f"job {job_id} has no client {number}",
                    hint=f"`dray federate clients {job_id}` shows the invited clients",
                )

        await self._database.write(work)


def _federated(session: Session, job_id: str, *, lock: bool = True) -> JobRow:
    """Return the job. Raises NotFederated unless the job has clients outside the cluster."""
    job = found(session, job_id, lock=lock)
    if (job.spec.get("federated") or {}).get("http") is None:
        raise NotFederated(
            f"job {job_id} has no clients outside of the cluster",
            hint="set `federated: {http: {}}` in the job document",
        )
    return job
