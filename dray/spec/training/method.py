"""The method of fine-tuning: what the loss is, and how examples become samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool

from dray.spec.fields import Document, Int


class Sft(Document):
    """Supervised fine-tuning: the model learns to predict the tokens of examples. The loss of a
    step is the mean over the tokens that count in its whole global batch."""

    name: Literal["sft"] = "sft"
    """Selects this method."""
    loss: Literal["answers", "all"] = "answers"
    """Tokens that count in the loss. answers: the messages of the assistant, or the completions.
    all: every token. In plain texts, every token counts."""
    max_length: Annotated[Int, Field(ge=2, le=2**20)] = 1024
    """Maximum number of tokens of an example, including the tokens of the chat template."""
    truncation: Literal["keep_start", "drop", "error"] = "keep_start"
    """How to handle longer examples. keep_start: the first `max_length` tokens are used; an example
    of which no counted token remains is left out. drop: the example is left out. error: the job
    fails with an error that names the line."""
    packing: StrictBool = False
    """Whether the examples of a micro-batch are joined to rows of at most `max_length` tokens,
    which avoids padding. Tokens don't attend to other examples in their row, so the results are the
    same except for rounding."""


def _written_out(given: Any) -> Any:
    """Expand the short form, which is just the name of a method."""
    return {"name": given} if isinstance(given, str) else given


Method = Annotated[Sft, BeforeValidator(_written_out, json_schema_input_type=Sft | Literal["sft"])]
