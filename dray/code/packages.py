"""The packages that a folder's requirements.txt, uv.lock or pyproject.toml lists."""

from __future__ import annotations

import codecs
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REQUIREMENTS: Final = "requirements.txt"
LOCK: Final = "uv.lock"
PROJECT: Final = "pyproject.toml"
LIMIT_S: Final = 60.0
_BOMS: Final = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    # UTF-32 precedes UTF-16, because its byte order mark begins with the byte order mark of UTF-16.
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

_INDEXES: Final = (
    *(("uv", "index"), ("uv", "index-url"), ("uv", "extra-index-url")),
    *(("poetry", "source"), ("pdm", "source")),
)
"""Tables that name package indexes. A package of the same name on another index can be a different
package."""


class PackagesUnreadable(Exception):
    """A file's list of packages can't be read. The message states the reason."""


class _NoUv(Exception):
    """uv, which is needed to read uv.lock, is not installed on this machine."""


@dataclass(frozen=True)
class FoundPackages:
    """The packages that one file of the folder lists."""

    source: str
    """The name of the file."""
    requirements: str
    """The packages, in the format of a requirements file."""
    without: str | None = None
    """The reason why a file with a higher precedence was not read, or None."""

    @property
    def num_packages(self) -> int:
        return sum(not line.startswith("-") for line in self.lines)

    @property
    def lines(self) -> list[str]:
        """The lines of the requirements, without comments and blank lines."""
        lines = (line.strip() for line in self.requirements.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def read_requirements(file: Path) -> str:
    """Return the content of a requirements file. As in pip, the encoding is UTF-8 unless a byte
    order mark indicates another one. Raises OSError or UnicodeDecodeError."""
    content = file.read_bytes()
    encoding = next((name for bom, name in _BOMS if content.startswith(bom)), "utf-8")
    return content.decode(encoding)


def find_packages(folder: Path, names: Collection[str]) -> FoundPackages | None:
    """Return the packages in the file with the highest precedence; None if this file lists no
    packages.

    names: the uploaded files; other files are ignored. Raises PackagesUnreadable.
    """
    if REQUIREMENTS in names:
        try:
            found = FoundPackages(REQUIREMENTS, read_requirements(folder / REQUIREMENTS))
        except (OSError, UnicodeDecodeError):
            raise PackagesUnreadable(f"{REQUIREMENTS} is not UTF-8 text") from None
    elif LOCK in names and PROJECT in names:
        _read_project(folder, _INDEXES)
        try:
            found = FoundPackages(LOCK, _exported(folder))
        except _NoUv as error:
            found = FoundPackages(PROJECT, _listed(folder), without=str(error))
            if not found.lines:
                raise PackagesUnreadable(str(error)) from None
    elif PROJECT in names:
        found = FoundPackages(PROJECT, _listed(folder))
    else:
        return None
    return found if found.lines else None


def _exported(folder: Path) -> str:
    """Return the packages that uv.lock pins for this project, as exported by uv."""
    # Also look for uv next to Python, because the virtual environment might not be activated.
    next_to_python = Path(sys.executable).with_name("uv")
    uv = shutil.which("uv") or (str(next_to_python) if next_to_python.exists() else "uv")
    command = [uv, "export", "--frozen", "--quiet", "--no-dev", "--no-hashes", "--no-header"]
    try:
        done = subprocess.run(
            [*command, "--no-emit-workspace", "--project", str(folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
            text=True,
        )
    except FileNotFoundError:
        raise _NoUv(f"reading {LOCK} requires uv, which is not installed") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PackagesUnreadable(f"uv can't read {LOCK}: {error}") from None
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise PackagesUnreadable(f"uv can't read {LOCK}: {words[0] if words else 'failed'}")
    return done.stdout


def _listed(folder: Path) -> str:
    """Return the packages that pyproject.toml lists, in the format of a requirements file."""
    dependencies = _read_project(folder, [*_INDEXES, ("uv", "sources")])
    return "".join(f"{each}\n" for each in dependencies)


def _read_project(folder: Path, refused: Sequence[tuple[str, str]]) -> list[str]:
    """Return the dependencies in pyproject.toml. Raises PackagesUnreadable if the file has one of
    the `refused` tables, because the nodes would install these packages from different sources."""
    try:
        document = tomllib.loads((folder / PROJECT).read_text(encoding="utf-8"))
        tools = document.get("tool", {})
        for tool, table in refused:
            if tools.get(tool, {}).get(table):
                raise PackagesUnreadable(
                    f"{PROJECT} has the table tool.{tool}.{table}, which nodes don't use"
                )
        project = document.get("project", {})
        listed = list(project.get("dependencies", []))
        others = {
            "tool.poetry.dependencies": {*tools.get("poetry", {}).get("dependencies", ())}
            - {"python"},
            "project.dynamic": "dependencies" in project.get("dynamic", ()),
        }
        for key, has_packages in others.items():
            if has_packages and not listed:
                raise PackagesUnreadable(
                    f"{PROJECT} lists its packages in {key}, but only project.dependencies is read"
                )
        return listed
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise PackagesUnreadable(f"{PROJECT} can't be read: {error}") from None
