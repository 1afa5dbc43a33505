"""The bodies of requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from dray.input.names import unfit

AUTO = "auto"


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def _suffix(value: str) -> str:
    if (found := unfit(value)) is not None:
        raise ValueError(f"must not contain {found}")
    if ":" in value or "/" in value or not value.strip():
        raise ValueError("must not be blank, and must not contain a colon or a slash")
    return value


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=30 * 24 * 3600)]


class UploadForm(Body):
    """The fields of an upload, in addition to its file."""

    purpose: str
    expires_after: ExpiresAfter | None = None


class Hyperparameters(Body):
    n_epochs: Literal["auto"] | Annotated[int, Field(ge=1, le=1000)] | None = None
    batch_size: Literal["auto"] | Annotated[int, Field(ge=1, le=2**24)] | None = None
    learning_rate_multiplier: (
        Literal["auto"] | Annotated[float, Field(gt=0.0, le=10_000.0, allow_inf_nan=False)] | None
    ) = None
    beta: Literal["auto"] | Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    """Only for `dpo`."""


class OfMethod(Body):
    hyperparameters: Hyperparameters | None = None


class TuningMethod(Body):
    type: Literal["supervised", "dpo", "reinforcement"]
    supervised: OfMethod | None = None
    dpo: OfMethod | None = None
    reinforcement: dict[str, Any] | None = None


class Integration(Body):
    type: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    wandb: dict[str, Any] | None = None


class TuningRequest(Body):
    """The body of a new fine-tuning job."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    training_file: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    validation_file: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = None
    hyperparameters: Hyperparameters | None = None
    """The older place of the hyperparameters of the method `supervised`."""
    method: TuningMethod | None = None
    suffix: (
        Annotated[str, StringConstraints(min_length=1, max_length=64), AfterValidator(_suffix)]
        | None
    ) = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    integrations: Annotated[list[Integration], Field(max_length=16)] | None = None
    metadata: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(max_length=64)],
                Annotated[str, StringConstraints(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = None
