"""Which files of a folder are uploaded, and their parts.

Git's rules decide what is ignored: `.gitignore` in every folder from the repository's root on, and
then `.drayignore`, which has the same syntax and the last word. Some files are left out whatever
these say, because they are large and of no use elsewhere (`.git`, virtual environments) or secret
(`.env`, private keys); who needs one of them names it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from dray.code.manifest import MAX_FILES, PART_BYTES, FileEntry, code_id, fault_of, part_size
from dray.errors import SpecError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

IGNORE_FILES = (".gitignore", ".drayignore")
LARGE_BYTES = 50 << 20
"""A file as large as this is mentioned: it may be data that should not travel with the code."""
_FOLDERS = frozenset(
    {
        *(".git", ".hg", ".svn", "__pycache__", ".dray", "node_modules", ".ipynb_checkpoints"),
        *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox", ".nox"),
    }
)
"""Folders that are of no use on another machine, and often large."""
_SECRET_FOLDERS = frozenset({".ssh", ".aws", ".gnupg", ".kube"})
_ENV_TEMPLATES = frozenset({".env.example", ".env.sample", ".env.template"})
_SECRET_NAMES = frozenset({".env", ".envrc", ".netrc", ".pypirc", ".pgpass", ".git-credentials"})
_KEY_NAMES = frozenset({"id_rsa", "id_dsa", "id_ecdsa", "id_ed25519"})
_KEY_ENDINGS = (".pem", ".key", ".ppk", ".p12", ".pfx", ".keystore", ".jks")
_KEY_TEXT = b"PRIVATE KEY-----"
_KEY_TEXT_WITHIN = 4096
_HASHERS = 4


USELESS = "is of no use on another machine"
"""Why a folder such as `.git` is left out, which nobody needs to be told of."""


@dataclass(frozen=True)
class LeftOut:
    """A file or folder that is not packed for a reason that no ignore file gives."""

    path: str
    why: str


@dataclass(frozen=True)
class PackedCode:
    """A folder's files as they are to be uploaded."""

    root: Path
    files: tuple[FileEntry, ...]
    left_out: tuple[LeftOut, ...] = ()
    large: tuple[FileEntry, ...] = ()
    """Files of LARGE_BYTES or more, which were packed."""

    @property
    def id(self) -> str:
        return code_id(self.files)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def read(self, wanted: str) -> bytes:
        """The part with this hash. SpecError if its file was changed since it was packed."""
        path, start, _ = self._places[wanted]
        try:
            with (self.root / path).open("rb") as file:
                file.seek(start)
                data = file.read(PART_BYTES)
        except OSError as error:
            raise SpecError(f"can't read {self.root / path}: {error.strerror}") from None
        if hashlib.sha256(data).hexdigest() != wanted:
            raise SpecError(f"{self.root / path} was changed while it was uploaded: submit again")
        return data

    def size_of(self, part: str) -> int:
        """Bytes of the part with this hash."""
        return self._places[part][2]

    @cached_property
    def _places(self) -> dict[str, tuple[str, int, int]]:
        """By a part's hash: a file that has it, where it begins there, and its size."""
        return {
            part: (file.path, number * PART_BYTES, part_size(file.size_bytes, number))
            for file in self.files
            for number, part in enumerate(file.parts)
        }


def pack(root: Path, include: Sequence[str] = ()) -> PackedCode:
    """The files of a folder, with the hashes of their parts.

    include: paths of files or folders below `root` that are packed although a rule leaves them out.
    SpecError if there is no such folder, it has no file, or more than MAX_FILES.
    """
    root = root.absolute()
    if not root.is_dir():
        raise SpecError(f"{root} is no folder: --code names the folder with the job's files")
    walk = _Walk(root, include)
    found = sorted(walk.files())
    if not found:
        raise SpecError(f"{root} has no file to upload; see its .gitignore and .drayignore")
    with ThreadPoolExecutor(_HASHERS) as hashers:
        entries = list(hashers.map(lambda path: _entry(root, path), found))
    named = walk.named
    files, left_out = [], list(walk.left_out)
    for entry, is_key in entries:
        if is_key and not named(entry.path):
            left_out.append(LeftOut(entry.path, "holds a private key"))
        else:
            files.append(entry)
    large = tuple(file for file in files if file.size_bytes >= LARGE_BYTES)
    return PackedCode(root, tuple(files), tuple(left_out), large)


def _entry(root: Path, path: str) -> tuple[FileEntry, bool]:
    """A file with its parts, and whether it holds a private key."""
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
    # Source code that looks for keys names them too: only text that begins so is a key.
    return FileEntry(path, size, executable, tuple(parts)), is_key and not path.endswith(".py")


