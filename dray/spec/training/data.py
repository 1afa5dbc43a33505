"""The source of the samples and its format."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Final, Literal, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import AfterValidator, Field, StringConstraints, field_validator, model_validator

from dray.spec.fields import ColumnName, Document, Int, Number, PlainText, Sha256, Size

SKLEARN_SETS: Final = ("breast_cancer", "diabetes", "digits", "iris", "wine")
SCHEMES: Final = ("file", "http", "https", "s3", "sklearn")
Format = Literal["images", "npz", "csv", "parquet", "text", "sklearn"]
Missing = Literal["error", "drop", "mean", "median", "most_frequent", "indicator"]

_UNIT = r"^[^\s\d.,+'_-]([^\d.,+'_-]{0,14}[^\s\d.,+'_-])?$"
_DELIMITER = r"^(tab|[\t !#-*,/:-@\[-^`{-~])$"
_SECRET_PARAMETER = re.compile(
    r"((signature|credential|token|key|secret|password|passwd|pwd|auth)s?|\b(sig|pass))$"
)
_SUFFIXES: Final[dict[str, Format]] = {
    ".csv": "csv",
    ".npz": "npz",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".tar": "images",
    ".tgz": "images",
    ".tsv": "csv",
    ".txt": "text",
    ".zip": "images",
}


_OF_A_URL: Final = r"^[^\s\\]+$"


def _source_url(value: str) -> str:
    if re.fullmatch(_OF_A_URL, value) is None:
        raise ValueError("must not contain a backslash or a space: a URL has %5C and %20 for them")
    try:
        url = urlsplit(value)
        port_is_sound = url.port is None or url.port > 0
    except ValueError as error:
        raise ValueError(f"is not a URL: {error}") from None
    if url.scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ValueError(f"must be a URL that begins with one of {known}")
    if url.scheme == "sklearn" and (url.netloc not in SKLEARN_SETS or url.path.strip("/")):
        sets = ", ".join(f"sklearn://{name}" for name in SKLEARN_SETS)
        raise ValueError(f"scikit-learn's sets are {sets}")
    if url.scheme == "file" and (url.netloc or not url.path.startswith("/")):
        raise ValueError("must name an absolute path: file:///path, the same on every node")
    if url.scheme in ("http", "https", "s3") and not (url.hostname and port_is_sound):
        raise ValueError("names no host" if url.scheme != "s3" else "names no bucket")
    if url.username is not None or url.password is not None:
        raise ValueError(
            "must not hold a user or password: name a file of the nodes' in data.credentials"
        )
    for name, _ in parse_qsl(url.query, keep_blank_values=True):
        if _SECRET_PARAMETER.search(name.lower().replace("_", "-")):
            raise ValueError(
                f"must not hold a secret (its parameter {name!r} looks like one): "
                "name a file of the nodes' in data.credentials"
            )
    if url.scheme == "file" and "\0" in unquote(url.path):
        raise ValueError("must not contain %00, a NUL: no file's name has one")
    if ".." in PurePosixPath(url.path).parts:
        raise ValueError("must not contain '..'")
    return value


def _encoding(value: str) -> str:
    try:
        "a".encode(value)
    except (LookupError, ValueError):
        raise ValueError("is no encoding of text that Python knows, such as latin-1") from None
    return value


SourceUrl = Annotated[
    PlainText,
    StringConstraints(min_length=1, max_length=2048),
    AfterValidator(_source_url),
    Field(json_schema_extra={"pattern": _OF_A_URL}),
]


class Numbers(Document):
    """How the numbers of a file are written, besides `decimal`."""

    thousands: Literal[",", ".", " ", "'", "_"] | None = None
    """Separator between groups of digits: with "," 1,163.74 is a number. A space also matches
    non-breaking spaces."""
    units: Annotated[
        list[Annotated[PlainText, StringConstraints(pattern=_UNIT)]], Field(max_length=20)
    ] = []
    """Texts before or after a number that are not part of it: with `["$", "%"]`, $100.50 is 100.5
    and 5% is 5."""


class Data(Document):
    """Where the samples come from and how they are split."""

    source: SourceUrl = "sklearn://digits"
    """URL of a file, or of a folder for formats with many files: `file:///path`, `s3://bucket/key`,
    `https://host/path`, or a data set that comes with scikit-learn, such as `sklearn://digits`."""
    format: Literal["images", "npz", "csv", "parquet", "text"] | None = None
    """Format of the source; by default derived from its extension, or for a folder from the recipe.
    images: a folder, or a zip or tar archive of a folder, that has a folder of images for each
    class; for segmentation it has the folders `images` and `masks`, whose files are paired by name.
    npz: numpy arrays of equal length, samples first. text: a UTF-8 file, or a folder of `.txt`
    files."""
    target: ColumnName | None = None
    """Column to predict (csv, parquet), or array of labels or masks (npz; by default `y`)."""
    features: Annotated[list[ColumnName], Field(min_length=1, max_length=10_000)] | None = None
    """Columns to predict from (csv, parquet; by default all other columns), or the array of inputs
    (npz; by default `x`)."""
    categorical: Annotated[list[ColumnName], Field(max_length=10_000)] = []
    """Columns of numbers to treat as categories; columns of text are always categories."""
    delimiter: Annotated[str, StringConstraints(pattern=_DELIMITER)] | None = None
    """Separator of the fields of a line (csv): one character that is no letter, digit or quotation
    mark, or `tab`. By default a comma, or a tab for a `.tsv` file."""
    encoding: Annotated[
        str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,40}$"), AfterValidator(_encoding)
    ] = "utf-8"
    """Character encoding of the file (csv), such as `latin-1`, `cp1252`, `utf-16`."""
    decimal: Literal[".", ","] = "."
    """Decimal separator of numbers (csv)."""
    numbers: Numbers = Numbers()
    """Separators and units to leave out of numbers (csv)."""
    missing: Missing = "error"
    """Treatment of missing values (csv, parquet). error: the job fails, and the error names the row
    and column. drop: the row is left out. mean, median: numbers are replaced by the mean or median
    of the training split, categories by the most frequent category. most_frequent: numbers and
    categories are replaced by the most frequent value. indicator: as mean, with an additional 0/1
    column; a missing category becomes a separate category."""
    missing_columns: Annotated[dict[ColumnName, Missing], Field(max_length=10_000)] = {}
    """Treatment by column, where it differs from `missing`. The target allows error and drop."""
    classes: Annotated[list[ColumnName], Field(min_length=2, max_length=255)] | None = None
    """Names of the classes of a mask's pixels, in the order of their numbers: the first is 0, the
    background. By default, the classes are the numbers that occur in the masks."""
    image_size: (
        tuple[Annotated[Int, Field(ge=1, le=4096)], Annotated[Int, Field(ge=1, le=4096)]] | None
    ) = None
    """(height, width) in pixels to which images and masks are scaled; unset, all must have the same
    size."""
    size_bytes: Size | None = None
    """Expected size of a source that is one file."""
    sha256: Sha256 | None = None
    """Expected SHA-256 of a source that is one file."""
    credentials: (
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")] | None
    ) = None
    """Name of a file with credentials that the cluster's operator put on the nodes. Unset, the
    node's own identity is used."""
    loader_workers: Annotated[Int, Field(ge=0, le=64)] = 0
    """Number of processes per rank that prefetch batches of a split that is too large to stay on
    the device; 0 prefetches in a thread."""
    validation_fraction: Annotated[Number, Field(gt=0.0, lt=1.0)] = 0.2
    """Share of the samples that is held out for the `val/` metrics."""

    @property
    def scheme(self) -> str:
        return urlsplit(self.source).scheme

    @property
    def known_format(self) -> Format | None:
        """The given format, or else the format of the source's extension; None if unknown."""
        if self.scheme == "sklearn":
            return "sklearn"
        if self.format is not None:
            return self.format
        return _SUFFIXES.get(self._suffix)

    @property
    def known_delimiter(self) -> str:
        """The given delimiter, or else the delimiter of the source's extension."""
        if self.delimiter is None:
            return "\t" if self._suffix == ".tsv" else ","
        return "\t" if self.delimiter == "tab" else self.delimiter

    @property
    def _suffix(self) -> str:
        path = PurePosixPath(urlsplit(self.source).path.removesuffix(".gz"))
        return path.suffix.lower()

    def missing_in(self, column: str) -> Missing:
        """Return the treatment of missing values of the column."""
        found = self.missing_columns.get(column, self.missing)
        return "error" if column == self.target and found != "drop" else found

    @field_validator("classes")
    @classmethod
    def _each_class_once(cls, names: list[str] | None) -> list[str] | None:
        for number, name in enumerate(names or ()):
            if names and name in names[:number]:
                raise ValueError(f"names {name!r} twice")
        return names

    @model_validator(mode="after")
    def _options_belong_to_the_format(self) -> Self:
        if self.scheme == "sklearn":
            for option in ("format", "target", "features", "size_bytes", "sha256", "credentials"):
                if getattr(self, option) is not None:
                    raise ValueError(f"{option} is not for sets that come with scikit-learn")
        return self
