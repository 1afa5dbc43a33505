"""The files of a work tree, as listed by Git.

In addition to the ignore files in the folder, Git considers the index, `info/exclude` and
`core.excludesFile`. dray runs Git so that the repository's settings can't make Git start another
program.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dray.code.ignore_rules import Rules, read_rules
from dray.errors import SpecError

LIMIT_S: Final = 60.0
"""Git lists 100,000 files in a second. If Git takes longer than this limit, the file system is not
responding."""
STATE_LIMIT_S: Final = 10.0
"""If Git takes longer than this to compare the files with the commit, the commit is not
recorded."""
_KEPT_VARIABLES: Final = (
    *("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM"),
    *("GIT_CEILING_DIRECTORIES", "GIT_DISCOVERY_ACROSS_FILESYSTEM", "GIT_EXEC_PATH"),
)
"""Git's environment variables that don't refer to a repository. All other Git variables are
removed, because they can refer to another repository: in a hook, for example, to the hook's
repository."""


class GitUnavailable(Exception):
    """Git can't list the files of a folder. The message states the reason."""


@dataclass(frozen=True)
class GitFiles:
    """Git's list of the files of a folder that are tracked, or untracked but not ignored."""

    files: frozenset[str]
    """Paths relative to the folder. A nested repository is listed as a folder."""
    folders: frozenset[str]
    """The folders that contain these files."""


def repository_above(folder: Path) -> Path | None:
    """Return the root of the work tree that contains a folder; None if there is no repository."""
    return next((each for each in (folder, *folder.parents) if is_root(each)), None)


def is_root(folder: Path) -> bool:
    """Whether the folder is the root of a work tree. `.git` is a folder or, in a submodule or a
    linked work tree, a file."""
    return os.path.lexists(folder / ".git")


def list_files(folder: Path) -> GitFiles:
    """List the files of a folder with Git. Raises GitUnavailable if Git can't list the files, and
    SpecError if Git takes longer than LIMIT_S."""
    listed = _git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    files = frozenset(os.fsdecode(path).rstrip("/") for path in listed.split(b"\0") if path)
    folders = {""}
    for path in files:
        while (path := path.rpartition("/")[0]) not in folders:
            folders.add(path)
    return GitFiles(files, frozenset(folders))


def further_rules(root: Path) -> list[Rules]:
    """Return the rules that apply to a repository but are not in its work tree, in increasing order
    of precedence: the user's rules (`core.excludesFile`, or Git's default file), and
    `info/exclude`."""
    found = []
    try:
        named = os.fsdecode(_git(root, "config", "--type=path", "--get", "core.excludesFile"))
        users = Path(named.removesuffix("\n"))
    except GitUnavailable:
        config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
        users = Path(config).expanduser() / "git" / "ignore"
    found += read_rules(str(root), root / users)
    try:
        exclude = os.fsdecode(_git(root, "rev-parse", "--git-path", "info/exclude"))
    except GitUnavailable:
        exclude = ".git/info/exclude"
    return [*found, *read_rules(str(root), root / exclude.removesuffix("\n"))]


def state(folder: Path) -> dict[str, Any] | None:
    """Return the commit, the branch and whether anything in the folder is not committed, as in
    `dray.spec.program.origin.GitState`; None if there is no commit, or Git can't determine it."""
    if repository_above(folder) is None:
        return None
    try:
        commit = _git(folder, "rev-parse", "--verify", "HEAD^{commit}").decode().strip()
        status = ("status", "--porcelain", "--ignore-submodules=dirty", "--", ".")
        changes = _git(folder, *_without_filters(folder), *status, limit_s=STATE_LIMIT_S)
    except (GitUnavailable, SpecError):
        return None
    found: dict[str, Any] = {"commit": commit, "dirty": bool(changes)}
    try:
        branch = os.fsdecode(_git(folder, "symbolic-ref", "--quiet", "--short", "HEAD")).strip()
    except GitUnavailable:
        return found
    return {**found, "branch": branch} if branch.isprintable() and len(branch) < 256 else found


def _without_filters(folder: Path) -> list[str]:
    """Return options that keep Git from running the programs of `filter.NAME.clean` and
    `filter.NAME.process`, with which it would compare files."""
    try:
        listed = _git(folder, "config", "-z", "--name-only", "--get-regexp", r"^filter\..*\.")
    except GitUnavailable:  # there are no filters
        return []
    names = {os.fsdecode(one) for one in listed.split(b"\0") if one}
    return [word for name in sorted(names) for word in ("-c", f"{name}=")]


def _git(folder: Path, *command: str, limit_s: float | None = None) -> bytes:
    limit_s = LIMIT_S if limit_s is None else limit_s
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name in _KEPT_VARIABLES
    }
    # Git must not write the index, and a partial clone must not fetch anything.
    variables |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
    variables |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        # Git would run a program named in `core.fsmonitor`.
        done = subprocess.run(
            ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            check=False,
            env=variables,
        )
    except subprocess.TimeoutExpired:
        raise SpecError(
            f"git {command[0]} timed out after {limit_s:g} s in {folder}: check whether `git "
            "status` works in this folder"
        ) from None
    except OSError as error:
        raise GitUnavailable(f"can't start git: {error.strerror}") from None
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        raise GitUnavailable(words[0] if words else f"git {command[0]} failed")
    return done.stdout
