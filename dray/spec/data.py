"""The source of the samples, and how they are read."""

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

_DELIMITER = r"^(tab|[\t !#-*,/:-@\[-^`{-~])$"
_SECRET_PARAMETERS = ("signature", "credential", "token", "sig", "key", "secret", "password")
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
        if re.split(r"[-_]", name.lower())[-1] in _SECRET_PARAMETERS:
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


class Data(Document):
    """Where the samples come from and how they are split."""

    source: SourceUrl = "sklearn://digits"
    """A file, or a folder where the format is one of many files: `file:///path`, `s3://bucket/key`,
    `https://host/path`, or a set that comes with scikit-learn, `sklearn://digits`."""
    format: Literal["images", "npz", "csv", "parquet", "text"] | None = None
    """By default told by the source's ending; a folder holds what the recipe reads.
    images: a folder, or a zip or tar archive of one, with a folder of images for each class; for
    segmentation with a folder `images` and a folder `masks`, whose files are paired by name.
    npz: numpy arrays of one length, samples first. text: UTF-8, a file or a folder of `.txt`."""
    target: ColumnName | None = None
    """Column to predict (csv, parquet), or the array of labels or masks (npz; by default
    `y`)."""
    features: Annotated[list[ColumnName], Field(min_length=1, max_length=10_000)] | None = None
    """Columns to predict from (csv, parquet; by default all others), or the one array of inputs
    (npz; by default `x`)."""
    categorical: Annotated[list[ColumnName], Field(max_length=10_000)] = []
    """Columns whose numbers are names of categories; columns of text always are."""
    delimiter: Annotated[str, StringConstraints(pattern=_DELIMITER)] | None = None
    """What stands between the fields of a line (csv): one character that is no letter, digit or
    quotation mark, or `tab`. By default a comma, and in a `.tsv` file a tab."""
    encoding: Annotated[
        str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,40}$"), AfterValidator(_encoding)
    ] = "utf-8"
    """How the characters of the file are written (csv), such as `latin-1`, `cp1252`, `utf-16`."""
    decimal: Literal[".", ","] = "."
    """What stands before the fraction of a number (csv)."""
    missing: Missing = "error"
    """What is done about a value that is missing (csv, parquet). error: the job fails, and says
    where. drop: the row is left out. mean, median: numbers are filled in by that of the training
    split, and categories by the most frequent. most_frequent: all are filled in so. indicator:
    as mean, with a 0/1 column besides that says where; of categories it is one of its own."""
    missing_columns: Annotated[dict[ColumnName, Missing], Field(max_length=10_000)] = {}
    """By column, where it is something else than `missing` says. Of the target: error or drop."""
    classes: Annotated[list[ColumnName], Field(min_length=2, max_length=255)] | None = None
    """Names of what a mask's pixels show, by their number: the first is 0, the background. By
    default there are as many classes as the masks have, and the numbers name them."""
    image_size: (
        tuple[Annotated[Int, Field(ge=1, le=4096)], Annotated[Int, Field(ge=1, le=4096)]] | None
    ) = None
    """(height, width) in pixels that images, and their masks, are scaled to; without it all must
    be of one size."""
    size_bytes: Size | None = None
    """What the source's one file must measure."""
    sha256: Sha256 | None = None
    """What the source's one file must hash to."""
    credentials: (
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")] | None
    ) = None
    """Name of a file of credentials that the cluster's operator laid on the nodes. Without it, the
    node's own identity is used."""
    loader_workers: Annotated[Int, Field(ge=0, le=64)] = 0
    """Processes of each rank that read batches ahead, where a split is larger than what is kept on
    the device; 0 reads in a thread."""
    validation_fraction: Annotated[Number, Field(gt=0.0, lt=1.0)] = 0.2
    """Share of the samples kept out of training and used for `val/` metrics."""

    @property
    def scheme(self) -> str:
        return urlsplit(self.source).scheme

    @property
    def known_format(self) -> Format | None:
        """The format as given, or by the source's ending; None if neither tells."""
        if self.scheme == "sklearn":
            return "sklearn"
        if self.format is not None:
            return self.format
        return _SUFFIXES.get(self._suffix)

    @property
    def known_delimiter(self) -> str:
        """The delimiter as given, or by the source's ending."""
        if self.delimiter is None:
            return "\t" if self._suffix == ".tsv" else ","
        return "\t" if self.delimiter == "tab" else self.delimiter

    @property
    def _suffix(self) -> str:
        path = PurePosixPath(urlsplit(self.source).path.removesuffix(".gz"))
        return path.suffix.lower()

    def missing_in(self, column: str) -> Missing:
        """What is done about a missing value of the column."""
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
