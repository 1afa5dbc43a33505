"""Use cases of the registry of models: register, list, show, move aliases, delete.

All users see all models, as they see all jobs. Only admins and the owner of a model (the user who
registered its first version) may add and delete versions, change cards, and move aliases.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Final

from sqlalchemy.orm import Session

from dray import views
from dray.input.model_names import MAX_VERSION, ModelReference
from dray.model_requests import AliasRequest, RegistrationRequest
from dray.views import JobState
from service.checkpoints import catalog, registered
from service.db.models import (
    AliasMoveRow,
    ArtifactRow,
    CheckpointRow,
    JobRow,
    ModelRow,
    ModelVersionRow,
)
from service.db.repositories import attempts as attempts_repository
from service.db.repositories.catalog import mlflow_exports
from service.db.repositories.catalog import registry as repository
from service.db.session import Database, touch
from service.db.types import storable
from service.domain.callers import Caller
from service.domain.cursors import decode_cursor, encode_cursor
from service.domain.errors import (
    AliasMoved,
    BadCursor,
    CheckpointNotFound,
    InvalidDocument,
    ModelNotFound,
    ModelOfAnother,
    ModelVersionNotFound,
    VersionInUse,
)
from service.jobs.service import found
from service.storage.storage import Storage, in_storage_thread
from service.tracking import origins

logger = logging.getLogger(__name__)

MAX_ALIASES: Final = 100
"""Maximum number of aliases of a model."""
_MODELS, _VERSIONS, _MOVES = "models", "model versions", "alias moves"


class Registry:
    """The use cases. Each raises ModelNotFound or ModelVersionNotFound for a model or a version
    that does not exist. `version` is the number of a version, or an alias."""

    def __init__(self, database: Database, storage: Storage) -> None:
        self._database = database
        self._storage = storage

    async def register(
        self, wanted: RegistrationRequest, caller: Caller
    ) -> tuple[views.ModelVersion, bool]:
        """Register a result or a checkpoint, and return (version, created). `created` is False if
        it was already a version of the model, which is returned instead.

        Raises NotFound if the job does not exist, InvalidDocument if it has not ended or lacks what
        should be registered, and ModelOfAnother.
        """
        step = await self._database.read(lambda s: _registrable(s, found(s, wanted.job), wanted))
        files = await self._files(wanted.job, step)
        missing = [file.path for file in files if file.missing]
        if missing:
            raise InvalidDocument(
                f"the storage no longer has the file {missing[0]!r} of {wanted.job}",
                pointer="/job",
            )

        def work(session: Session) -> tuple[str, int, bool]:
            touch(session)
            job = found(session, wanted.job, lock=True)
            _registrable(session, job, wanted)
            now = self._database.time(session)
            model = repository.claim(session, wanted.name, caller.name, now)
            _refuse_another(model, caller)
            row = repository.same(session, model, job.id, step)
            created = row is None
            if row is None:
                model.last_version += 1
                latest, _ = catalog.of_job(session, job)
                init_step = step if step is not None else latest[0].step if latest else None
                row = ModelVersionRow(
                    folded=model.folded,
                    version=model.last_version,
                    job_id=job.id,
                    step=step,
                    init_step=init_step,
                    card=wanted.card,
                    created_at=now,
                    created_by=caller.name,
                )
                session.add(row)
                session.flush()
            for alias in wanted.aliases:
                self._move(session, model, alias, row.version, now, caller)
            mlflow_exports.reopen(session, job.id)
            return model.name, row.version, created

        name, number, created = await self._database.write(work)
        logger.info("%s registered %s as %s@%d", caller.name, wanted.job, name, number)
        return await self.version(name, number), created

    async def models(
        self, *, limit: int = 100, cursor: str | None = None
    ) -> views.RegisteredModelPage:
        """List the models in the order of their names. Raises BadCursor for a cursor from another
        list."""
        after = "" if cursor is None else decode_cursor(_MODELS, cursor)
        if not isinstance(after, str) or not storable(after):
            raise BadCursor("the cursor does not belong to this listing")

        def work(session: Session) -> views.RegisteredModelPage:
            rows = repository.page(session, after, limit + 1)
            some = rows[:limit]
            aliases = repository.aliases(session, [row.folded for row, _, _ in some])
            items = [
                _model(row, number, highest or 0, aliases[row.folded])
                for row, number, highest in some
            ]
            more = encode_cursor(_MODELS, some[-1][0].folded) if len(rows) > limit else None
            return views.RegisteredModelPage(items=items, next_cursor=more)

        return await self._database.read(work)

    async def model(self, name: str) -> views.RegisteredModel:
        def work(session: Session) -> views.RegisteredModel:
            row = _found(session, name)
            aliases = repository.aliases(session, [row.folded])[row.folded]
            return _model(row, *repository.totals(session, row), aliases)

        return await self._database.read(work)

    async def versions(
        self, name: str, *, limit: int = 100, cursor: str | None = None
    ) -> views.ModelVersionPage:
        """List the versions of a model, the highest number first. Raises BadCursor."""

        def work(session: Session) -> views.ModelVersionPage:
            row = _found(session, name)
            before = _position(f"{_VERSIONS} {row.folded}", cursor)
            rows = repository.versions(session, row, before, limit + 1)
            some, names = rows[:limit], _aliases_by_version(session, row)
            more = None
            if len(rows) > limit:
                more = encode_cursor(f"{_VERSIONS} {row.folded}", some[-1].version)
            items = [_version(row, one, names) for one in some]
            return views.ModelVersionPage(items=items, next_cursor=more)

        return await self._database.read(work)

    async def version(self, name: str, version: int | str) -> views.ModelVersion:
        """Return a version with its card, its lineage and its files."""

        def work(session: Session) -> views.ModelVersion:
            model, row = _found_version(session, name, version)
            view = _version(model, row, _aliases_by_version(session, model))
            job = found(session, row.job_id)
            return view.model_copy(
                update={"card": row.card, "lineage": origins.lineage(session, job)}
            )

        view = await self._database.read(work)
        try:
            files = await self._files(view.job_id, view.step)
        except CheckpointNotFound:  # its manifest was lost or changed
            lost = {"path": catalog.MANIFEST, "size_bytes": 0, "sha256": "", "missing": True}
            files = [views.ModelFile(**lost)]
        return view.model_copy(update={"files": files})

    async def moves(
        self, name: str, *, limit: int = 100, cursor: str | None = None
    ) -> views.AliasMovePage:
        """List the changes of the model's aliases, the newest first. Raises BadCursor."""

        def work(session: Session) -> views.AliasMovePage:
            row = _found(session, name)
            before = _position(f"{_MOVES} {row.folded}", cursor)
            rows = repository.moves(session, row, before, limit + 1)
            some = rows[:limit]
            more = None
            if len(rows) > limit:
                more = encode_cursor(f"{_MOVES} {row.folded}", some[-1].number)
            return views.AliasMovePage(items=[_moved(one) for one in some], next_cursor=more)

        return await self._database.read(work)

    async def set_card(self, name: str, version: int | str, card: str, caller: Caller) -> None:
        """Replace the card of a version. Raises ModelOfAnother."""

        def work(session: Session) -> None:
            touch(session)
            model = _locked(session, name, caller)
            _, row = _found_version(session, model.name, version)
            row.card = card
            mlflow_exports.reopen(session, row.job_id)

        await self._database.write(work)

    async def move(self, name: str, alias: str, wanted: AliasRequest, caller: Caller) -> None:
        """Let an alias refer to another version. Raises ModelOfAnother, and AliasMoved if the alias
        no longer refers to `from_version`."""

        def work(session: Session) -> None:
            touch(session)
            model = _locked(session, name, caller)
            row = repository.version(session, model, wanted.version)
            if row is None:
                raise _no_version(model, wanted.version)
            before = repository.alias(session, model, alias)
            # A client repeats a call whose answer was lost.
            expected = (wanted.from_version, wanted.version)
            if wanted.from_version is not None and before not in expected:
                now_at = "does not exist" if before is None else f"refers to version {before}"
                raise AliasMoved(
                    f"the alias {alias!r} of {model.name!r} {now_at}",
                    pointer="/from_version",
                    hint="read the alias again, and decide whether to move it",
                )
            now = self._database.time(session)
            self._move(session, model, alias, wanted.version, now, caller)

        await self._database.write(work)

    async def remove_alias(self, name: str, alias: str, caller: Caller) -> None:
        """Remove an alias. Removing an alias that does not exist has no effect. Raises
        ModelOfAnother."""

        def work(session: Session) -> None:
            touch(session)
            model = _locked(session, name, caller)
            if storable(alias):
                self._move(session, model, alias, None, self._database.time(session), caller)

        await self._database.write(work)

    async def delete_version(self, name: str, version: int, caller: Caller) -> None:
        """Delete a version, but not its job. Its number is not used again. Raises ModelOfAnother,
        and VersionInUse if an alias refers to the version."""

        def work(session: Session) -> None:
            touch(session)
            model = _locked(session, name, caller)
            row = repository.version(session, model, version)
            if row is None:
                raise _no_version(model, version)
            names = _aliases_by_version(session, model).get(version)
            if names:
                raise VersionInUse(
                    f"the alias {names[0]!r} refers to version {version} of {model.name!r}",
                    hint="move or remove the alias first",
                )
            session.delete(row)

        await self._database.write(work)
        logger.info("%s deleted version %d of the model %r", caller.name, version, name)

    async def delete(self, name: str, caller: Caller) -> None:
        """Delete a model with its versions and aliases, but not their jobs. If the name is
        registered again, the numbers continue. Raises ModelOfAnother."""

        def work(session: Session) -> None:
            touch(session)
            model = _locked(session, name, caller)
            now = self._database.time(session)
            for alias in repository.aliases(session, [model.folded])[model.folded]:
                self._move(session, model, alias, None, now, caller)
            repository.remove_versions(session, model)
            model.deleted_at = now

        await self._database.write(work)
        logger.info("%s deleted the model %r", caller.name, name)

    def _move(
        self,
        session: Session,
        model: ModelRow,
        alias: str,
        to: int | None,
        now: datetime,
        caller: Caller,
    ) -> None:
        known = repository.aliases(session, [model.folded])[model.folded]
        if to is not None and alias not in known and len(known) >= MAX_ALIASES:
            raise InvalidDocument(
                f"the model {model.name!r} has {MAX_ALIASES} aliases, the maximum",
                hint="remove an alias that is no longer needed",
            )
        repository.move(session, model, alias, to, now, caller.name)
        for number in {known.get(alias), to} - {None}:
            row = repository.version(session, model, number or 0)
            if row is not None:
                mlflow_exports.reopen(session, row.job_id)

    async def _files(self, job_id: str, step: int | None) -> list[views.ModelFile]:
        """Return the files of a result or a checkpoint. Raises CheckpointNotFound."""

        def work(session: Session) -> list[ArtifactRow] | CheckpointRow:
            if step is None:
                return attempts_repository.artifacts(session, job_id)
            return catalog.at_step(session, job_id, step)

        rows = await self._database.read(work)
        return await in_storage_thread(origins.checked_files, self._storage, rows)