class _Walk:
    """One walk through a folder; `left_out` is complete when `files` has come to its end."""

    def __init__(self, root: Path, include: Sequence[str]) -> None:
        self._root = root
        self._include = [_relative(root, path) for path in include]
        self.left_out: list[LeftOut] = []
        self._num_files = 0

    def named(self, path: str) -> bool:
        """Whether the user asked for it, or for a folder that it is in."""
        return any(path == one or path.startswith(f"{one}/") for one in self._include)

    def _leads_to_a_named_one(self, folder: str) -> bool:
        return any(one.startswith(f"{folder}/") for one in self._include)

    def files(self) -> Iterator[str]:
        yield from self._below(self._root, "", _rules_above(self._root))

    def _below(self, folder: Path, at: str, rules: list[_Rules]) -> Iterator[str]:
        rules = sorted([*rules, *_rules_of(folder)], key=lambda each: each.is_last_word)
        try:
            with os.scandir(folder) as listed:
                entries = sorted(listed, key=lambda entry: entry.name)
        except OSError as error:
            raise SpecError(f"can't read {folder}: {error.strerror}") from None
        for entry in entries:
            path = f"{at}/{entry.name}" if at else entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            is_named = self.named(path)
            if not is_named and not (is_folder and self._leads_to_a_named_one(path)):
                if (why := _never(Path(entry.path), is_folder=is_folder)) is not None:
                    self.left_out.append(LeftOut(path, why))
                    continue
                if _is_ignored(rules, Path(entry.path), is_folder=is_folder):
                    continue
            if is_folder:
                yield from self._below(Path(entry.path), path, rules)
            elif self._is_file(entry, path):
                self._num_files += 1
                if self._num_files > MAX_FILES:
                    raise SpecError(
                        f"{self._root} has more than {MAX_FILES} files: name those that are no "
                        "code in .drayignore, or give a smaller folder"
                    )
                yield path

    def _is_file(self, entry: os.DirEntry[str], path: str) -> bool:
        if (fault := fault_of(path)) is not None:
            raise SpecError(f"{self._root / path} can't be uploaded: its path {fault}")
        why = None
        if entry.is_symlink():
            why = self._why_not_followed(Path(entry.path), is_named=self.named(path))
        elif not entry.is_file(follow_symlinks=False):
            why = "is no regular file"
        if why is not None:
            self.left_out.append(LeftOut(path, why))
        return why is None

    def _why_not_followed(self, link: Path, *, is_named: bool) -> str | None:
        """Why the file that a link leads to is left out; None if it is not."""
        root = self._root.resolve()
        target = Path(os.path.realpath(link))  # `resolve` raises for a link to itself
        if not target.is_relative_to(root) or not target.is_file():
            return "is a link to something else than a file here"
        if is_named:
            return None
        for place in [target, *target.parents[: len(target.relative_to(root).parts) - 1]]:
            if _never(place, is_folder=place != target) is not None:
                return f"is a link to {target.relative_to(root)}, which is not uploaded"
        return None


@dataclass(frozen=True)
class _Rules:
    """One ignore file."""

    folder: Path
    spec: GitIgnoreSpec
    is_last_word: bool
    """Whether it is a `.drayignore`, which overrules the `.gitignore` of every folder."""


def _rules_of(folder: Path) -> list[_Rules]:
    from pathspec import GitIgnoreSpec

    found = []
    for name in IGNORE_FILES:
        try:
            text = (folder / name).read_text(encoding="utf-8-sig", errors="replace")
        except OSError:
            continue
        lines = [line for line in re.split("\r?\n", text) if _is_pattern(line)]
        # Not by RE2, where that is installed: it takes no name that is not UTF-8.
        spec = GitIgnoreSpec.from_lines(lines, backend="simple")
        found.append(_Rules(folder, spec, name == ".drayignore"))
    return found


def _is_pattern(line: str) -> bool:
    """Whether a line of an ignore file can be understood; Git passes over others, such as `!`."""
    from pathspec import GitIgnoreSpec

    try:
        GitIgnoreSpec.from_lines([line], backend="simple")
    except (ValueError, re.error):
        return False
    return True


def _rules_above(root: Path) -> list[_Rules]:
    """Those of the folders above, up to the root of the Git repository that this one is in."""
    above: list[Path] = []
    for folder in [root, *root.parents]:
        if (folder / ".git").exists():
            return [rules for each in reversed(above) for rules in _rules_of(each)]
        if folder.parent != folder:
            above.append(folder.parent)
    return []


def _is_ignored(rules: Sequence[_Rules], path: Path, *, is_folder: bool) -> bool:
    """By the last rule that matches."""
    for each in reversed(rules):
        relative = path.relative_to(each.folder).as_posix() + ("/" if is_folder else "")
        if (matched := each.spec.check_file(relative).include) is not None:
            return matched
    return False


def _never(path: Path, *, is_folder: bool) -> str | None:
    """Why a file or folder is left out whatever the ignore files say; None if it is not."""
    name = path.name.lower()
    if is_folder:
        if name in _FOLDERS:
            return USELESS
        if name in _SECRET_FOLDERS:
            return "may hold secrets"
        if name in (".venv", "venv", ".env") or (path / "pyvenv.cfg").exists():
            return "is a virtual environment; `environment` in the job document makes one there"
        return None
    if name == ".git":
        return USELESS
    if name in _SECRET_NAMES or (name.startswith(".env.") and name not in _ENV_TEMPLATES):
        return "may hold secrets"
    if name in _KEY_NAMES or name.endswith(_KEY_ENDINGS):
        return "may hold a private key"
    return None


def _relative(root: Path, path: str) -> str:
    """A path that the user named, relative to the root."""
    given = Path(path)
    place = given if given.is_absolute() else root / given
    try:
        relative = PurePosixPath(Path(os.path.normpath(place)).relative_to(root)).as_posix()
    except ValueError:
        raise SpecError(f"--include {path} is not in {root}") from None
    if not place.exists():
        raise SpecError(f"--include {path}: there is no such file in {root}")
    return relative
