"""Versions of registered models in job documents: `init_from: model://...` and `model.base:
model://...`.

The version is replaced with its job when the document is prepared for submission, so that neither
the job's retries nor later changes of the registry affect the job. The version is recorded in the
document. A version prevents the deletion of its job.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from sqlalchemy.orm import Session

from dray.input import model_names
from dray.spec import JobSpec, Pretrained
from service.checkpoints.base_jobs import AT_BASE
from service.db.models import ModelRow, ModelVersionRow
from service.db.repositories.catalog import registry as repository
from service.domain.errors import (
    CheckpointInUse,
    InvalidDocument,
    ModelNotFound,
    ModelVersionNotFound,
)

S = TypeVar("S", bound=JobSpec)
AT_INIT_FROM = "/init_from/model"


def names_models(spec: JobSpec) -> bool:
    """Whether the document names a version of a registered model."""
    model = spec.model
    if isinstance(model, Pretrained) and (
        model.registered is not None or model.base.startswith(model_names.SCHEME)
    ):
        return True
    swept = () if spec.sweep is None else spec.sweep.parameters
    return any(name.startswith(("init_from", "model")) for name in swept) or (
        spec.init_from is not None and spec.init_from.model is not None
    )


def resolve(session: Session, spec: S) -> S:
    """Replace versions of registered models with their jobs. Raises InvalidDocument if a version
    does not exist or can't be used."""
    _refuse_sweep(spec)
    return _with_base(session, _with_origin(session, spec))


def find(session: Session, name: str, version: int | str) -> tuple[ModelRow, ModelVersionRow]:
    """Return a version and its model. Raises ModelNotFound or ModelVersionNotFound.

    version: the number of the version, or an alias.
    """
    model = repository.get(session, name)
    if model is None:
        raise ModelNotFound(f"there is no model {name!r}", hint="`dray model ls` lists the models")
    number = version if isinstance(version, int) else repository.alias(session, model, version)
    row = None if number is None else repository.version(session, model, number)
    if row is None:
        what = f"version {version}" if isinstance(version, int) else f"alias {version!r}"
        raise ModelVersionNotFound(
            f"the model {model.name!r} has no {what}",
            hint=f"`dray model show {model.name}` lists its versions and aliases",
        )
    return model, row


def refuse_if_registered(session: Session, job_ids: Collection[str]) -> None:
    """Raise CheckpointInUse if the result or a checkpoint of one of these jobs is a version of a
    model."""
    for job_id, reference in repository.registered(session, job_ids).items():
        raise CheckpointInUse(
            f"the job {job_id} can't be deleted: {reference} is its result or one of its "
            "checkpoints",
            hint=f"delete the version first: dray model rm {reference.removeprefix('model://')}",
        )


def _named(session: Session, reference: str, pointer: str) -> tuple[str, ModelVersionRow]:
    """Return the reference with the number of the version, and the version."""
    wanted = model_names.parse(reference)
    try:
        model, row = find(session, wanted.name, wanted.version)
    except (ModelNotFound, ModelVersionNotFound) as error:
        raise InvalidDocument(error.message, pointer=pointer, hint=error.hint) from None
    return str(model_names.ModelReference(model.name, row.version)), row


def _with_origin(session: Session, spec: S) -> S:
    asked = spec.init_from
    if asked is None or asked.model is None:
        return spec
    reference, row = _named(session, asked.model, AT_INIT_FROM)
    if row.init_step is None:
        raise InvalidDocument(
            f"names {reference}, whose job {row.job_id} has no checkpoint to start from",
            pointer=AT_INIT_FROM,
        )
    found: dict[str, Any] = {"job": row.job_id, "step": row.init_step}
    given = asked.model_dump(include=set(found), exclude_unset=True)
    for field, value in found.items():
        if given.get(field) not in (None, value):
            raise InvalidDocument(
                f"is {given[field]}, but {reference} has the {field} {value}: leave it out",
                pointer=f"/init_from/{field}",
            )
    changed = asked.model_copy(update={**found, "model": reference})
    return spec.model_copy(update={"init_from": changed})


def _with_base(session: Session, spec: S) -> S:
    model = spec.model
    if not isinstance(model, Pretrained):
        return spec
    if model.base.startswith(model_names.SCHEME):
        reference, row = _named(session, model.base, AT_BASE)
        if row.step is not None:
            raise InvalidDocument(
                f"names {reference}, which is a checkpoint: a base must be the result of a job",
                pointer=AT_BASE,
                hint="register the job's result, or start from the checkpoint with init_from",
            )
        changes: dict[str, Any] = {"base": f"job://{row.job_id}", "registered": reference}
    elif model.registered is not None:
        # A document that is submitted again names the job and the version.
        try:
            reference, row = _named(session, model.registered, "/model/registered")
            is_same = model.base == f"job://{row.job_id}"
        except InvalidDocument:
            is_same = False
        changes = {"registered": reference if is_same else None}
    else:
        return spec
    return spec.model_copy(update={"model": model.model_copy(update=changes)})


def _refuse_sweep(spec: JobSpec) -> None:
    """Refuse sweeps over versions, which are looked up only at submission."""
    for name, swept in ({} if spec.sweep is None else spec.sweep.parameters).items():
        is_version = any(
            isinstance(value, str) and value.startswith(model_names.SCHEME)
            for value in swept.choices or ()
        )
        if name in ("init_from.model", "model.registered") or is_version:
            raise InvalidDocument(
                f"can't vary {name} among registered models: submit a job for each of them",
                pointer=f"/sweep/parameters/{name}",
            )
