"""SQL for the rounds of federated jobs and for their clients outside the cluster."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import Row, Select, bindparam, delete, insert, or_, select, update
from sqlalchemy.orm import Session

from service.db.models import FederatedClientRow, FederatedRoundRow, JobRow


def add_clients(session: Session, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert clients. `rows` contains the columns of each client."""
    session.execute(insert(FederatedClientRow), rows)


def client_numbers(session: Session, job_id: str) -> set[int]:
    row = FederatedClientRow
    return set(session.scalars(select(row.number).where(row.job_id == job_id)))


def clients(session: Session, job_id: str) -> Sequence[FederatedClientRow]:
    row = FederatedClientRow
    query = select(row).where(row.job_id == job_id).order_by(row.number)
    return session.scalars(query).all()


def remove_client(session: Session, job_id: str, number: int) -> bool:
    """Remove a client. Returns False if the client does not exist."""
    row = FederatedClientRow
    query = delete(row).where(row.job_id == job_id, row.number == number).returning(row.number)
    return session.scalar(query.execution_options(synchronize_session=False)) is not None


def standing(session: Session, job_id: str, token_sha256: str) -> Row[Any] | None:
    """Return the state of a client as (client, sent_round, sent_sha256, joined_at, state,
    job_attempt, and the columns of the job's latest round).

    The columns of the round are None if there has been no round. Returns None if the job has no
    client with this token.
    """
    values = {"job_id": job_id, "token": token_sha256}
    return session.connection().execute(_standing(), values).first()


@cache
def _standing() -> Select[Any]:
    client, job = FederatedClientRow.__table__.c, JobRow.__table__.c
    rounds = FederatedRoundRow.__table__
    query = select(
        client.number.label("client"),
        *(client.sent_round, client.sent_sha256, client.joined_at),
        *(job.state, job.attempt.label("job_attempt")),
        *(column for column in rounds.c if column.name != "job_id"),
    )
    return (
        query.join_from(FederatedClientRow.__table__, JobRow.__table__, client.job_id == job.id)
        .outerjoin(rounds, rounds.c.job_id == job.id)
        .where(
            client.token_sha256 == bindparam("token"),
            client.job_id == bindparam("job_id"),
            job.deleted_at.is_(None),
        )
    )


def note_joined(session: Session, token_sha256: str, now: datetime) -> None:
    row = FederatedClientRow
    query = update(row).where(row.token_sha256 == token_sha256, row.joined_at.is_(None))
    session.execute(query.values(joined_at=now).execution_options(synchronize_session=False))


def note_sent(
    session: Session,
    token_sha256: str,
    sent_name: str,
    sha256: str,
    now: datetime,
    *,
    is_update: bool,
) -> bool:
    """Record a client's update for a round, or its response in a phase of secure aggregation.

    Returns False if the client has already sent this update or response.
    """
    row = FederatedClientRow
    counted = {"sent_at": now, "num_sent": row.num_sent + 1} if is_update else {}
    query = (
        update(row)
        .where(
            row.token_sha256 == token_sha256,
            or_(row.sent_round.is_(None), row.sent_round != sent_name),
        )
        .values(sent_round=sent_name, sent_sha256=sha256, **counted)
        .returning(row.number)
    )
    return session.scalar(query.execution_options(synchronize_session=False)) is not None


def forget_sent(session: Session, job_id: str, round_name: str, received: Collection[int]) -> None:
    """Allow clients to resend updates that the storage has not received."""
    row, kept = FederatedClientRow, set(received)
    query = select(row).where(row.job_id == job_id, row.sent_round == round_name)
    for client in session.scalars(query):
        if client.number not in kept:
            client.sent_round = None
    session.flush()


def senders(session: Session, job_id: str, sent_name: str) -> set[int]:
    """Return the client number of each client whose latest response has this name."""
    row = FederatedClientRow
    query = select(row.number).where(row.job_id == job_id, row.sent_round == sent_name)
    return set(session.scalars(query))


def newest_round(session: Session, job_id: str) -> FederatedRoundRow | None:
    return session.get(FederatedRoundRow, job_id)


def put_round(session: Session, row: FederatedRoundRow) -> None:
    session.merge(row)
    session.flush()
