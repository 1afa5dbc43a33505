"""The program uv, which resolves and installs packages, and the interpretation of its output."""

from __future__ import annotations

import re

from ray_workers.node.shared_work import NotDone
from ray_workers.shared.node_needs import BuildState

_UNREACHABLE = re.compile(
    r"error sending request|Failed to fetch|Request failed after|client error|dns error"
    r"|timed out|Connection (refused|reset)|status server error|No space left on device"
    r"|5\d\d (Internal|Bad Gateway|Service|Gateway)",
    re.IGNORECASE,
)
_REFUSED = re.compile(r"HTTP status client error|401 Unauthorized|403 Forbidden|404 Not Found")
INSTALLED = re.compile(r"^ \+ (?P<name>[^=@\s]+)==(?P<version>\S+)(?: \(from (?P<url>.+)\))?$")
_SETTINGS = frozenset(
    {
        *("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS"),
        *("UV_NO_INDEX", "UV_INDEX_STRATEGY", "UV_KEYRING_PROVIDER", "UV_INSECURE_HOST"),
        *("UV_OFFLINE", "UV_SYSTEM_CERTS", "UV_NATIVE_TLS", "UV_CONFIG_FILE", "UV_NO_CONFIG"),
        *("UV_HTTP_TIMEOUT", "UV_HTTP_CONNECT_TIMEOUT", "UV_HTTP_RETRIES", "UV_REQUEST_TIMEOUT"),
        *("UV_CONCURRENT_DOWNLOADS", "UV_CONCURRENT_BUILDS", "UV_CONCURRENT_INSTALLS"),
    }
)
_CREDENTIALS = re.compile(r"UV_INDEX_(?!JOB_)\w+_(USERNAME|PASSWORD)")


def is_setting(name: str) -> bool:
    """Whether this variable of the node is passed to uv. These variables set package sources and
    time limits. Other variables would change which packages are installed, or where they are
    installed."""
    return name in _SETTINGS or _CREDENTIALS.fullmatch(name) is not None


def uv_program() -> str:
    """Return the path of the uv program. Raises NotDone if uv is not installed."""
    try:
        from uv import find_uv_bin

        return find_uv_bin()
    except (ImportError, FileNotFoundError):
        raise NotDone(
            "uv, which installs packages, is missing on this node: run pip install 'dray[worker]'",
            BuildState.UNREACHABLE,
        ) from None


def installed() -> list[tuple[str, str]]:
    from importlib.metadata import distributions

    found = {each.metadata["Name"]: each.version for each in distributions()}
    return sorted((name, version) for name, version in found.items() if name)


def names_source(line: str) -> bool:
    """Whether a line of requirements sets a package source."""
    return line.lstrip().startswith(
        ("--index-url", "-i", "--extra-index-url", "--find-links", "-f ", "--no-index", "--pre")
    )


def sentence_of(output: str) -> str:
    """Return uv's error message on one line: the error and its causes."""
    lines = [re.sub(r"^\W*(cause:)?\s*", "", line) for line in output.splitlines()]
    first = next((n for n, line in enumerate(lines) if line.startswith(("error", "Failed"))), None)
    if first is None:
        return next((line for line in reversed(lines) if line), "")
    words = filter(None, lines[first:])
    return ": ".join(words).removeprefix("error: ")[:2000]


def state_of(output: str) -> BuildState:
    """Return UNREACHABLE if installing the same requirements may succeed later, otherwise
    FAILED."""
    if _REFUSED.search(output) or not _UNREACHABLE.search(output):
        return BuildState.FAILED
    return BuildState.UNREACHABLE
