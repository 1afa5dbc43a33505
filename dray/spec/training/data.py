"""The source of the samples, and its format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import AfterValidator, Field, StringConstraints, field_validator, model_validator

from dray.input import model_names
from dray.spec.fields import ColumnName, Document, Int, Number, PlainText, Sha256, Size
from dray.spec.program import base_files

SKLEARN_SETS: Final = ("breast_cancer", "diabetes", "digits", "iris", "wine")
SCHEMES: Final = ("file", "http", "https", "s3", "sklearn", "upload")
Format = Literal["images", "npz", "csv", "parquet", "text", "jsonl", "sklearn"]
Missing = Literal["error", "drop", "mean", "median", "most_frequent", "indicator"]
ExampleForm = Literal["messages", "completion", "text", "sharegpt", "alpaca"]

_UNIT = r"^[^\s\d.,+'_-]([^\d.,+'_-]{0,14}[^\s\d.,+'_-])?$"
_DELIMITER = r"^(tab|[\t !#-*,/:-@\[-^`{-~])$"
_SECRET_PARAMETER = re.compile(
    r"((signature|credential|token|key|secret|password|passwd|pwd|auth)s?|\b(sig|pass))$"
)
_SUFFIXES: Final[dict[str, Format]] = {
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".npz": "npz",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".tar": "images",
    ".tgz": "images",
    ".tsv": "csv",
    ".txt": "text",
    ".zip": "images",
}


_FILE_ID = "file-[0-9a-z]{26}"
_UPLOADED = re.compile(rf"upload://({_FILE_ID})(\?validation=({_FILE_ID}))?")
OF_A_URL: Final = r"^[^\s\\]+$"


def source_url(value: str) -> str:
    """Return the URL of a source. Raises ValueError if it can't be one."""
    if re.fullmatch(OF_A_URL, value) is None:
        raise ValueError("must not contain a backslash or a space: write %5C and %20 instead")
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
        raise ValueError(f"must be one of scikit-learn's data sets: {sets}")
    if url.scheme == "file" and (url.netloc or not url.path.startswith("/")):
        raise ValueError(
            "must have an absolute path, such as file:///path, that is valid on every node"
        )
    if url.scheme == "upload" and _UPLOADED.fullmatch(value) is None:
        raise ValueError(
            "must be upload://FILE_ID with the id of an uploaded file, or "
            "upload://FILE_ID?validation=FILE_ID"
        )
    if url.scheme in ("http", "https", "s3") and not (url.hostname and port_is_sound):
        raise ValueError("names no host" if url.scheme != "s3" else "names no bucket")
    if url.username is not None or url.password is not None:
        raise ValueError(
            "must not contain a user name or password: set data.credentials to the name of a "
            "file on the nodes"
        )
    for name, _ in parse_qsl(url.query, keep_blank_values=True):
        if _SECRET_PARAMETER.search(name.lower().replace("_", "-")):
            raise ValueError(
                f"must not contain a secret, but the parameter {name!r} looks like one: set "
                "data.credentials to the name of a file on the nodes"
            )
    if url.scheme == "file" and "\0" in unquote(url.path):
        raise ValueError("must not contain %00: file names can't contain NUL")
    if ".." in PurePosixPath(url.path).parts:
        raise ValueError("must not contain '..'")
    return value


def _encoding(value: str) -> str:
    try:
        "a".encode(value)
    except (LookupError, ValueError):
        raise ValueError("must be a text encoding that Python supports, such as latin-1") from None
    return value


def uploaded_files(url: str) -> list[str]:
    """Return the ids of the uploaded files that a source names: the training file and, if there is
    one, the validation file. Empty for other sources."""
    match = _UPLOADED.fullmatch(url)
    return [] if match is None else [found for found in match.group(1, 3) if found]


SourceUrl = Annotated[
    PlainText,
    StringConstraints(min_length=1, max_length=2048),
    AfterValidator(source_url),
    Field(json_schema_extra={"pattern": OF_A_URL}),
]


def base_url(value: str) -> str:
    """Return the URL of the folder of a base model. Raises ValueError if it can't be one."""
    if value.startswith("hf://"):
        if re.match(base_files.OF_HUB, value) is None:
            raise ValueError(
                "must name a model on the hub and a commit, hf://org/name@COMMIT, where COMMIT is "
                "40 hexadecimal digits: the files of a commit never change"
            )
        return value
    if value.startswith("job://"):
        if base_files.job_of(value) is None:
            raise ValueError("must name a job by its id, such as job://job-0abc")
        return value
    if value.startswith(model_names.SCHEME):
        return model_names.checked_reference(value)
    if not value.startswith(("file:", "s3:", "http:", "https:")):
        raise ValueError(
            "must be the URL of a folder: file:///path, s3://bucket/prefix, https://host/path, "
            "hf://org/name@COMMIT, job://ID or model://NAME@VERSION"
        )
    return source_url(value)


