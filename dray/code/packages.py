"""The packages that a folder lists for its program: requirements.txt, uv.lock or pyproject.toml."""

from __future__ import annotations

import codecs
import subprocess
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
    # Ahead of the one of UTF-16, with which it begins.
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

_INDEXES: Final = (
    *(("uv", "index"), ("uv", "index-url"), ("uv", "extra-index-url")),
    *(("poetry", "source"), ("pdm", "source")),
)
"""Tables with indexes of packages, of which a package of the same name elsewhere is another one."""


class PackagesUnreadable(Exception):
    """A file lists packages that can't be read; the message states why."""


class _NoUv(Exception):
    """uv, which reads uv.lock, is not installed here."""


@dataclass(frozen=True)
class FoundPackages:
    """The packages that a file of the folder lists."""

    source: str
    """The name of the file."""
    requirements: str
    """The text of a requirements file."""
    without: str | None = None
    """Why a file that comes before this one was not read."""

    @property
    def num_packages(self) -> int:
        return sum(not line.startswith("-") for line in self.lines)

    @property
    def lines(self) -> list[str]:
        """The lines of the requirements that are no comments."""
        lines = (line.strip() for line in self.requirements.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def read_requirements(file: Path) -> str:
    """The text of a requirements file: UTF-8, or as its byte order mark states, as pip reads it.
    OSError, UnicodeDecodeError."""
    content = file.read_bytes()
    encoding = next((name for bom, name in _BOMS if content.startswith(bom)), "utf-8")
    return content.decode(encoding)


def find_packages(folder: Path, names: Collection[str]) -> FoundPackages | None:
    """The packages of the first of the files that the folder has; None if none lists a package.

    names: the files that are uploaded; others do not count. PackagesUnreadable.
    """
    if REQUIREMENTS in names:
        try:
            found = FoundPackages(REQUIREMENTS, read_requirements(folder / REQUIREMENTS))
        except (OSError, UnicodeDecodeError):
            raise PackagesUnreadable(f"{REQUIREMENTS} is no text in UTF-8") from None
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
    """The packages that uv.lock pins for this project, as uv lists them."""
    command = ["uv", "export", "--frozen", "--quiet", "--no-dev", "--no-hashes", "--no-header"]
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
        raise _NoUv(f"{LOCK} is read by uv, which is not installed here") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PackagesUnreadable(f"{LOCK} can't be read by uv: {error}") from None
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise PackagesUnreadable(f"{LOCK} can't be read by uv: {words[0] if words else 'failed'}")
    return done.stdout


def _listed(folder: Path) -> str:
    """The packages that pyproject.toml lists, as lines of a requirements file."""
    dependencies = _read_project(folder, [*_INDEXES, ("uv", "sources")])
    return "".join(f"{each}\n" for each in dependencies)


def _read_project(folder: Path, refused: Sequence[tuple[str, str]]) -> list[str]:
    """The dependencies in pyproject.toml. PackagesUnreadable if it has one of these tools' tables,
    since its packages come from elsewhere than the nodes would look for them."""
    try:
        document = tomllib.loads((folder / PROJECT).read_text(encoding="utf-8"))
        tools = document.get("tool", {})
        for tool, table in refused:
            if tools.get(tool, {}).get(table):
                raise PackagesUnreadable(f"{PROJECT} has tool.{tool}.{table}, which stays here")
        project = document.get("project", {})
        listed = list(project.get("dependencies", []))
        others = {
            "tool.poetry.dependencies": {*tools.get("poetry", {}).get("dependencies", ())}
            - {"python"},
            "project.dynamic": "dependencies" in project.get("dynamic", ()),
        }
        for place, has_packages in others.items():
            if has_packages and not listed:
                raise PackagesUnreadable(
                    f"{PROJECT} has its packages by {place}, and only project.dependencies is read"
                )
        return listed
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise PackagesUnreadable(f"{PROJECT} can't be read: {error}") from None
