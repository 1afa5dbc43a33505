"""Prompts whose answers are generated at every evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from dray.spec.fields import Document, Int, Number

MAX_PROMPTS = 16
PromptText = Annotated[str, Field(min_length=1, max_length=8192)]


class PromptMessage(Document):
    """A message of a conversation that the model answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Author of the message."""
    content: PromptText
    """Text of the message."""


def _form(prompt: Any) -> str:
    return "text" if isinstance(prompt, str) else "messages"


Conversation = Annotated[list[PromptMessage], Field(min_length=1, max_length=64)]
Prompt = Annotated[
    Annotated[PromptText, Tag("text")] | Annotated[Conversation, Tag("messages")],
    Discriminator(_form),
]


class TextSamples(Document):
    """Texts that the model generates at every evaluation, to see how its answers change. They don't
    affect training."""

    prompts: Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS)]
    """Beginnings of texts, or conversations, which are rendered with the chat template of the
    base."""
    max_tokens: Annotated[Int, Field(ge=1, le=512)] = 64
    """Maximum number of tokens to generate for each prompt. A text also ends with the model's end
    token."""
    temperature: Annotated[Number, Field(ge=0.0, le=10.0)] = 0.0
    """0: each token is the most likely one. Otherwise, tokens are drawn at random, with the same
    seed at every evaluation; higher values give less likely tokens."""
