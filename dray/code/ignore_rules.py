"""The rules of Git's ignore files, for walking through a folder from the top down.

A pattern that matches a folder does not itself match the entries in the folder. As in Git, the walk
does not enter ignored folders. Therefore the patterns `data/**`, `!data/**/` and `!.gitkeep`
together keep the `.gitkeep` of every folder. Patterns are matched byte by byte, as in Git's
`wildmatch`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

GIT_IGNORE = ".gitignore"
DRAY_IGNORE = ".drayignore"
_SPECIAL = frozenset(b"*?[\\")
_NOTHING = b"(?!)"
"""A regular expression that matches nothing, for patterns that Git considers invalid."""
_CLASSES = {
    b"alnum": rb"[A-Za-z0-9]",
    b"alpha": rb"[A-Za-z]",
    b"blank": rb"[ \t]",
    b"cntrl": rb"[\x00-\x1f\x7f]",
    b"digit": rb"[0-9]",
    b"graph": rb"[\x21-\x7e]",
    b"lower": rb"[a-z]",
    b"print": rb"[\x20-\x7e]",
    b"punct": rb"[\x21-\x2f\x3a-\x40\x5b-\x60\x7b-\x7e]",
    b"space": rb"[ \t\n\v\f\r]",
    b"upper": rb"[A-Z]",
    b"xdigit": rb"[0-9A-Fa-f]",
}


@dataclass(frozen=True)
class Pattern:
    """One line of an ignore file."""

    glob: bytes
    includes: bool
    """Whether the line begins with `!`."""
    is_for_folders: bool
    """Whether the line ends with `/`."""

    @cached_property
    def _is_name(self) -> bool:
        """Whether the pattern has no `/`. A pattern without `/` matches names in the folder of the
        ignore file and in all its subfolders."""
        return b"/" not in self.glob

    @cached_property
    def _regex(self) -> re.Pattern[bytes]:
        glob = self.glob.removeprefix(b"/")
        # Like Git, match the prefix before the first wildcard separately, so that a `**` after this
        # prefix is treated like one at the start of a pattern.
        literal = next((i for i, byte in enumerate(glob) if byte in _SPECIAL), len(glob))
        rest = _translated(glob[literal:], is_path=not self._is_name)
        return re.compile(re.escape(glob[:literal]) + rest, re.DOTALL)

    def matches(self, path: bytes, *, is_folder: bool) -> bool:
        """Whether the pattern matches `path`, which is relative to the folder of the ignore
        file."""
        if self.is_for_folders and not is_folder:
            return False
        text = path.rpartition(b"/")[2] if self._is_name else path
        return self._regex.fullmatch(text) is not None


def parsed(content: bytes) -> list[Pattern]:
    """Return the patterns of an ignore file, without blank lines and comments."""
    patterns = []
    for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        text = _without_end(line.removesuffix(b"\r"))
        # Git ignores the rest of a line after a NUL.
        text = text.partition(b"\0")[0]
        if not text or text.startswith(b"#"):
            continue
        glob = text.removeprefix(b"!")
        patterns.append(Pattern(glob.removesuffix(b"/"), text != glob, glob.endswith(b"/")))
    return patterns


def _without_end(line: bytes) -> bytes:
    """Remove trailing spaces that are not preceded by a backslash."""
    kept = re.match(rb"(?:\\.|[^ \\]|\\\Z| +(?! |\Z))*", line, re.DOTALL)
    assert kept is not None
    return kept[0]


def _translated(glob: bytes, *, is_path: bool) -> bytes:
    """Return the regular expression for a glob pattern."""
    parts, at = [], 0
    while at < len(glob):
        byte = glob[at : at + 1]
        if byte == b"*":
            part, at = _stars(glob, at, is_path=is_path)
        elif byte == b"?":
            part, at = b"[^/]", at + 1
        elif byte == b"[":
            part, at = _set(glob, at + 1)
        elif byte == b"\\":
            part = re.escape(glob[at + 1 : at + 2]) or _NOTHING
            at += 2
        else:
            part, at = re.escape(byte), at + 1
        parts.append(part)
    return b"".join(parts)


def _stars(glob: bytes, at: int, *, is_path: bool) -> tuple[bytes, int]:
    """Translate the asterisks at a position. Returns (expression, position after the asterisks)."""
    end = at
    while glob[end : end + 1] == b"*":
        end += 1
    is_whole_part = (at == 0 or glob[at - 1 : at] == b"/") and (
        end == len(glob) or glob.startswith((b"/", b"\\/"), end)
    )
    if end - at < 2 or not is_path or not is_whole_part:
        return b"[^/]*", end
    if glob.startswith(b"/", end):
        return b"(?:.*/)?", end + 1
    return b".*", end


def _set(glob: bytes, at: int) -> tuple[bytes, int]:
    """Translate the character set in brackets at a position. Returns (expression, position after
    the set). A set without a closing bracket matches nothing."""
    negated = glob[at : at + 1] in (b"!", b"^")
    at += negated
    members: set[int] = set()
    previous, begin = 0, at
    while at == begin or glob[at : at + 1] != b"]":
        byte = glob[at] if at < len(glob) else 0
        next_byte = glob[at + 1 : at + 2]
        if byte == ord("\\") and next_byte:
            at, byte = at + 1, glob[at + 1]
            members.add(byte)
        elif byte == ord("-") and previous and next_byte not in (b"", b"]"):
            at += 2 if next_byte == b"\\" else 1
            if at >= len(glob):
                return _NOTHING, at
            members.update(range(previous, glob[at] + 1))
            byte = 0
        elif byte == ord("[") and next_byte == b":":
            end = glob.find(b"]", at + 2)
            if end < 0:
                return _NOTHING, len(glob)
            if end > at + 2 and glob[end - 1] == ord(":"):
                if (known := _CLASSES.get(glob[at + 2 : end - 1])) is None:
                    return _NOTHING, len(glob)
                members.update(b for b in range(256) if re.match(known, bytes([b])))
                at, byte = end, 0
            else:
                members.add(byte)
        elif byte in (0, ord("\\")):
            return _NOTHING, len(glob)
        else:
            members.add(byte)
        previous, at = byte, at + 1
    members = set(range(256)) - members if negated else members
    chosen = b"".join(b"\\x%02x" % one for one in sorted(members - {ord("/")}))
    return (b"[" + chosen + b"]" if chosen else _NOTHING), at + 1


@dataclass(frozen=True)
class Rules:
    """One ignore file."""

    folder: str
    """The folder to which the patterns are relative."""
    patterns: tuple[Pattern, ...]
    is_last_word: bool = False
    """Whether the file is a `.drayignore`, which takes precedence over all files that Git reads."""

    def decision(self, path: str, *, is_folder: bool) -> bool | None:
        """Return whether the last matching pattern ignores the path; None if no pattern matches."""
        relative = os.fsencode(path[len(self.folder.rstrip("/")) + 1 :])
        for pattern in reversed(self.patterns):
            if pattern.matches(relative, is_folder=is_folder):
                return not pattern.includes
        return None


def decision(rules: Sequence[Rules], path: str, *, is_folder: bool) -> bool | None:
    """Return whether the last matching rule ignores the path; None if no rule matches."""
    for each in reversed(rules):
        if (found := each.decision(path, is_folder=is_folder)) is not None:
            return found
    return None


def read_rules(folder: str, file: Path, *, is_last_word: bool = False) -> list[Rules]:
    """Return the rules of an ignore file. The list is empty if the file has no rules or can't be
    read."""
    # Like Git, don't follow a symbolic link named `.gitignore`, because it could lead out of the
    # repository.
    flags = os.O_NOFOLLOW if file.name == GIT_IGNORE else 0
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | flags), "rb") as opened:
            patterns = parsed(opened.read())
    except OSError:
        return []
    return [Rules(folder, tuple(patterns), is_last_word)] if patterns else []


def rules_in(folder: Path) -> list[Rules]:
    """Return the rules in a folder's own ignore files."""
    return [
        *read_rules(str(folder), folder / GIT_IGNORE),
        *read_rules(str(folder), folder / DRAY_IGNORE, is_last_word=True),
    ]