CredentialsName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]


class Numbers(Document):
    """How numbers are written in the file, apart from the decimal separator, which `decimal`
    sets."""

    thousands: Literal[",", ".", " ", "'", "_"] | None = None
    """Separator between groups of digits. For example, with the separator ",", the string
    "1,163.74" is read as 1163.74. A space also matches non-breaking spaces."""
    units: Annotated[
        list[Annotated[PlainText, StringConstraints(pattern=_UNIT)]], Field(max_length=20)
    ] = []
    """Units to ignore before or after a number. With `["$", "%"]`, $100.50 is read as 100.5, and 5%
    as 5."""


Repeat = Annotated[Number, Field(ge=0.001, le=1000.0)]


class MixedSource(Document):
    """One of several sources of examples."""

    source: SourceUrl
    """URL of a file or folder, as in `data.source`."""
    repeat: Repeat = 1.0
    """How often an epoch contains each training example of this source. With 2, an epoch contains
    each of them twice. With 0.5, it contains a half of them, chosen at random by the seed; the
    other half is never used. Validation examples are not repeated."""
    format: Literal["csv", "parquet", "jsonl"] | None = None
    """Format of this source, as in `data.format`."""
    examples: ExampleForm | None = None
    """Form of the examples of this source, as in `data.examples`."""


