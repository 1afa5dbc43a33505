"""Views of the catalogue of base models for fine-tuning."""

from __future__ import annotations

from dray.views.base import View


class CatalogueEntry(View):
    """A base model that job documents can name in `model.base`."""

    name: str
    base: str
    """URL of the model's folder."""
    licence: str | None = None
    """Name of the licence."""
    licence_text: str | None = None
    """Text of the licence; unset in lists."""
    must_accept: bool
    """Whether a job document must accept the licence."""
    sha256: str | None = None
    """Expected hash of the model's files. A job whose base has another hash fails."""
    has_chat_template: bool
    """Whether the catalogue replaces the chat template of the model's tokenizer."""


class CataloguePage(View):
    items: list[CatalogueEntry]
