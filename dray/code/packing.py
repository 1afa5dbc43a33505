"""Select the files of a folder to upload, and divide them into parts.

In a repository, Git lists the files: tracked files, and untracked files that are not ignored. In
other folders, the rules of every `.gitignore` apply. `.drayignore` has the same syntax as
`.gitignore` and takes precedence. Some files are always skipped, even if they are tracked, because
they are large and useless on other machines (`.git`, virtual environments) or secret (`.env`,
private keys). `include` lists exceptions.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from dray.code import git_files, ignore_rules
from dray.code.git_files import GitFiles
from dray.code.ignore_rules import Rules
from dray.code.manifest import MAX_FILES, PART_BYTES, FileEntry, code_id, fault_of, part_size
from dray.errors import SpecError

LARGE_BYTES = 50 << 20
"""Files of at least this size cause a warning, because they might be data instead of code."""
_FOLDERS = frozenset(
    {
        *(".git", ".hg", ".svn", "__pycache__", ".dray", "node_modules", ".ipynb_checkpoints"),
        *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox", ".nox"),
    }
)
"""Folders that are useless on other machines, and often large."""
_SECRET_FOLDERS = frozenset({".ssh", ".aws", ".gnupg", ".kube"})
_ENV_TEMPLATES = frozenset({".env.example", ".env.sample", ".env.template"})
_SECRET_NAMES = frozenset({".env", ".envrc", ".netrc", ".pypirc", ".pgpass", ".git-credentials"})
_KEY_NAMES = frozenset({"id_rsa", "id_dsa", "id_ecdsa", "id_ed25519"})
_KEY_ENDINGS = (".pem", ".key", ".ppk", ".p12", ".pfx", ".keystore", ".jks")
_KEY_TEXT = b"PRIVATE KEY-----"
_KEY_TEXT_WITHIN = 4096
_HASHERS = 4


USELESS = "is useless on other machines"
"""The reason why a folder such as `.git` is skipped. Users are not notified about these folders."""


@dataclass(frozen=True)
class LeftOut:
    """A file or folder that is skipped for a reason other than an ignore file."""

    path: str
    why: str


@dataclass(frozen=True)
class PackedCode:
    """The files of a folder to upload."""

    root: Path
    files: tuple[FileEntry, ...]
    left_out: tuple[LeftOut, ...] = ()
    large: tuple[FileEntry, ...] = ()
    """Packed files of LARGE_BYTES or more."""
    notes: tuple[str, ...] = ()
    """Notes about repositories whose files Git could not list, with the reason."""
    git: Mapping[str, Any] | None = None
    """The commit of the work tree (see `git_files.state`); None if there is none."""

    @property
    def id(self) -> str:
        return code_id(self.files)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def read(self, wanted: str) -> bytes:
        """Return the part with the hash `wanted`. Data that was appended to the file after packing,
        for example to a log, is ignored. Raises SpecError if the part itself has changed."""
        path, start, size = self._locations[wanted]
        try:
            with (self.root / path).open("rb") as file:
                file.seek(start)
                data = file.read(size)
        except OSError as error:
            raise SpecError(f"can't read {self.root / path}: {error.strerror}") from None
        if hashlib.sha256(data).hexdigest() != wanted:
            raise SpecError(f"{self.root / path} changed during the upload: submit again")
        return data

    def size_of(self, part: str) -> int:
        """Return the size in bytes of the part with this hash."""
        return self._locations[part][2]

    @cached_property
    def _locations(self) -> dict[str, tuple[str, int, int]]:
        """Hash of a part -> (path of a file that contains it, offset in the file, size)."""
        return {
            part: (file.path, number * PART_BYTES, part_size(file.size_bytes, number))
            for file in self.files
            for number, part in enumerate(file.parts)
        }


def pack(root: Path, include: Sequence[str] = ()) -> PackedCode:
    """Pack the files of a folder, with the hashes of their parts.

    include: paths of files or folders below `root` that are packed even if a rule excludes them.
    Raises SpecError if the folder does not exist, or has no files or more than MAX_FILES.
    """
    root = root.absolute()
    if not root.is_dir():
        raise SpecError(f"{root} is not a folder: set --code to the folder with the job's files")
    named_paths = [_relative(root, path) for path in include]
    root = root.resolve()  # the path that Git uses, even if `root` is a symbolic link
    walk = _Walk(root, named_paths)
    found = sorted(walk.files())
    if not found:
        raise SpecError(
            f"{root} has no files to upload: check .gitignore and .drayignore in this folder "
            "and, in a repository, in the folders above"
        )
    with ThreadPoolExecutor(_HASHERS) as hashers:
        entries = list(hashers.map(lambda path: _entry(root, path), found))
    named = walk.named
    files, left_out = [], list(walk.left_out)
    for entry, is_key in entries:
        if is_key and not named(entry.path):
            left_out.append(LeftOut(entry.path, "contains a private key"))
        else:
            files.append(entry)
    large = tuple(file for file in files if file.size_bytes >= LARGE_BYTES)
    notes, git = tuple(walk.notes), git_files.state(root)
    return PackedCode(root, tuple(files), tuple(left_out), large, notes, git)


def _entry(root: Path, path: str) -> tuple[FileEntry, bool]:
    """Return a file with its parts, and whether it contains a private key."""
    parts, size, is_key = [], 0, False
    try:
        with (root / path).open("rb") as file:
            executable = bool(os.fstat(file.fileno()).st_mode & stat.S_IXUSR)
            while data := file.read(PART_BYTES):
                is_key = is_key or (not size and _KEY_TEXT in data[:_KEY_TEXT_WITHIN])
                parts.append(hashlib.sha256(data).hexdigest())
                size += len(data)
    except OSError as error:
        raise SpecError(f"can't read {root / path}: {error.strerror}") from None
    # Don't treat .py files as private keys, because source code that searches for keys contains the
    # same strings.
    return FileEntry(path, size, executable, tuple(parts)), is_key and not path.endswith(".py")


@dataclass(frozen=True)
class _Selection:
    """The rules and the list of files that decide which entries of a folder are packed."""

    rules: tuple[Rules, ...]
    """Rules in increasing order of precedence."""
    listed: GitFiles | None = None
    """Git's list, with paths relative to `start`; None if only the rules decide."""
    start: str = ""
    """Path of the listed folder, relative to the root of the walk."""
    ignores_all: bool = False
    """Whether the folder is ignored, so that only paths in `include` are packed."""

    @property
    def last_words(self) -> tuple[Rules, ...]:
        return tuple(each for each in self.rules if each.is_last_word)

    def with_rules(self, more: Sequence[Rules]) -> _Selection:
        """Return the selection with the additional rules of a subfolder."""
        rules = sorted([*self.rules, *more], key=lambda each: each.is_last_word)
        return replace(self, rules=tuple(rules))

    def is_overruled(self, folder: str) -> bool:
        """Whether a `.drayignore` includes a folder that Git's rules ignore."""
        by_git = [each for each in self.rules if not each.is_last_word]
        return (
            ignore_rules.decision(by_git, folder, is_folder=True) is True
            and ignore_rules.decision(self.last_words, folder, is_folder=True) is False
        )

    def below(self, folder: str, path: str = "", *, is_ignored: bool) -> _Selection:
        """Return the selection for a subfolder. Git lists no files in a folder that it ignores.
        Therefore, if a `.drayignore` includes such a folder, the rules decide which of its files
        are packed, without Git's list."""
        if is_ignored:
            return replace(self, ignores_all=True)
        if self.listed is None or self._is_listed(path, is_folder=True):
            return self
        return replace(self, listed=None) if self.is_overruled(folder) else self

    def ignores(self, absolute: str, path: str, *, is_folder: bool = True) -> bool:
        """Whether an entry is skipped. `path` is relative to the root of the walk."""
        last_word = ignore_rules.decision(self.last_words, absolute, is_folder=is_folder)
        if last_word is not None or self.ignores_all:
            return self.ignores_all or last_word is True
        if self.listed is not None:
            if self._is_listed(path, is_folder=is_folder):
                return False
            if not is_folder:
                return True
        # If Git lists no files in a folder, either the folder or all its files are ignored.
        return ignore_rules.decision(self.rules, absolute, is_folder=is_folder) is True

    def _is_listed(self, path: str, *, is_folder: bool) -> bool:
        assert self.listed is not None
        relative = path[len(self.start) + 1 :] if self.start else path
        return relative in self.listed.files or (is_folder and relative in self.listed.folders)


