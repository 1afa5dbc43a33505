"""The protocol that every source of data implements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Sink = Callable[[bytes], None]
_LEFT_BY_SYSTEMS = frozenset(
    (
        *("__macosx", "temporary items", "network trash folder"),  # macOS
        *("thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "system volume information"),
        *("@eadir", "#recycle", "@recycle", "@recently-snapshot"),  # network storage
        *("lost+found", "__pycache__"),
    )
)


def is_data(name: str) -> bool:
    """Whether a file or folder is part of a data set, by its name: hidden ones are not, nor are
    those that operating systems and storage servers add."""
    return not name.startswith(".") and name.casefold() not in _LEFT_BY_SYSTEMS


@dataclass(frozen=True)
class Listed:
    """A file as its source lists it, before it is read."""

    name: str
    """Path within the folder, parts joined by `/`; the last part for a single file."""
    size_bytes: int | None
    version: str
    """A text that differs when the content does: an ETag, or a time of change."""
    path: Path | None = None
    """The path of a file on this machine; None for others."""


@dataclass(frozen=True)
class Listing:
    files: tuple[Listed, ...]
    """Sorted by name."""
    is_folder: bool
    trusted_s: float | None = None
    """How long the versions hold, for a source that gives none; None for ever."""


class Origin(Protocol):
    def listing(self) -> Listing:
        """Raises DataError, or SourceUnavailableError."""

    def fetch(self, file: Listed, sink: Sink) -> None:
        """Give all bytes to `sink`, in order. Raises DataError, SourceUnavailableError, or
        TransferError when it is worth another try from the start."""


class TransferError(Exception):
    """The transfer broke off, or brought more or less than was announced."""
