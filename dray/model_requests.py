"""The request bodies of the registry of models."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from dray.input import model_names
from dray.spec.fields import MAX_STEPS, Document, Int, JobId

MAX_CARD = 65_536
"""Maximum number of characters of a model card."""
RegisteredName = Annotated[
    str,
    StringConstraints(pattern=model_names.NAME),
    AfterValidator(model_names.checked_name),
]
Alias = Annotated[str, StringConstraints(pattern=model_names.ALIAS)]
VersionNumber = Annotated[Int, Field(ge=1, le=model_names.MAX_VERSION)]
Card = Annotated[str, StringConstraints(max_length=MAX_CARD)]


class RegistrationRequest(Document):
    """Register the result of a job, or one of its checkpoints, as the next version of a model."""

    name: RegisteredName
    """Name of the model, which is created if it does not exist. Names that differ only in case are
    the same name."""
    job: JobId
    """Id of the job, which must have ended. For its result, it must have succeeded."""
    step: Literal["latest", "best"] | Annotated[Int, Field(ge=0, le=MAX_STEPS)] | None = None
    """Step of the checkpoint to register. If unset, the job's result is registered."""
    card: Card = ""
    """Model card in Markdown: what the model is for, and its limits."""
    aliases: Annotated[tuple[Alias, ...], Field(max_length=16)] = ()
    """Aliases to move to this version."""


class AliasRequest(Document):
    """Move an alias to a version."""

    version: VersionNumber
    from_version: VersionNumber | None = None
    """If set, the alias is moved only if it still refers to this version."""


class CardRequest(Document):
    """Replace the card of a version."""

    card: Card