class _Walk:
    """A walk through a folder. `left_out` is complete when `files` is exhausted."""

    def __init__(self, root: Path, include: Sequence[str]) -> None:
        self._root = root
        self._include = include
        self.left_out: list[LeftOut] = []
        self.notes: list[str] = []
        self._num_files = 0

    def named(self, path: str) -> bool:
        """Whether `include` contains the path, or a folder that contains it."""
        return any(path == one or path.startswith(f"{one}/") for one in self._include)

    def _leads_to_a_named_one(self, folder: str) -> bool:
        return any(one.startswith(f"{folder}/") for one in self._include)

    def files(self) -> Iterator[str]:
        yield from self._below(self._root, "", self._begin(self._root, ""))

    def _begin(self, folder: Path, at: str, last_words: Sequence[Rules] = ()) -> _Selection:
        """Return the selection for the root of the walk, or for the root of a nested repository.
        `at` is the folder's path relative to the root of the walk. The rules of a repository don't
        apply to repositories inside it."""
        root = git_files.repository_above(folder)
        if root is None:
            return _Selection(tuple(last_words))
        selection = _Selection((*git_files.further_rules(root), *last_words))
        absolute, is_overruled = root, False
        for name in folder.relative_to(root).parts:
            selection = selection.with_rules(ignore_rules.rules_in(absolute))
            absolute /= name
            is_overruled = is_overruled or selection.is_overruled(str(absolute))
            selection = selection.below(
                str(absolute), is_ignored=selection.ignores(str(absolute), "")
            )
        try:
            listed = git_files.list_files(folder)
        except git_files.GitUnavailable as error:
            self.notes.append(
                f"Git could not list the files of {folder}, so only the folder's ignore files "
                f"were used: {error}"
            )
            return selection
        if is_overruled and not listed.files:
            return selection
        return _Selection(selection.rules, listed, at, selection.ignores_all and not listed.files)

    def _below(self, folder: Path, at: str, selection: _Selection) -> Iterator[str]:
        selection = selection.with_rules(ignore_rules.rules_in(folder))
        try:
            with os.scandir(folder) as listed:
                entries = sorted(listed, key=lambda entry: entry.name)
        except OSError as error:
            raise SpecError(f"can't read {folder}: {error.strerror}") from None
        for entry in entries:
            path = f"{at}/{entry.name}" if at else entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            is_left_out = not self.named(path) and self._leaves_out(entry, path, selection)
            if is_left_out and not (is_folder and self._leads_to_a_named_one(path)):
                continue
            if is_folder:
                inner = self._selection_in(Path(entry.path), path, selection, is_left_out)
                yield from self._below(Path(entry.path), path, inner)
            elif self._is_file(entry, path):
                self._num_files += 1
                if self._num_files > MAX_FILES:
                    raise SpecError(
                        f"{self._root} has more than {MAX_FILES} files: list files that are not "
                        "code in .drayignore, or use a smaller folder"
                    )
                yield path

    def _leaves_out(self, entry: os.DirEntry[str], path: str, selection: _Selection) -> bool:
        is_folder = entry.is_dir(follow_symlinks=False)
        if selection.ignores_all:
            return True
        if (why := _never(Path(entry.path), is_folder=is_folder)) is not None:
            if not (is_folder and self._leads_to_a_named_one(path)):
                self.left_out.append(LeftOut(path, why))
            return True
        return selection.ignores(entry.path, path, is_folder=is_folder)

    def _selection_in(
        self, folder: Path, path: str, selection: _Selection, is_ignored: bool
    ) -> _Selection:
        if not is_ignored and git_files.is_root(folder):
            return self._begin(folder, path, selection.last_words)
        return selection.below(str(folder), path, is_ignored=is_ignored)

    def _is_file(self, entry: os.DirEntry[str], path: str) -> bool:
        if (fault := fault_of(path)) is not None:
            raise SpecError(f"{self._root / path} can't be uploaded: its path {fault}")
        why = None
        if entry.is_symlink():
            why = self._why_not_followed(Path(entry.path), is_named=self.named(path))
        elif not entry.is_file(follow_symlinks=False):
            why = "is not a regular file"
        if why is not None:
            self.left_out.append(LeftOut(path, why))
        return why is None

    def _why_not_followed(self, link: Path, *, is_named: bool) -> str | None:
        """Return why the target of a symbolic link is skipped; None if the target is not
        skipped."""
        root = self._root.resolve()
        target = Path(os.path.realpath(link))  # `resolve` would raise for a link to itself
        if not target.is_relative_to(root) or not target.is_file():
            return "is a link to something other than a file in this folder"
        if is_named:
            return None
        for absolute in [target, *target.parents[: len(target.relative_to(root).parts) - 1]]:
            if _never(absolute, is_folder=absolute != target) is not None:
                return f"is a link to {target.relative_to(root)}, which is not uploaded"
        return None