def _registrable(session: Session, job: JobRow, wanted: RegistrationRequest) -> int | None:
    """Return the step of the checkpoint to register; None for the result. Raises InvalidDocument if
    the job does not have it."""
    if not job.state.is_terminal:
        raise InvalidDocument(
            f"the job {job.id} is {job.state}: it must have ended, so that its files no longer "
            "change",
            pointer="/job",
        )
    if wanted.step is None:
        if job.state is not JobState.SUCCEEDED:
            raise InvalidDocument(
                f"the job {job.id} is {job.state}, and only a job that succeeded has a result",
                pointer="/job",
                hint="register one of its checkpoints: set step to latest, best or a number",
            )
        if not attempts_repository.artifacts(session, job.id):
            raise InvalidDocument(f"the job {job.id} stored no files as its result", pointer="/job")
        return None
    rows, best = catalog.of_job(session, job)
    if wanted.step == "latest":
        row = rows[0] if rows else None
    elif wanted.step == "best":
        row = best
    else:
        row = next((one for one in rows if one.step == wanted.step), None)
    if row is None:
        steps = ", ".join(str(one.step) for one in rows[:10])
        what = f"{wanted.step} checkpoint"
        if isinstance(wanted.step, int):
            what = f"checkpoint at step {wanted.step}"
        raise InvalidDocument(
            f"the job {job.id} has no {what}",
            pointer="/step",
            hint=f"it has checkpoints at steps {steps}" if steps else "it has no checkpoints",
        )
    return row.step


