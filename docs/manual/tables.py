"""Markdown helpers for the pages of the reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *(map(cell, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cell(text: str) -> str:
    """Returns the text on one line, with its vertical bars escaped so that they don't separate
    cells."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    return f"`{text}`" if text else ""
