"""The file with the callers' tokens, and the token that the service writes when it first starts.

The file has one line per caller: `name:sha256-of-the-token`, followed by `:admin` if the caller may
change queues. A `#` begins a comment. Changes to the file take effect immediately.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dray import home_token
from dray.home_token import UnsafeTokenFile
from dray.spec.fields import USER_NAME
from service.config.home_lock import keep_private
from service.config.start_refusals import StartRefused, reason_of

logger = logging.getLogger(__name__)

SETTLED_NS = 1_000_000_000
LOCAL_OWNER = "default"
"""The owner of jobs on a server without tokens."""


class BadTokensFile(StartRefused):
    """Raised if DRAY_TOKENS_FILE can't be read or has an invalid line."""


@dataclass(frozen=True)
class KnownToken:
    sha256: bytes
    is_admin: bool


Tokens = Mapping[str, KnownToken]
"""Tokens by caller name."""


def load_tokens(path: Path) -> Tokens:
    """Read the tokens. Raises BadTokensFile if the file is unreadable, invalid or empty."""
    try:
        tokens, mistakes = read_tokens(path)
    except OSError as error:
        raise BadTokensFile(f"DRAY_TOKENS_FILE {path} can't be read: {error}") from None
    if mistakes:
        raise BadTokensFile(mistakes[0])
    if not tokens:
        raise BadTokensFile(f"DRAY_TOKENS_FILE {path} lists no callers: add a line for each caller")
    return tokens


def read_tokens(path: Path) -> tuple[Tokens, list[str]]:
    """Return the tokens, and a message for each invalid line. Raises OSError."""
    tokens: dict[str, KnownToken] = {}
    mistakes = []
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = re.fullmatch(rf"({USER_NAME}):([0-9a-fA-F]{{64}})(:admin)?", entry)
        if match is None or match[1] in tokens:
            mistakes.append(
                f"{path}, line {number}: write name:sha256-of-the-token (printf %s TOKEN | "
                "sha256sum), followed by :admin for an admin; each name must be unique"
            )
        else:
            tokens[match[1]] = KnownToken(bytes.fromhex(match[2]), match[3] is not None)
    return tokens, mistakes


class TokensFile:
    """The current content of the tokens file, which is read again after a change.

    If a change makes lines invalid while a process runs, these lines are ignored, and all other
    lines apply. A token that is removed from the file is therefore always refused.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] | None = None
        self._tokens: Tokens = {}

    def tokens(self) -> Tokens:
        """Return the current tokens. Raises OSError if the file can't be read."""
        stat = self._path.stat()
        version = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        if version != self._seen:
            self._tokens, mistakes = read_tokens(self._path)
            for mistake in mistakes:
                logger.error("ignoring an invalid line in DRAY_TOKENS_FILE: %s", mistake)
            # If the file has just been written, read it again in the next call, because another
            # change might not update its mtime.
            is_settled = abs(time.time_ns() - stat.st_mtime_ns) > SETTLED_NS
            self._seen = version if is_settled else None
        return self._tokens


class HomeTokenUnusable(StartRefused):
    """Raised if the token file in the home can't be used or created."""


def ensure(home: Path) -> str:
    """Return the token in the home directory, and create the token if it is missing. Raise
    HomeTokenUnusable.

    The file appears only when it is complete, and never replaces another file. If two services
    start at the same time, both use the token that was written first.
    """
    path = home_token.path_in(home)
    try:
        keep_private(home)
        found = home_token.read(home)
        if found is None:
            _write(path, f"{home_token.PREFIX}{secrets.token_urlsafe(32)}\n")
            found = home_token.read(home)
    except UnsafeTokenFile as error:
        raise HomeTokenUnusable(
            f"{path} {error}: delete this file, and start the service again"
        ) from None
    except OSError as error:
        raise HomeTokenUnusable(
            f"{path} {reason_of(error)}: fix this, or set DRAY_HOME to another folder"
        ) from error
    if found is None:
        raise HomeTokenUnusable(
            f"{path} was deleted while the service was starting: start the service again"
        )
    return found


def _write(path: Path, content: str) -> None:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "w") as file:
            file.write(content)
            file.flush()
            os.fsync(fd)
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)
