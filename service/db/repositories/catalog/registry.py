"""SQL for the registry of models."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

from sqlalchemy import Row, Select, delete, func, select
from sqlalchemy.orm import Session

from dray.input.model_names import same_name
from service.db.models import AliasMoveRow, ModelAliasRow, ModelRow, ModelVersionRow
from service.db.repositories.bulk import CHUNK, in_chunks, insert_of


def get(session: Session, name: str, *, lock: bool = False) -> ModelRow | None:
    """Return the model with this name, unless it was deleted."""
    query = select(ModelRow).where(
        ModelRow.folded == same_name(name), ModelRow.deleted_at.is_(None)
    )
    return _one(session, query, lock=lock)


def claim(session: Session, name: str, owner: str, now: datetime) -> ModelRow:
    """Lock the model with this name, which is created if it does not exist or was deleted."""
    values = {"name": name, "owner": owner, "created_at": now}
    statement = insert_of(session)(ModelRow).values(
        folded=same_name(name), last_version=0, deleted_at=None, **values
    )
    session.execute(statement.on_conflict_do_nothing())
    row = _one(session, select(ModelRow).where(ModelRow.folded == same_name(name)), lock=True)
    assert row is not None
    if row.deleted_at is not None:
        row.name, row.owner, row.created_at, row.deleted_at = name, owner, now, None
    return row


def _one(session: Session, query: Select[ModelRow], *, lock: bool) -> ModelRow | None:
    if lock:
        query = query.with_for_update().execution_options(populate_existing=True)
    return session.scalar(query)


def page(session: Session, after: str, limit: int) -> Sequence[Row[ModelRow, int, int]]:
    """Return (model, number of versions, highest version) of models with versions, in the order of
    their names, after the folded name `after`."""
    version = ModelVersionRow
    named = (
        select(ModelRow.folded)
        .where(ModelRow.folded > after, ModelRow.deleted_at.is_(None))
        .order_by(ModelRow.folded)
        .limit(limit)
        .subquery()
    )
    query = (
        select(ModelRow, func.count(version.version), func.max(version.version))
        .join(named, named.c.folded == ModelRow.folded)
        .outerjoin(version, version.folded == ModelRow.folded)
        .group_by(ModelRow.folded)
        .order_by(ModelRow.folded)
    )
    return session.execute(query).all()


def totals(session: Session, row: ModelRow) -> tuple[int, int]:
    """Return the number of versions and the highest version; 0 if there are none."""
    version = ModelVersionRow.version
    query = select(func.count(version), func.max(version))
    number, highest = session.execute(query.where(ModelVersionRow.folded == row.folded)).one()
    return number, highest or 0


def aliases(session: Session, folded: Collection[str]) -> dict[str, dict[str, int]]:
    """Return the aliases of these models, sorted by name, keyed by the folded name of the model."""
    found: dict[str, dict[str, int]] = {one: {} for one in folded}
    row = ModelAliasRow
    for some in in_chunks(sorted(folded), CHUNK):
        query = select(row).where(row.folded.in_(some)).order_by(row.alias)
        for alias in session.scalars(query):
            found[alias.folded][alias.alias] = alias.version
    return found


def version(session: Session, row: ModelRow, number: int) -> ModelVersionRow | None:
    return session.get(ModelVersionRow, (row.folded, number), populate_existing=True)


def versions(
    session: Session, row: ModelRow, before: int | None, limit: int
) -> list[ModelVersionRow]:
    """Return versions with numbers below `before`, the highest first."""
    query = select(ModelVersionRow).where(ModelVersionRow.folded == row.folded)
    if before is not None:
        query = query.where(ModelVersionRow.version < before)
    return list(session.scalars(query.order_by(ModelVersionRow.version.desc()).limit(limit)))


def same(session: Session, row: ModelRow, job_id: str, step: int | None) -> ModelVersionRow | None:
    """Return the model's version of this result or checkpoint."""
    table = ModelVersionRow
    is_step = table.step.is_(None) if step is None else table.step == step
    return session.scalar(
        select(table).where(table.folded == row.folded, table.job_id == job_id, is_step)
    )


def alias(session: Session, row: ModelRow, name: str) -> int | None:
    """Return the version to which the alias refers."""
    found = session.get(ModelAliasRow, (row.folded, name), populate_existing=True)
    return None if found is None else found.version


def move(
    session: Session, row: ModelRow, name: str, to: int | None, now: datetime, by: str
) -> None:
    """Let an alias refer to the version `to`, or remove it, and record the change. The caller must
    have locked the model."""
    found = session.get(ModelAliasRow, (row.folded, name), populate_existing=True)
    before = None if found is None else found.version
    if before == to:
        return
    if found is None:
        session.add(ModelAliasRow(folded=row.folded, alias=name, version=to))
    elif to is None:
        session.delete(found)
    else:
        found.version = to
    session.add(
        AliasMoveRow(
            folded=row.folded,
            alias=name,
            from_version=before,
            to_version=to,
            moved_at=now,
            moved_by=by,
        )
    )
    session.flush()


def moves(session: Session, row: ModelRow, before: int | None, limit: int) -> list[AliasMoveRow]:
    """Return changes of aliases with numbers below `before`, the newest first."""
    query = select(AliasMoveRow).where(AliasMoveRow.folded == row.folded)
    if before is not None:
        query = query.where(AliasMoveRow.number < before)
    return list(session.scalars(query.order_by(AliasMoveRow.number.desc()).limit(limit)))


def remove_versions(session: Session, row: ModelRow) -> None:
    table = ModelVersionRow
    session.execute(
        delete(table).where(table.folded == row.folded).execution_options(synchronize_session=False)
    )


def results_of(session: Session, job_id: str) -> list[tuple[ModelRow, ModelVersionRow]]:
    """Return the versions that are the result of the job, with their models."""
    query = (
        select(ModelRow, ModelVersionRow)
        .join(ModelVersionRow, ModelVersionRow.folded == ModelRow.folded)
        .where(ModelVersionRow.job_id == job_id, ModelVersionRow.step.is_(None))
        .order_by(ModelRow.folded, ModelVersionRow.version)
    )
    return [(model, row) for model, row in session.execute(query)]


def registered(session: Session, job_ids: Collection[str]) -> Mapping[str, str]:
    """Return a version, such as `model://digits@3`, of each of these jobs that has one."""
    found: dict[str, str] = {}
    for some in in_chunks(sorted(job_ids), CHUNK):
        query = (
            select(ModelVersionRow.job_id, ModelRow.name, ModelVersionRow.version)
            .join(ModelRow, ModelRow.folded == ModelVersionRow.folded)
            .where(ModelVersionRow.job_id.in_(some))
        )
        for job_id, name, number in session.execute(query):
            found[job_id] = f"model://{name}@{number}"
    return found
