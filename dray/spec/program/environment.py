"""The part of a job document that defines the packages and environment variables of the ranks."""

from __future__ import annotations

import re
from typing import Annotated, Final, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from dray.spec.fields import Document, wrong

MAX_TEXT: Final = 256 << 10
"""Maximum number of characters in the requirements, and of bytes in all variables together."""
MAX_VARIABLE_BYTES: Final = (128 << 10) - 2
"""Maximum number of bytes in a variable's name and value in UTF-8. Linux can't start a program with
a longer variable. Linux's limit also includes the `=` and the terminating NUL."""
OWN_VARIABLES: Final = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
        *("CUDA_VISIBLE_DEVICES", "TMPDIR", "PYTHONPATH", "PYTHONHOME", "TF_CONFIG"),
        *("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
        *("DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"),
        *("DMLC_NUM_SERVER", "DMLC_NUM_WORKER"),
    }
)
"""Variables that dray sets for ranks, in addition to variables with one of the OWN_PREFIXES."""
OWN_PREFIXES: Final = ("DRAY_", "TORCHELASTIC_", "RAY_", "OMPI_COMM_WORLD_")
_READ_AT_START: Final = ("LD_", "PYTHON", "MALLOC_", "GLIBC_")
_HAVE_EFFECT: Final = ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONDONTWRITEBYTECODE")
"""Variables that are read when an interpreter starts, but that a document can set anyway: ranks
already behave as if they were set, or they only affect child processes."""
_FILE_OPTIONS: Final = (
    *("-r", "--requirement", "--requirements", "-c", "--constraint", "--constraints"),
)
_EDITABLE: Final = ("-e", "--editable")
_URL_OPTIONS: Final = ("-i", "--index-url", "--extra-index-url", "-f", "--find-links")
_OTHER_OPTIONS: Final = (
    *("--no-index", "--pre", "--prefer-binary", "--no-binary", "--only-binary"),
    "--require-hashes",
)
_NAMED: Final = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*(\[[^\]]*\]\s*)?"
    r"(@\s*(?P<source>\S.*)|[<>=!~(;].*|--hash.*|)"
)
"""A named requirement (PEP 508) with a URL, versions, or neither."""
_ARCHIVES: Final = (".whl", ".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".lz", ".lzma")
_URL: Final = re.compile(r"(?<![a-z+])[a-z+]+://\S+", re.IGNORECASE)
_WEB: Final = re.compile(r"(git\+)?https?://[^\s/\\?#@]+([/?#\s]|$)", re.IGNORECASE)


def is_read_at_start(name: str) -> bool:
    """Whether a process reads the variable only before it runs any Python code."""
    return name.startswith(_READ_AT_START) and name not in _HAVE_EFFECT


def _unfit_variable(name: str) -> str | None:
    if name in OWN_VARIABLES or name.startswith(OWN_PREFIXES):
        return f"{name} is set by dray itself"
    return None


def _not_our_own(name: str) -> str:
    if (why := _unfit_variable(name)) is not None:
        raise ValueError(why)
    return name


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not contain a NUL character")
    return value


def _travels(text: str) -> str:
    """Refuse requirements that name a file or would reveal an environment variable of the node.
    Return the text without a leading byte order mark, which some editors add."""
    text = text.removeprefix("\ufeff")
    for line in _joined(text):
        if "${" in line:
            raise ValueError(
                "a requirement contains ${...}, but variables are not expanded on the nodes"
            )
        for url in _URL.findall(line):
            _without_password(url)
        if line.startswith("-"):
            _check_option(line)
        else:
            _check_requirement(line)
    return text


def _joined(text: str) -> list[str]:
    """Return the non-empty lines without comments, with continuation lines joined."""
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
    whole = "\n".join(lines).replace("\\\n", " ")
    return [line.strip() for line in whole.splitlines() if line.strip()]


def _check_option(line: str) -> None:
    word, value = re.match(r"(--[^\s=]{0,200}|-.?)[\s=]*(.*)", line).groups()  # type: ignore[union-attr]
    if word in _EDITABLE:
        raise ValueError(
            f"{word} names a package on your machine: upload it as part of the code, and list its "
            "requirements"
        )
    if word in _FILE_OPTIONS:
        raise ValueError(
            f"{word} names a file, but files are not sent along with requirements: insert the "
            "lines of the file instead of its name"
        )
    if word in _URL_OPTIONS:
        _check_source(value, word)
    elif word not in _OTHER_OPTIONS:
        raise ValueError(f"the option {word} is not allowed in the requirements of a job")


def _check_requirement(line: str) -> None:
    shown = re.match(r"[\w./~-]{0,200}", line)[0] or "a line"  # type: ignore[index]
    if (named := _NAMED.fullmatch(line)) is None:
        _check_source(line, shown)
    elif named["source"] is not None or named["name"].lower().endswith(_ARCHIVES):
        _check_source(named["source"] or "", shown)
    elif _URL.search(line):
        raise ValueError(f"{shown} contains a URL that is not in the form NAME @ URL")


def _check_source(source: str, shown: str) -> None:
    """Raise ValueError unless the source is an index or an https:// URL. The message contains
    `shown` instead of the source, because the source might contain a password."""
    if not _WEB.match(source):
        raise ValueError(
            f"{shown} must come from an index or an https:// URL: nodes can't read local paths, so "
            "upload a package from your machine as part of the code"
        )


def _has_name(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.username or parts.password)
    except ValueError:
        return False


def _without_password(url: str) -> str:
    if _has_name(url):
        raise ValueError(
            "a URL must not contain a name, password or token: put them into a secret, and name "
            "the secret in environment.index"
        )
    return url


VariableName = Annotated[
    str,
    StringConstraints(max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"),
    AfterValidator(_not_our_own),
]
VariableValue = Annotated[str, StringConstraints(max_length=128 << 10), AfterValidator(_no_nul)]
PackageSpec = Annotated[
    str,
    StringConstraints(min_length=1, max_length=1024, pattern=r"^[^\n\r\x00]+$"),
    AfterValidator(_travels),
]
ShellCommand = Annotated[
    str, StringConstraints(min_length=1, max_length=16 << 10), AfterValidator(_no_nul)
]


class PackageIndex(Document):
    """A package index that is searched before the default index."""

    url: Annotated[
        str,
        StringConstraints(max_length=2048, pattern=r"^https?://[^\s#{}]+$"),
        AfterValidator(_without_password),
    ]
    """URL of the index, as in `pip install --index-url`."""
    secret: VariableName | None = None
    """Name of the secret with the credentials, in the form `NAME:PASSWORD` or as a single token."""


class Environment(Document):
    """Packages and environment variables of the ranks. Packages are installed once per node, in
    addition to the node's own packages, while the job is waiting and holds no slots."""

    python_packages: Annotated[list[PackageSpec], Field(max_length=1000)] = []
    """Requirements as in `pip install`, such as `transformers>=4.50`."""
    requirements: (
        Annotated[str, StringConstraints(max_length=MAX_TEXT), AfterValidator(_travels)] | None
    ) = None
    """Contents of a requirements file, instead of `python_packages`; `dray submit --requirements
    FILE` fills it in."""
    index: PackageIndex | None = None
    """Package index for private packages."""
    setup: Annotated[list[ShellCommand], Field(max_length=100)] = []
    """Shell commands that run once on each node after the packages are installed, in the folder of
    the installed packages."""
    env: Annotated[dict[VariableName, VariableValue], Field(max_length=1000)] = {}
    """Environment variables for every rank."""
    secrets: Annotated[list[VariableName], Field(max_length=100)] = []
    """Names of files in the nodes' secrets folder (`DRAY_SECRETS_DIR`). For each file, ranks get an
    environment variable with the file's name, set to the file's content."""

    @property
    def is_built(self) -> bool:
        """Whether nodes have to install packages or run commands for the environment."""
        return bool(self.python_packages or (self.requirements or "").strip() or self.setup)

    @property
    def addresses(self) -> list[tuple[str, str]]:
        """(JSON pointer of the field, URL) for each URL from which packages are installed."""
        texts = {
            f"/environment/python_packages/{number}": package
            for number, package in enumerate(self.python_packages)
        }
        texts["/environment/requirements"] = self.requirements or ""
        found = [
            (pointer, url)
            for pointer, text in texts.items()
            for line in _joined(text)
            for url in _URL.findall(line)
        ]
        if self.index is not None:
            found.append(("/environment/index/url", self.index.url))
        return found

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.python_packages and self.requirements is not None:
            raise wrong(
                "/environment/requirements",
                "can't be combined with python_packages: use only one of them",
            )
        total = 0
        for name, value in self.env.items():
            size = len(name.encode()) + len(value.encode())
            if size > MAX_VARIABLE_BYTES:
                raise wrong(
                    f"/environment/env/{name}",
                    f"has {size} bytes including its name, but Linux allows at most "
                    f"{MAX_VARIABLE_BYTES}: store the value in a file that is uploaded with the "
                    "code",
                )
            total += size
        if total > MAX_TEXT:
            raise wrong("/environment/env", f"has more than {MAX_TEXT} bytes in total")
        both = sorted(set(self.env) & set(self.secrets))
        if both:
            raise wrong("/environment/secrets", f"contains {both[0]}, which is also set in env")
        return self


def check_recipe(environment: Environment) -> None:
    """Raise ValueError with the field if a variable would be set too late for the ranks of a
    recipe."""
    for name in environment.env:
        if is_read_at_start(name):
            raise wrong(
                f"/environment/env/{name}",
                "is read when an interpreter starts, but the ranks of a recipe are forked from "
                "a running interpreter: set the variable on the nodes (DRAY_RANK_ENV)",
            )
