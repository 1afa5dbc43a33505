"""The kinds of media, and their limits. Scripts and the service apply the same limits."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class MediaKind(StrEnum):
    HISTOGRAM = "histogram"
    IMAGE = "image"
    AUDIO = "audio"
    TEXT = "text"
    TABLE = "table"
    CONFUSION_MATRIX = "confusion_matrix"
    PR_CURVE = "pr_curve"
    ROC_CURVE = "roc_curve"


FILE_KINDS: Final = frozenset({MediaKind.IMAGE, MediaKind.AUDIO})
"""The kinds whose values are files."""

MAX_RECORDS: Final = 10_000
"""Maximum number of records of a job. A record is one value of one key at one step of one rank."""
MAX_SERIES: Final = 200
"""Maximum number of series of a job. A series is a kind, a key and a rank."""
MAX_JOB_BYTES: Final = 256 << 20
"""Maximum total size of a job's records, including the files of records that were replaced."""
MAX_FILE_BYTES: Final = 2 << 20
MAX_PIXELS: Final = 1 << 24
MAX_SIDE: Final = 8192
"""Maximum width and height of a picture in pixels."""
MAX_VALUE_BYTES: Final = 256 << 10
"""Maximum size of a value that is not a file, as JSON."""
MAX_BINS: Final = 512
MAX_CLASSES: Final = 100
MAX_CURVE_POINTS: Final = 200
MAX_ROWS: Final = 1000
MAX_COLUMNS: Final = 32
MAX_CELL_CHARS: Final = 1024
MAX_TEXT_CHARS: Final = 64 << 10
"""Longer texts are cut. Rows of tables and cells beyond their limits are also left out."""
MAX_NAME_CHARS: Final = 128
"""Maximum length of the name of a class or column."""
MAX_EXACT_INT: Final = 2**53
"""Not all JSON readers represent larger integers exactly."""