def _never(path: Path, *, is_folder: bool) -> str | None:
    """Return why a file or folder is always skipped, regardless of ignore files; None if ignore
    files decide."""
    name = path.name.lower()
    if is_folder:
        if name in _FOLDERS:
            return USELESS
        if name in _SECRET_FOLDERS:
            return "might contain secrets"
        if name in (".venv", "venv", ".env") or (path / "pyvenv.cfg").exists():
            return (
                "is a virtual environment; use `environment` in the job document to create "
                "one on the nodes"
            )
        return None
    if name == ".git":
        return USELESS
    if name in _SECRET_NAMES or (name.startswith(".env.") and name not in _ENV_TEMPLATES):
        return "might contain secrets"
    if name in _KEY_NAMES or name.endswith(_KEY_ENDINGS):
        return "might contain a private key"
    return None


def _relative(root: Path, path: str) -> str:
    """Convert a path that the user gave to a path relative to the root."""
    given = Path(path)
    absolute = given if given.is_absolute() else root / given
    try:
        relative = PurePosixPath(Path(os.path.normpath(absolute)).relative_to(root)).as_posix()
    except ValueError:
        raise SpecError(f"--include {path} is not in {root}") from None
    if not absolute.exists():
        raise SpecError(f"--include {path}: no such file in {root}")
    return relative
