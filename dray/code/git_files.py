"""The files of a work tree, as Git itself lists them.

Git reads what no ignore file in the folder shows: the index, `info/exclude` and
`core.excludesFile`. No setting of the repository makes it start another program here.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dray.code.ignore_rules import Rules, read_rules
from dray.errors import SpecError

LIMIT_S: Final = 60.0
"""Git lists 100,000 files in a second; more than this is a file system that does not answer."""
_KEPT_VARIABLES: Final = (
    *("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM"),
    *("GIT_CEILING_DIRECTORIES", "GIT_DISCOVERY_ACROSS_FILESYSTEM", "GIT_EXEC_PATH"),
)
"""Variables of Git that name no repository: a hook, for example, sets others for its own."""


class GitUnavailable(Exception):
    """Git does not list the files of this folder; the message states why."""


@dataclass(frozen=True)
class GitFiles:
    """Git's list of the files of a folder that are tracked, or neither tracked nor ignored."""

    files: frozenset[str]
    """Paths relative to the folder. A repository inside of this one is listed by its folder."""
    folders: frozenset[str]
    """The folders of these files."""


def repository_above(folder: Path) -> Path | None:
    """Return the root of the work tree that contains a folder; None without a repository."""
    return next((each for each in (folder, *folder.parents) if is_root(each)), None)


def is_root(folder: Path) -> bool:
    """Whether a repository's work tree begins here: `.git` is a folder or, in a submodule or a
    further work tree, a file."""
    return os.path.lexists(folder / ".git")


def list_files(folder: Path) -> GitFiles:
    """Let Git list the files of a folder. Raises GitUnavailable if it can't, SpecError after
    LIMIT_S."""
    listed = _git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    files = frozenset(os.fsdecode(path).rstrip("/") for path in listed.split(b"\0") if path)
    folders = {""}
    for path in files:
        while (path := path.rpartition("/")[0]) not in folders:
            folders.add(path)
    return GitFiles(files, frozenset(folders))


def further_rules(root: Path) -> list[Rules]:
    """Return the rules that a repository has outside of its folders, the weakest first: the user's
    rules (`core.excludesFile`), if Git returns the name of that file, and `info/exclude`."""
    found = []
    try:
        named = os.fsdecode(_git(root, "config", "--type=path", "--get", "core.excludesFile"))
        users = Path(named.removesuffix("\n"))
    except GitUnavailable:
        config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
        users = Path(config).expanduser() / "git" / "ignore"
    found += read_rules(str(root), root / users)
    try:
        place = os.fsdecode(_git(root, "rev-parse", "--git-path", "info/exclude"))
    except GitUnavailable:
        place = ".git/info/exclude"
    return [*found, *read_rules(str(root), root / place.removesuffix("\n"))]


def _git(folder: Path, *command: str) -> bytes:
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name in _KEPT_VARIABLES
    }
    # The index is not written, and a partial clone fetches nothing.
    variables |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
    variables |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        # `core.fsmonitor` may name a program.
        done = subprocess.run(
            ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
            env=variables,
        )
    except subprocess.TimeoutExpired:
        raise SpecError(
            f"git {command[0]} did not answer within {LIMIT_S:g} s in {folder}: try `git status` "
            "there"
        ) from None
    except OSError as error:
        raise GitUnavailable(f"git can't be started: {error.strerror}") from None
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        raise GitUnavailable(words[0] if words else f"git {command[0]} failed")
    return done.stdout
