"""The models file (DRAY_MODELS_FILE): the catalogue of base models for fine-tuning."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final
from urllib.parse import unquote, urlsplit

from pydantic import Field, JsonValue, StrictBool, StringConstraints, model_validator

from dray.input.validation import Fault, check
from dray.spec.fields import Document, PlainText, Sha256, wrong
from dray.spec.program.model import BaseAddress, ModelName
from dray.spec.program.recipes import METRICS_OF_METHOD
from dray.spec.training.data import CredentialsName
from service.config.operator_file import OperatorFile
from service.config.start_refusals import StartRefused

MAX_MODELS = 1000
NOT_DEFAULTS = frozenset({"array", "name", "recipe", "script", "sweep", "version"})
METHODS: Final = ("sft", "dpo")
"""Methods of jobs that are created through `/openai/v1`."""
TRIED_SOURCE = "file:///examples.jsonl"
"""Data in the document with which the defaults of a model are checked."""


RepositoryName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$", max_length=255)
]


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
    repositories: Annotated[list[RepositoryName], Field(max_length=64)] = Field(
        default_factory=list
    )
    """Repositories on Hugging Face's hub to which the licence also applies, at any revision."""
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
        of_methods = {one for name in METHODS for one in METRICS_OF_METHOD[name]}
        for pointer, metric in self._metrics().items():
            if isinstance(metric, str) and metric not in of_methods:
                raise wrong(
                    f"/defaults{pointer}",
                    f"is {metric!r}, which is not a metric of the methods {' and '.join(METHODS)}: "
                    f"use one of {', '.join(sorted(of_methods))}",
                )
        faults = list(filter(None, map(self._fault, METHODS)))
        if len(faults) == len(METHODS):
            raise wrong("/defaults", f"don't form a valid job document: {faults[0]}")
        return self

    def _metrics(self) -> dict[str, Any]:
        """Return the metrics that the defaults name, by pointers."""
        checkpoint, train = (_mapping(self.defaults.get(one)) for one in ("checkpoint", "train"))
        return {
            "/checkpoint/best": checkpoint.get("best"),
            "/train/early_stopping/metric": _mapping(train.get("early_stopping")).get("metric"),
        }

    def _fault(self, method: str) -> str | None:
        """Return why the defaults don't fit a method; None if they fit."""
        try:
            check(self.document({"data": {"source": TRIED_SOURCE}}, method))
        except Fault as fault:
            return f"{fault.pointer or ''} {fault.detail}"
        return None

    def document(self, fields: Mapping[str, Any], method: str) -> dict[str, Any]:
        """Return a job document with these fields, and the model's defaults for all other fields.
        Defaults that the method does not have are left out. The model has a LoRA adapter unless the
        defaults state otherwise."""
        model = {"adapter": "lora", **_mapping(self.defaults.get("model")), "base": self.name}
        options = _mapping(self.defaults.get("method"))
        if options.get("name", "sft") != method:
            options = _without(options, options.keys() - {"max_length"})
        start = {
            **self.defaults,
            "recipe": "fine_tuning",
            "model": model,
            "method": {**options, "name": method},
        }
        if method != "sft":
            start["data"] = _without(start.get("data", {}), {"examples"})
        best, stopping = (
            isinstance(one, str) and one not in METRICS_OF_METHOD[method]
            for one in self._metrics().values()
        )
        if best:
            start["checkpoint"] = _without(start["checkpoint"], {"best"})
        if stopping:
            start["train"] = _without(start["train"], {"early_stopping"})
        found: dict[str, Any] = _merged(start, fields)
        return found

    @property
    def folder(self) -> str | None:
        """Path of the base's folder; None if it is not on the nodes."""
        return folder_of(self.base)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _without(value: Any, names: Collection[str]) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: one for name, one in value.items() if name not in names}


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