def _found(session: Session, name: str, *, lock: bool = False) -> ModelRow:
    row = repository.get(session, name, lock=lock) if storable(name) else None
    if row is None:
        raise ModelNotFound(f"there is no model {name!r}", hint="`dray model ls` lists the models")
    return row


def _found_version(
    session: Session, name: str, version: int | str
) -> tuple[ModelRow, ModelVersionRow]:
    model = _found(session, name)
    if (isinstance(version, str) and not storable(version)) or (
        isinstance(version, int) and not 0 < version <= MAX_VERSION
    ):
        raise _no_version(model, version)
    return registered.find(session, model.name, version)


def _no_version(model: ModelRow, version: int | str) -> ModelVersionNotFound:
    return ModelVersionNotFound(
        f"the model {model.name!r} has no version {version}",
        hint=f"`dray model show {model.name}` lists its versions",
    )


def _locked(session: Session, name: str, caller: Caller) -> ModelRow:
    """Lock a model that the caller may change."""
    row = _found(session, name, lock=True)
    _refuse_another(row, caller)
    return row


def _refuse_another(row: ModelRow, caller: Caller) -> None:
    if row.owner != caller.name and not caller.is_admin:
        raise ModelOfAnother(
            f"only {row.owner}, its owner, and admins may change the model {row.name!r}",
            hint="choose another name, or ask the owner",
        )


