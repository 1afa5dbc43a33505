"""Secrets of jobs: named files that the cluster's operator puts on the nodes.

A job's document contains only the names of secrets. The rank's process reads the file with that
name on its node, and so does its rank actor, which masks the value in the rank's output. dray never
sends the value to another machine. A file in the folder itself is available to all owners' jobs. A
file in `owners/OWNER` is available only to that owner's jobs, and takes precedence.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

MAX_BYTES = 64 << 10
MASK = "***"
MIN_MASKED = 4
"""A value, or a line of a value, is masked only if it has at least this many characters, not
counting surrounding spaces. Masking shorter values would hide large parts of any output."""
OWNERS = "owners"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWNER = re.compile(r"[A-Za-z0-9_@][A-Za-z0-9_@.+-]*")
"""Pattern of the names of owners that can have a folder. Other names could be paths outside of the
folder of secrets."""


class SecretUnavailable(Exception):
    """A node does not have the secret, or other users can read the secret's file. The message never
    contains the value."""


def read_secrets(
    folder: str | None, names: Iterable[str], owner: str | None = None
) -> dict[str, str]:
    """Return the values, without a final newline, keyed by name. Raises SecretUnavailable."""
    return {name: _read(folder, name, owner) for name in names}


def is_owners(folder: str | None, name: str, owner: str | None) -> bool:
    """Whether the secret of this name on this node is available only to this owner."""
    if folder is None or owner is None or not (_OWNER.fullmatch(owner) and _NAME.fullmatch(name)):
        return False
    return os.path.lexists(Path(folder, OWNERS, owner, name))


def _read(folder: str | None, name: str, owner: str | None) -> str:
    if folder is None:
        raise SecretUnavailable(
            f"the job requests the secret {name}, but this cluster has no folder for secrets: "
            "set DRAY_SECRETS_DIR"
        )
    if not _NAME.fullmatch(name):
        raise SecretUnavailable("the name of a secret must consist of letters, digits and _")
    parent = Path(folder)
    if is_owners(folder, name, owner):
        parent = parent / OWNERS / str(owner)
    try:
        fd = os.open(parent / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise SecretUnavailable(
            f"the secret {name} can't be read on this node: {error.strerror}"
        ) from None
    try:
        _refuse_if_open_to_others(os.fstat(fd), name)
        with open(fd, "rb", closefd=False) as file:
            data = file.read(MAX_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > MAX_BYTES or b"\0" in data:
        raise SecretUnavailable(
            f"the secret {name} must be at most {MAX_BYTES >> 10} KiB long, and must not contain "
            "a NUL character"
        )
    try:
        return data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise SecretUnavailable(f"the secret {name} is not UTF-8 text") from None


def _refuse_if_open_to_others(status: os.stat_result, name: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise SecretUnavailable(f"the secret {name} is not a regular file")
    if status.st_uid not in (0, os.getuid()):
        raise SecretUnavailable(f"the secret {name} must be owned by dray's user or root")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise SecretUnavailable(
            f"the secret {name} can be read by other users of this node: set the mode of its "
            "file to 0600 or 0400"
        )


class Masker:
    """Masks secret values in text and bytes. Each line of a multi-line value is also masked."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        parts = {line for value in secrets.values() for line in [value, *value.splitlines()]}
        # Mask the longest values first, so that a value that contains another value is masked
        # completely.
        found = sorted((p for p in parts if len(p.strip()) >= MIN_MASKED), key=len, reverse=True)
        self._values = found
        self._text = re.compile("|".join(map(re.escape, found))) if found else None
        encoded = [part.encode() for part in found]
        self._bytes = re.compile(b"|".join(map(re.escape, encoded))) if encoded else None
        self.longest = max(map(len, encoded), default=0)
        """Length of the longest value in bytes. If a string is truncated, up to this many bytes
        next to the cut may be part of a value."""

    def may_go_on(self, text: str) -> bool:
        """Whether the text ends with the beginning of a value."""
        return any(
            text.endswith(value[:length])
            for value in self._values
            for length in range(1, len(value))
        )

    def text(self, text: str) -> str:
        return text if self._text is None else self._text.sub(MASK, text)

    def data(self, data: bytes) -> bytes:
        return data if self._bytes is None else self._bytes.sub(MASK.encode(), data)
