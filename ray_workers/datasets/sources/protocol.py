"""The protocol that every source of data implements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Sink = Callable[[bytes], None]


@dataclass(frozen=True)
class Listed:
    """A file as its place lists it, before anybody has read it."""

    name: str
    """Within the folder, parts joined by `/`; of a single file its last part."""
    size_bytes: int | None
    version: str
    """Differs when the content does: an ETag, or a time of change."""
    path: Path | None = None
    """Where it lies, if on this machine."""


@dataclass(frozen=True)
class Listing:
    files: tuple[Listed, ...]
    """In the order of their names."""
    is_folder: bool
    trusted_s: float | None = None
    """How long the versions may be believed, where the place gives none; None for ever."""


class Origin(Protocol):
    def listing(self) -> Listing:
        """Raises DataError, or SourceUnavailableError."""

    def fetch(self, file: Listed, sink: Sink) -> None:
        """Give all bytes to `sink`, in order. Raises DataError, SourceUnavailableError, or
        TransferError when it is worth another try from the start."""


class TransferError(Exception):
    """The transfer broke off, or brought more or less than was announced."""
