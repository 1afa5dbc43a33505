"""Data sets as recipes see them, and the protocol of their sources."""

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
    """Images of one size, each with a class."""

    pixels: npt.NDArray[Any]
    """(N, channels, height, width), uint8 or float32; may be a read-only memory map."""
    max_value: float
    """The value of white: 255 for decoded images, 16 for scikit-learn's digits, 1 for floats."""
    labels: npt.NDArray[np.int64]
    """(N,) indices into `classes`."""
    classes: tuple[str, ...]
    fingerprint: str
    """SHA-256 of the content, in hex. The same data have the same fingerprint on every node."""
    is_validation: npt.NDArray[np.bool_] | None = None
    """(N,), if folders divide the set; otherwise None."""
    num_left_out: int = 0
    """Number of images in folders for testing."""


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
    """(N,), if folders divide the set; otherwise None."""
    num_left_out: int = 0
    """Number of images in folders for testing."""


@dataclass(frozen=True)
class Table:
    """Rows of numbers and categories, and the target to predict from them."""

    numeric: npt.NDArray[np.float64] | npt.NDArray[np.float32]
    """(N, F), finite, or NaN if a value is missing; may be a read-only memory map. Columns of
    numbers come first, then the parts of each date. The column's number in `bases` is subtracted
    from every value. float32 if the source has no more digits."""
    categories: npt.NDArray[np.int32]
    """(N, C) codes in each column's vocabulary, -1 if missing; may be a read-only memory map."""
    target: npt.NDArray[Any]
    """(N,) int64 codes in `classes`, or float64 values less the target's number in `bases`."""
    numeric_names: tuple[str, ...]
    category_names: tuple[str, ...]
    vocabularies: tuple[tuple[str, ...], ...]
    """The values of each column of categories, in the order of their codes."""
    classes: tuple[str, ...] | None
    """None for regression."""
    target_name: str
    fingerprint: str
    """SHA-256 of the content, in hex."""
    num_missing: Mapping[str, int] = field(default_factory=dict)
    """Rows of the file without a value, by column. Columns without missing values are omitted."""
    num_dropped: int = 0
    """Number of rows that were left out because a column has no value."""
    date_names: tuple[str, ...] = ()
    ignored: Sequence[str] = ()
    """Columns of the file that are neither the target nor features."""
    bases: Mapping[str, int] = field(default_factory=dict)
    """The number that was subtracted from a column's whole numbers because float64 can't represent
    them, by column. Columns from which nothing was subtracted are omitted."""
    num_rounded: Mapping[str, int] = field(default_factory=dict)
    """Number of values that still had to be rounded to float64, by column."""
    hints: Mapping[str, str] = field(default_factory=dict)
    """Options with which the values of a column of categories would be numbers, by column."""
    shifts: Mapping[str, float] = field(default_factory=dict)
    """The number to add to a column's values to make them relative to `bases`, by column."""

    @property
    def numeric_sources(self) -> tuple[str, ...]:
        """(F,): the column of the file for each column of `numeric`."""
        return sources_of(self.numeric_names, self.date_names)


def sources_of(numbers: Sequence[str], dates: Sequence[str]) -> tuple[str, ...]:
    """The name of each column of numbers, and the name of each date once for each of its parts."""
    return (*numbers, *(name for name in dates for _ in PARTS))


@dataclass(frozen=True)
class Tokens:
    """A text as one sequence of numbers."""

    ids: npt.NDArray[Any]
    """(T,) uint8, uint16 or uint32; may be a read-only memory map."""
    vocabulary_size: int
    """256 if a token is a byte."""
    fingerprint: str
    """SHA-256 of the content, in hex."""
    tokenizer_json: bytes | None
    """The tokenizer's file, to be stored with the result; None if a token is a byte."""
    num_training: int | None = None
    """Number of tokens for training, which come first; the others are for validation. None if the
    files do not define a division."""
    num_left_out: int = 0
    """Number of files for testing."""


def is_data(name: str) -> bool:
    """Whether a file or folder is part of a data set, by its name. Hidden files are not, nor are
    files that operating systems and storage servers add."""
    return not name.startswith(".") and name.casefold() not in _LEFT_BY_SYSTEMS


@dataclass(frozen=True)
class Listed:
    """A file as its source lists it, before the file is read."""

    name: str
    """Path within the folder, with `/` between parts; for a single file, the last part."""
    size_bytes: int | None
    version: str
    """A text that changes with the content: an ETag, or a modification time."""
    path: Path | None = None
    """The path of a file on this machine; None for other files."""


@dataclass(frozen=True)
class Listing:
    files: tuple[Listed, ...]
    """Sorted by name."""
    is_folder: bool
    trusted_s: float | None = None
    """Seconds for which the versions are valid, if the source has none; None if always."""


class Origin(Protocol):
    def listing(self) -> Listing:
        """Raises DataError, or SourceUnavailableError."""

    def fetch(self, file: Listed, sink: Sink) -> None:
        """Pass all bytes to `sink`, in order. Raises DataError, SourceUnavailableError, or
        TransferError if another try from the start may help."""


class TransferError(Exception):
    """The transfer broke off, or delivered another number of bytes than announced."""
