"""The types of data sets that recipes use, and the protocol of their sources."""

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
    """Images of equal size, each with a class."""

    pixels: npt.NDArray[Any]
    """(N, channels, height, width), uint8 or float32; can be a read-only memory map."""
    max_value: float
    """Pixel value of white: 255 for decoded images, 16 for scikit-learn's digits, 1 for floats."""
    labels: npt.NDArray[np.int64]
    """(N,) indices into `classes`."""
    classes: tuple[str, ...]
    fingerprint: str
    """SHA-256 of the content in hexadecimal, which is the same on every node."""
    is_validation: npt.NDArray[np.bool_] | None = None
    """(N,), if folders define a split; otherwise None."""
    num_left_out: int = 0
    """Number of images in test folders."""


@dataclass(frozen=True)
class MaskedImages:
    """Images of equal size, each with a mask that assigns a class to every pixel."""

    pixels: npt.NDArray[Any]
    """(N, channels, height, width), uint8 or float32; can be a read-only memory map."""
    max_value: float
    """Pixel value of white: 255 for decoded images, 1 for floats."""
    masks: npt.NDArray[np.uint8]
    """(N, height, width) indices into `classes`; can be a read-only memory map."""
    classes: tuple[str, ...]
    """The first class is the background."""
    fingerprint: str
    """SHA-256 of the content in hexadecimal."""
    is_validation: npt.NDArray[np.bool_] | None = None
    """Shape (N,) if folders define a split; otherwise None."""
    num_left_out: int = 0
    """Number of images in test folders."""


@dataclass(frozen=True)
class Table:
    """Rows of numbers and categories, and the target to predict."""

    numeric: npt.NDArray[np.float64] | npt.NDArray[np.float32]
    """(N, F) finite values, or NaN for missing values; can be a read-only memory map. Numeric
    columns come first, followed by the parts of each date. Each column's offset in `bases` has been
    subtracted from its values. The type is float32 if float32 represents all values of the source
    exactly."""
    categories: npt.NDArray[np.int32]
    """(N, C) codes in each column's vocabulary, or -1 for missing values; can be a read-only memory
    map."""
    target: npt.NDArray[Any]
    """(N,) int64 codes in `classes`, or float64 values minus the target's offset in `bases`."""
    numeric_names: tuple[str, ...]
    category_names: tuple[str, ...]
    vocabularies: tuple[tuple[str, ...], ...]
    """The values of each category column, in the order of their codes."""
    classes: tuple[str, ...] | None
    """None for regression."""
    target_name: str
    fingerprint: str
    """SHA-256 of the content in hexadecimal."""
    num_missing: Mapping[str, int] = field(default_factory=dict)
    """Number of missing values in each column. Columns without missing values are omitted."""
    num_dropped: int = 0
    """Number of rows that were skipped because a value is missing."""
    date_names: tuple[str, ...] = ()
    ignored: Sequence[str] = ()
    """Columns of the file that are neither the target nor a feature."""
    bases: Mapping[str, int] = field(default_factory=dict)
    """For each column of integers that float64 can't represent, the offset that was subtracted from
    them. Columns without an offset are omitted."""
    num_rounded: Mapping[str, int] = field(default_factory=dict)
    """For each column, the number of values that had to be rounded to float64 even with an
    offset."""
    hints: Mapping[str, str] = field(default_factory=dict)
    """For each category column, the options that would turn its values into numbers."""
    shifts: Mapping[str, float] = field(default_factory=dict)
    """For each column, the number to add to its values to make them relative to `bases`."""

    @property
    def numeric_sources(self) -> tuple[str, ...]:
        """(F,): for each column of `numeric`, the name of the file's column that it was made
        from."""
        return sources_of(self.numeric_names, self.date_names)


def sources_of(numbers: Sequence[str], dates: Sequence[str]) -> tuple[str, ...]:
    """Return the name of each numeric column, and the name of each date column repeated for each of
    its parts."""
    return (*numbers, *(name for name in dates for _ in PARTS))


@dataclass(frozen=True)
class Tokens:
    """A text as a single sequence of token ids."""

    ids: npt.NDArray[Any]
    """(T,) uint8, uint16 or uint32; can be a read-only memory map."""
    vocabulary_size: int
    """256 if tokens are bytes."""
    fingerprint: str
    """SHA-256 of the content in hexadecimal."""
    tokenizer_json: bytes | None
    """Content of the tokenizer's file, which is stored with the result; None if tokens are
    bytes."""
    num_training: int | None = None
    """Number of training tokens, which come first; the remaining tokens are for validation. None if
    the files don't define a split."""
    num_left_out: int = 0
    """Number of test files."""


def is_data(name: str) -> bool:
    """Whether a file or folder is part of a data set, judging by its name. Hidden files, and files
    created by operating systems and storage servers, are not part of a data set."""
    return not name.startswith(".") and name.casefold() not in _LEFT_BY_SYSTEMS


@dataclass(frozen=True)
class Listed:
    """A file as listed by its source, before it is read."""

    name: str
    """Path within the folder, with `/` as separator; for a single file, the file name."""
    size_bytes: int | None
    version: str
    """A string that changes with the content, such as an ETag or a modification time."""
    path: Path | None = None
    """Path of the file on this machine; None for a remote file."""


@dataclass(frozen=True)
class Listing:
    files: tuple[Listed, ...]
    """Sorted by name."""
    is_folder: bool
    trusted_s: float | None = None
    """Seconds for which the listing is valid if the source has no versions; None if there is no
    limit."""


class Origin(Protocol):
    def listing(self) -> Listing:
        """Return the files of the source. Raises DataError or SourceUnavailableError."""

    def fetch(self, file: Listed, sink: Sink) -> None:
        """Pass all bytes to `sink`, in order. Raises DataError, SourceUnavailableError, or
        TransferError if retrying from the start might help."""


class TransferError(Exception):
    """The transfer was interrupted, or delivered a different number of bytes than announced."""
