"""The operator's policies for the data, code and environments of jobs on nodes."""

from __future__ import annotations

from pathlib import Path

from dray.spec import JobSpec, Pretrained
from dray.spec.program.code import RemoteCode
from ray_workers.shared.names import UPLOADS_FOLDER
from ray_workers.shared.node_needs import (
    DataPolicy,
    EnvironmentPolicy,
    LicensedModel,
    RemoteCodeRef,
    ResultFile,
)
from service.config.models_file import Catalogue, folder_of
from service.config.settings import Settings


def data_policy(
    settings: Settings,
    spec: JobSpec | None = None,
    result: tuple[ResultFile, ...] = (),
    catalogue: Catalogue | None = None,
) -> DataPolicy:
    """Return the sources that ranks may read, and the settings of the data cache on their nodes.

    spec: a job, which may read the folder of its model in the catalogue. result: the files of the
    job whose result is the base model. catalogue: the models whose licences the job must accept.
    """
    roots = settings.data_roots
    if roots is None and settings.tokens_file is not None:
        roots = ()  # with tokens, callers must not read the machine's files by default
    model = None if spec is None else spec.model
    if roots is not None and isinstance(model, Pretrained) and model.catalogue is not None:
        folder = folder_of(model.base)
        roots = (*roots, Path(folder)) if folder is not None else roots
    return DataPolicy(
        cache_dir=_plain(settings.data_cache_dir),
        cache_limit_bytes=settings.data_cache_limit_bytes,
        private_hosts=settings.data_private_hosts or (),
        file_roots=None if roots is None else tuple(str(root.absolute()) for root in roots),
        credentials_dir=_plain(settings.data_credentials_dir),
        s3_endpoint_url=settings.s3_endpoint_url,
        result=result,
        uploads_url=f"{settings.storage_url.rstrip('/')}/{UPLOADS_FOLDER}",
        licensed=_licensed(model, catalogue or {}) if isinstance(model, Pretrained) else (),
    )


def _licensed(model: Pretrained, catalogue: Catalogue) -> tuple[LicensedModel, ...]:
    if model.catalogue is not None:  # the licence was checked on submission
        return ()
    return tuple(
        LicensedModel(one.name, one.licence, one.sha256)
        for one in catalogue.values()
        if one.must_accept and one.licence and one.sha256 and one.licence not in model.licences
    )


def _plain(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def environment_policy(settings: Settings, owner: str | None = None) -> EnvironmentPolicy:
    """Return the operator's settings for the environments of this owner's jobs."""
    folder = settings.secrets_dir
    return EnvironmentPolicy(
        secrets_dir=None if folder is None else str(folder.absolute()),
        limit_bytes=settings.environment_limit_bytes,
        build_limit_s=settings.environment_build_limit_s,
        owner=owner,
    )


def code_of(code: RemoteCode, settings: Settings) -> RemoteCodeRef:
    """Return the reference from which nodes fetch the code themselves."""
    return RemoteCodeRef(
        **code.model_dump(),
        policy=data_policy(settings),
        limit_bytes=settings.code_limit_bytes,
    )
