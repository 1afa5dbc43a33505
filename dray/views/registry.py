"""Views of registered models and their versions."""

from __future__ import annotations

from datetime import datetime

from dray.views.base import View


class RegisteredModel(View):
    """A name with numbered versions."""

    name: str
    owner: str
    """The user who registered the first version."""
    num_versions: int
    """Number of versions that were not deleted."""
    latest_version: int
    """The highest number of a version that was not deleted."""
    aliases: dict[str, int]
    """The version to which each alias refers."""
    created_at: datetime


class RegisteredModelPage(View):
    """Models sorted by name, without regard to case."""

    items: list[RegisteredModel]
    next_cursor: str | None = None


class ModelFile(View):
    """A file of a version."""

    path: str
    size_bytes: int
    sha256: str
    missing: bool
    """Whether the storage no longer has the file with this size."""


class ModelParent(View):
    """A job whose weights the job of a version, or another parent, started from."""

    job_id: str
    step: int | None = None
    """Step of the checkpoint; unset if the job's result was the base model."""
    model: str | None = None
    """The version that was named in the document, such as `model://digits@3`."""
    exists: bool
    """Whether the job was not deleted."""


class ModelLineage(View):
    """Where the weights of a version come from."""

    job_name: str
    owner: str
    """Owner of the job."""
    recipe: str | None = None
    base: str | None = None
    """The base model in the document."""
    data: list[str]
    """URLs of the data."""
    data_sha256: str | None = None
    """Hash of the data, if the document states it."""
    document_sha256: str
    """Hash of the job's document, as JSON with sorted keys. Equal documents have equal hashes."""
    parents: list[ModelParent]
    """The job that the weights started from, the job from which that job started, and so on, up
    to 20 jobs."""


class ModelVersion(View):
    """A numbered version of a model: the result of a job, or one of its checkpoints."""

    model: str
    version: int
    reference: str
    """The version as documents name it, such as `model://digits@3`."""
    job_id: str
    step: int | None = None
    """Step of the checkpoint; unset if the version is the job's result."""
    aliases: list[str]
    created_at: datetime
    created_by: str
    card: str | None = None
    """Model card in Markdown; unset in lists."""
    lineage: ModelLineage | None = None
    """Unset in lists."""
    files: list[ModelFile] | None = None
    """Unset in lists."""


class ModelVersionPage(View):
    """Versions, the highest number first."""

    items: list[ModelVersion]
    next_cursor: str | None = None


class AliasMove(View):
    """A change of an alias."""

    alias: str
    from_version: int | None = None
    """Unset if the alias did not exist."""
    to_version: int | None = None
    """Unset if the alias was removed."""
    moved_at: datetime
    moved_by: str


class AliasMovePage(View):
    """Changes of a model's aliases, the newest first."""

    items: list[AliasMove]
    next_cursor: str | None = None
