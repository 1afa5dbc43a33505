"""The method of fine-tuning: the loss, and how examples become samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    StringConstraints,
    model_validator,
)

from dray.spec.fields import Document, Int, Number, wrong
from dray.spec.program.model import ImportPath

MaxLength = Annotated[Int, Field(ge=2, le=2**20)]
Truncation = Literal["keep_start", "drop", "error"]
OF_DRAY = frozenset({"loss", "perplexity", "accuracy"})
"""Metrics of `sft`."""


def _own_name(value: str) -> str:
    if value in OF_DRAY:
        raise ValueError(f"is the name of one of dray's metrics: {', '.join(sorted(OF_DRAY))}")
    return value


OwnMetricName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=64),
    AfterValidator(_own_name),
]


class Sft(Document):
    """Supervised fine-tuning: the model learns to predict the tokens of examples. The loss of a
    step is the mean over all counted tokens in the step's global batch."""

    name: Literal["sft"] = "sft"
    """Selects this method."""
    loss: Literal["answers", "all"] = "answers"
    """Tokens that count in the loss. answers: the messages of the assistant, or the completions.
    all: every token. In plain texts, every token counts."""
    max_length: MaxLength = 1024
    """Maximum number of tokens of an example, including the tokens of the chat template."""
    truncation: Truncation = "keep_start"
    """How to handle longer examples. keep_start: the first `max_length` tokens are used; an example
    of which no counted token remains is left out. drop: the example is left out. error: the job
    fails with an error that names the line."""
    packing: StrictBool = False
    """Whether the examples of a micro-batch are joined, which avoids padding: to a single row, or,
    for some architectures, to rows of at most `max_length` tokens. Tokens don't attend to other
    examples in their row, so the results are the same except for rounding."""
    metrics: Annotated[dict[OwnMetricName, ImportPath], Field(max_length=16)] = {}
    """Metrics of your own, by name: subclasses of `torchmetrics.Metric`, as MODULE:NAME in
    `model.code`. They are updated with the logits, (N, T, vocabulary), and the next tokens, (N, T),
    which are -100 where they don't count, and reported as `val/NAME`. Higher values are
    better."""


class _Preferences(Document):
    """Options of the methods that learn from pairs of a chosen and a rejected answer. The loss of a
    step is the mean over the pairs of its whole global batch."""

    max_length: MaxLength = 1024
    """Maximum number of tokens of each of the two answers together with the prompt."""
    truncation: Truncation = "keep_start"
    """How to handle longer ones. keep_start: the first `max_length` tokens are used; a pair is left
    out if no token of one of its answers remains, or if its answers become equal. drop: the pair is
    left out. error: the job fails with an error that names the line."""


class Dpo(_Preferences):
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290): compared with the
    base, the model learns to prefer the chosen answers to the rejected ones."""

    name: Literal["dpo"]
    """Selects this method."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: the loss of the paper. ipo: the loss of Azar et al. 2023 (arXiv:2310.12036), of the
    mean instead of the sum over the tokens of each answer, as in TRL."""
    beta: Annotated[Number, Field(gt=0.0, le=1000.0)] = 0.1
    """How closely the model stays to the base: larger values keep it closer. For `ipo`, it is the
    paper's tau."""
    label_smoothing: Annotated[Number, Field(ge=0.0, lt=0.5)] = 0.0
    """sigmoid: assumed share of pairs whose answers are interchanged (conservative DPO)."""

    @model_validator(mode="after")
    def _smooths_only_sigmoid(self) -> Self:
        if self.label_smoothing and self.loss != "sigmoid":
            raise wrong("/method/label_smoothing", "is only for the loss sigmoid")
        return self


class Reward(_Preferences):
    """A model with one output, the reward, which learns to give chosen answers a higher reward than
    rejected ones (Bradley-Terry; Ouyang et al. 2022, arXiv:2203.02155)."""

    name: Literal["reward"]
    """Selects this method."""
    truncation: Truncation = "drop"
    """How to handle longer answers, as for `dpo`. By default, a longer pair is left out, as in TRL,
    because the end of an answer is part of what is judged."""


def _written_out(given: Any) -> Any:
    """Expand the short form, which is just the name of a method, and add the default name."""
    if isinstance(given, str):
        return {"name": given}
    return {"name": "sft", **given} if isinstance(given, Mapping) else given


AnyMethod = Sft | Dpo | Reward
Method = Annotated[
    Annotated[AnyMethod, Field(discriminator="name")],
    BeforeValidator(
        _written_out, json_schema_input_type=AnyMethod | Literal["sft", "dpo", "reward"]
    ),
]
