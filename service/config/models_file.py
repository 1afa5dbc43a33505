"""The models file (DRAY_MODELS_FILE): the catalogue of base models for fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

from pydantic import Field, JsonValue, StrictBool, StringConstraints, model_validator

from dray.input.validation import Fault, check
from dray.spec.fields import Document, PlainText, Sha256, wrong
from dray.spec.program.model import BaseAddress, ModelName
from dray.spec.training.data import CredentialsName
from service.config.operator_file import OperatorFile
from service.config.start_refusals import StartRefused

MAX_MODELS = 1000
NOT_DEFAULTS = frozenset({"array", "name", "recipe", "script", "sweep", "version"})
TRIED_SOURCE = "file:///examples.jsonl"
"""Data in the document with which the defaults of a model are checked."""


class CatalogueModel(Document):
    """A base model in the file."""

    name: ModelName
    base: BaseAddress
    """URL of the folder. Jobs may read it even if DRAY_DATA_ROOTS doesn't list it."""
    credentials: CredentialsName | None = None
    licence: Annotated[PlainText, StringConstraints(min_length=1, max_length=255)] | None = None
    """Name of the licence."""
    licence_text: Annotated[str, StringConstraints(min_length=1, max_length=262_144)] | None = None
    must_accept: StrictBool = False
    """Whether a job document must accept the licence."""
    sha256: Sha256 | None = None
    chat_template: Annotated[str, StringConstraints(min_length=1, max_length=65536)] | None = None
    defaults: Annotated[dict[str, JsonValue], Field(max_length=64)] = Field(default_factory=dict)
    """Fields of the job document for jobs that are created through `/openai/v1`, such as
    `resources`."""

    @model_validator(mode="after")
    def _is_complete(self) -> CatalogueModel:
        if ":" not in self.base:
            raise wrong("/base", "must be the URL of a folder: file:///path or s3://bucket/prefix")
        if self.licence is None and (self.must_accept or self.licence_text is not None):
            raise wrong("/licence", "must name the licence")
        for field in sorted(NOT_DEFAULTS.intersection(self.defaults)):
            raise wrong(f"/defaults/{field}", "can't be a default of a model: leave it out")
        try:
            check(self.document({"data": {"source": TRIED_SOURCE}}))
        except Fault as fault:
            raise wrong(
                "/defaults",
                f"don't form a valid job document: {fault.pointer or ''} {fault.detail}",
            ) from None
        return self

    def document(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return a job document with these fields, and the model's defaults for all other fields.
        The model has a LoRA adapter unless the defaults state otherwise."""
        model = {"adapter": "lora", **_mapping(self.defaults.get("model")), "base": self.name}
        start = {**self.defaults, "recipe": "fine_tuning", "model": model}
        found: dict[str, Any] = _merged(start, fields)
        return found

    @property
    def folder(self) -> str | None:
        """Path of the base's folder; None if it is not on the nodes."""
        return folder_of(self.base)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _merged(start: Any, fields: Any) -> Any:
    if not isinstance(start, Mapping) or not isinstance(fields, Mapping):
        return fields
    return {**start, **{name: _merged(start.get(name), one) for name, one in fields.items()}}


def folder_of(base: str) -> str | None:
    url = urlsplit(base)
    return unquote(url.path) if url.scheme == "file" else None


class ModelList(Document):
    """The content of the file."""

    models: Annotated[list[CatalogueModel], Field(max_length=MAX_MODELS)]

    @model_validator(mode="after")
    def _names_differ(self) -> ModelList:
        names = [one.name for one in self.models]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise wrong(
                    f"/models/{number}/name",
                    f"is {name!r}, which is also the name of another model",
                )
        return self


class BadModelsFile(StartRefused):
    """Raised if DRAY_MODELS_FILE can't be read or is invalid."""


Catalogue = Mapping[str, CatalogueModel]
"""Models by their names, in the order of the file."""


class ModelsFile(OperatorFile[Catalogue]):
    """The current catalogue."""

    setting, contents = "DRAY_MODELS_FILE", "models"
    expected = "a list `models`, each with a `name` and a `base`"
    document, refusal = ModelList, BadModelsFile

    @classmethod
    def convert(cls, document: Any) -> Catalogue:
        assert isinstance(document, ModelList)
        return {one.name: one for one in document.models}