class Data(Document):
    """Where the samples come from and how they are split."""

    source: SourceUrl = "sklearn://digits"
    """URL of a file, or of a folder for formats that consist of many files: `file:///path`,
    `s3://bucket/key` or `https://host/path`. Data sets that are included in scikit-learn have URLs
    such as `sklearn://digits`. `upload://FILE_ID` is a file that was uploaded to the server, and
    `upload://FILE_ID?validation=FILE_ID` is two files, which are the splits."""
    format: Literal["images", "npz", "csv", "parquet", "text", "jsonl"] | None = None
    """Format of the source. By default, the format is derived from the file extension, or from the
    recipe if the source is a folder. images: a folder, or a zip or tar archive of one, with a
    subfolder of images for each class; for segmentation, the subfolders are `images` and `masks`,
    and files are paired by name. npz: NumPy arrays of equal length whose first dimension is the
    sample. text: a UTF-8 file, or a folder of `.txt` files. jsonl: a UTF-8 file with a JSON object
    in each line, or a folder of `.jsonl` files."""
    target: ColumnName | None = None
    """csv, parquet: column to predict. npz: array of labels or masks; defaults to `y`."""
    features: Annotated[list[ColumnName], Field(min_length=1, max_length=10_000)] | None = None
    """csv, parquet: columns to use as inputs; defaults to all columns except the target. npz: array
    of inputs; defaults to `x`."""
    categorical: Annotated[list[ColumnName], Field(max_length=10_000)] = []
    """Numeric columns to treat as categories. Text columns are always treated as categories."""
    delimiter: Annotated[str, StringConstraints(pattern=_DELIMITER)] | None = None
    """csv: field separator. Either `tab`, or one character that is not a letter, digit or quotation
    mark. Defaults to a comma, and to a tab for `.tsv` files."""
    encoding: Annotated[
        str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,40}$"), AfterValidator(_encoding)
    ] = "utf-8"
    """csv: character encoding of the file, such as `latin-1`, `cp1252` or `utf-16`."""
    decimal: Literal[".", ","] = "."
    """csv: decimal separator."""
    numbers: Numbers = Numbers()
    """csv: separators and units to remove from numbers."""
    missing: Missing = "error"
    """csv, parquet: how to handle missing values. error: the job fails with an error that names the
    row and the column. drop: the row is skipped. mean, median: missing numbers are replaced by the
    mean or median of the training split, and missing categories by the most frequent category.
    most_frequent: missing numbers and categories are replaced by the most frequent value.
    indicator: like mean, but with an additional 0/1 column; missing categories become a separate
    category."""
    missing_columns: Annotated[dict[ColumnName, Missing], Field(max_length=10_000)] = {}
    """Exceptions to `missing` for individual columns. For the target column, only `error` and
    `drop` are supported."""
    classes: Annotated[list[ColumnName], Field(min_length=2, max_length=255)] | None = None
    """Names of the classes of mask pixels. The position of a name in the list is the pixel value of
    the class; the first class, with the pixel value 0, is the background. By default, the classes
    are the pixel values that occur in the masks."""
    image_size: (
        tuple[Annotated[Int, Field(ge=1, le=4096)], Annotated[Int, Field(ge=1, le=4096)]] | None
    ) = None
    """(height, width) in pixels to which images and masks are resized. If unset, all images must
    have the same size."""
    size_bytes: Size | None = None
    """Expected size, if the source is a single file."""
    sha256: Sha256 | None = None
    """Expected SHA-256 digest, if the source is a single file."""
    credentials: CredentialsName | None = None
    """Name of a credentials file that the cluster's operator has placed on the nodes. If unset, the
    node's own identity is used."""
    loader_workers: Annotated[Int, Field(ge=0, le=64)] = 0
    """Number of processes per rank that prefetch batches. If 0, batches are prefetched in a thread.
    Only used for splits that are too large to be kept on the device."""
    validation_fraction: Annotated[Number, Field(gt=0.0, lt=1.0)] = 0.2
    """Fraction of the samples that is held out for the `val/` metrics."""
    examples: ExampleForm | None = None
    """fine_tuning with the method sft: form of the examples. messages: conversations in OpenAI's
    form. completion: prompts and completions, as in TRL. text: plain texts. sharegpt:
    `conversations` with `from` and `value`. alpaca: `instruction`, `input` and `output`. If unset,
    the form is recognised by the names of the fields or columns."""
    sources: Annotated[list[MixedSource], Field(min_length=1, max_length=64)] | None = None
    """fine_tuning: several sources instead of `source`, whose examples are mixed."""
    validation: SourceUrl | None = None
    """fine_tuning: URL of a file or folder with the validation examples. If unset, they are the
    files of the source that are named like a validation split, or a random part of the source."""

    @property
    def scheme(self) -> str:
        return urlsplit(self.source).scheme

    @property
    def known_format(self) -> Format | None:
        """The given format, or else the format that the source's extension implies; None if
        unknown."""
        if self.scheme == "sklearn":
            return "sklearn"
        if self.format is not None:
            return self.format
        if self.scheme == "upload":
            return "jsonl"
        return _SUFFIXES.get(self._suffix)

    @property
    def mixed(self) -> list[Data]:
        """One `Data` object for each source, with only this source."""
        if self.sources is None:
            return [self]
        own: list[Data] = []
        for one in self.sources:
            update = {"source": one.source, "sources": None, "validation": None}
            given = {"format": one.format, "examples": one.examples}
            update |= {name: value for name, value in given.items() if value is not None}
            own.append(self.model_copy(update=update))
        return own

    @property
    def held_out(self) -> Data | None:
        """The data with the validation examples as the only source; None if there is no such
        source."""
        if self.validation is None:
            return None
        update = {"source": self.validation, "sources": None, "validation": None}
        return self.model_copy(update={**update, "size_bytes": None, "sha256": None})

    @property
    def known_delimiter(self) -> str:
        """The given delimiter, or else the delimiter that the source's extension implies."""
        if self.delimiter is None:
            return "\t" if self._suffix == ".tsv" else ","
        return "\t" if self.delimiter == "tab" else self.delimiter

    @property
    def _suffix(self) -> str:
        path = PurePosixPath(urlsplit(self.source).path.removesuffix(".gz"))
        return path.suffix.lower()

    def missing_in(self, column: str) -> Missing:
        """Return how missing values of the column are handled."""
        found = self.missing_columns.get(column, self.missing)
        return "error" if column == self.target and found != "drop" else found

    @field_validator("classes")
    @classmethod
    def _each_class_once(cls, names: list[str] | None) -> list[str] | None:
        for number, name in enumerate(names or ()):
            if names and name in names[:number]:
                raise ValueError(f"lists {name!r} twice")
        return names

    @model_validator(mode="before")
    @classmethod
    def _the_first_source(cls, given: Any) -> Any:
        """Set `source` to the first of several sources."""
        sources = given.get("sources") if isinstance(given, Mapping) else None
        if not isinstance(sources, list) or not sources or not isinstance(sources[0], Mapping):
            return given
        return {"source": sources[0].get("source"), **given}

    @model_validator(mode="after")
    def _one_way_to_name_sources(self) -> Self:
        if self.sources is None:
            return self
        if self.source != self.sources[0].source:
            raise ValueError("source and sources can't be combined: leave one of them out")
        if self.size_bytes is not None or self.sha256 is not None:
            raise ValueError("size_bytes and sha256 are only for a single source: leave them out")
        return self

    @model_validator(mode="after")
    def _options_belong_to_the_format(self) -> Self:
        if self.scheme == "sklearn":
            for option in ("format", "target", "features", "size_bytes", "sha256", "credentials"):
                if getattr(self, option) is not None:
                    raise ValueError(
                        f"{option} does not apply to scikit-learn's data sets: leave it out"
                    )
        return self
