"""Data sets as recipes see them, and the protocol of the sources that they are read from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ray_workers.datasets.formats.dates import PARTS

Sink = Callable[[bytes], None]
_LEFT_BY_SYSTEMS = frozenset(
    (
        *("__macosx", "temporary items", "network trash folder"),  # macOS
        *("thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "system volume information"),
        *("@eadir", "#recycle", "@recycle", "@recently-snapshot"),  # network storage
        *("lost+found", "__pycache__"),
    )
)


@dataclass(frozen=True)
class Images:
    """Images of one size, each of a class."""

    pixels: npt.NDArray[Any]
    """(N, channels, height, width), uint8 or float32; may be a read-only memory map."""
    max_value: float
    """The value of white: 255 for decoded images, 16 for scikit-learn's digits, 1 for floats."""
    labels: npt.NDArray[np.int64]
    """(N,) indices into `classes`."""
    classes: tuple[str, ...]
    fingerprint: str
    """SHA-256 of the content, in hex: the same data give the same text on every node."""
    is_validation: npt.NDArray[np.bool_] | None = None
    """(N,), if the set's folders divide it."""
    num_left_out: int = 0
    """Images in folders for testing."""


@dataclass(frozen=True)
class MaskedImages:
    """Images of one size, each with a mask that has a class for every pixel."""

    pixels: npt.NDArray[Any]
    """(N, channels, height, width), uint8 or float32; may be a read-only memory map."""
    max_value: float
    """The value of white: 255 for decoded images, 1 for floats."""
    masks: npt.NDArray[np.uint8]
    """(N, height, width) indices into `classes`; may be a read-only memory map."""
    classes: tuple[str, ...]
    """The first is the background."""
    fingerprint: str
    """SHA-256 of the content, in hex."""
    is_validation: npt.NDArray[np.bool_] | None = None
    """(N,), if the set's folders divide it."""
    num_left_out: int = 0
    """Images in folders for testing."""


@dataclass(frozen=True)
class Table:
    """Rows of numbers and categories, and what to predict from them."""

    numeric: npt.NDArray[np.float64] | npt.NDArray[np.float32]
    """(N, F), finite, or NaN where a value is missing; may be a read-only memory map. Columns of
    numbers come first, and then those that each date is made into. Every value is less its column's
    number in `bases`; float32 where the source has no more digits."""
    categories: npt.NDArray[np.int32]
    """(N, C) codes into the vocabulary of each column, -1 where a value is missing; may be a
    read-only memory map."""
    target: npt.NDArray[Any]
    """(N,) int64 codes into `classes`; where there are none, float64 less the target's number in
    `bases`."""
    numeric_names: tuple[str, ...]
    category_names: tuple[str, ...]
    vocabularies: tuple[tuple[str, ...], ...]
    """The values of each category column, in the order of their codes."""
    classes: tuple[str, ...] | None
    """None for regression."""
    target_name: str
    fingerprint: str
    """SHA-256 of the content, in hex."""
    num_missing: Mapping[str, int] = field(default_factory=dict)
    """Rows of the file without a value, by column; without columns that always have one."""
    num_dropped: int = 0
    """Rows that were left out, because a column of theirs has no value."""
    date_names: tuple[str, ...] = ()
    ignored: Sequence[str] = ()
    """Columns that are there and neither the target nor features."""
    bases: Mapping[str, int] = field(default_factory=dict)
    """By column, the number that was subtracted from its whole numbers, which float64 does not
    hold; columns from which nothing was subtracted are left out."""
    num_rounded: Mapping[str, int] = field(default_factory=dict)
    """Values that float64 does not hold all the same, by column; they were rounded."""
    hints: Mapping[str, str] = field(default_factory=dict)
    """For columns of categories: options by which their values would be numbers."""
    shifts: Mapping[str, float] = field(default_factory=dict)
    """By column, the number to add to its values, so that they are less `bases`."""

    @property
    def numeric_sources(self) -> tuple[str, ...]:
        """(F,): the column of the file that each one of `numeric` is from."""
        return sources_of(self.numeric_names, self.date_names)


def sources_of(numbers: Sequence[str], dates: Sequence[str]) -> tuple[str, ...]:
    """The name of each column of numbers, and that of each date once for each of its parts."""
    return (*numbers, *(name for name in dates for _ in PARTS))


@dataclass(frozen=True)
class Tokens:
    """A text as one row of numbers."""

    ids: npt.NDArray[Any]
    """(T,) uint8, uint16 or uint32; may be a read-only memory map."""
    vocabulary_size: int
    """256 where a token is a byte."""
    fingerprint: str
    """SHA-256 of the content, in hex."""
    tokenizer_json: bytes | None
    """The tokenizer's file, to be left with the result; None where a token is a byte."""
    num_training: int | None = None
    """The first tokens, which are for training, and the others for validation; None if the files
    say nothing about it."""
    num_left_out: int = 0
    """Files for testing."""


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