def _position(scope: str, cursor: str | None) -> int | None:
    if cursor is None:
        return None
    position = decode_cursor(scope, cursor)
    if not isinstance(position, int) or not 0 <= position < 2**63:
        raise BadCursor("the cursor does not belong to this listing")
    return position


def _aliases_by_version(session: Session, model: ModelRow) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for alias, version in repository.aliases(session, [model.folded])[model.folded].items():
        found.setdefault(version, []).append(alias)
    return found


def _model(
    row: ModelRow, number: int, highest: int, aliases: Mapping[str, int]
) -> views.RegisteredModel:
    return views.RegisteredModel(
        name=row.name,
        owner=row.owner,
        num_versions=number,
        latest_version=highest,
        aliases=dict(aliases),
        created_at=row.created_at,
    )


def _version(
    model: ModelRow, row: ModelVersionRow, aliases: Mapping[int, list[str]]
) -> views.ModelVersion:
    return views.ModelVersion(
        model=model.name,
        version=row.version,
        reference=str(ModelReference(model.name, row.version)),
        job_id=row.job_id,
        step=row.step,
        aliases=aliases.get(row.version, []),
        created_at=row.created_at,
        created_by=row.created_by,
    )


def _moved(row: AliasMoveRow) -> views.AliasMove:
    return views.AliasMove(
        alias=row.alias,
        from_version=row.from_version,
        to_version=row.to_version,
        moved_at=row.moved_at,
        moved_by=row.moved_by,
    )
