"""The token in a service's home folder. Callers sign in with this token unless their processes
belong to the service's own user.

A service without a tokens file writes the token when it starts for the first time. The SDK and the
command line of the same user read the token from `DRAY_HOME`, or from `.dray` in the current
folder.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import stat
from pathlib import Path

DEFAULT_HOME = ".dray"
FILE_NAME = "token"
PREFIX = "dray-home-"
"""Prefix of these tokens. If a link contains a token, the web page accepts it only with this
prefix."""
_MAX_BYTES = 256


class UnsafeTokenFile(Exception):
    """The file can't be trusted to contain a secret. The message is a predicate, such as 'is a
    symbolic link'."""


def is_loopback(host: str) -> bool:
    """Whether a host, given as an address or a name, can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def path_in(home: Path) -> Path:
    return home / FILE_NAME


def read(home: Path) -> str | None:
    """Return the token in a home folder; None if there is none.

    Raises UnsafeTokenFile if other users could have read or written the token, and OSError if the
    token can't be read.
    """
    try:
        fd = os.open(path_in(home), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafeTokenFile("is a symbolic link") from None
        raise
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UnsafeTokenFile("is not a file")
        if status.st_uid != os.geteuid():
            raise UnsafeTokenFile(f"belongs to the user with id {status.st_uid}")
        if status.st_mode & 0o077:
            raise UnsafeTokenFile("is accessible to other users")
        token = file.read(_MAX_BYTES).decode("ascii", "replace").strip()
    if not token.startswith(PREFIX) or not token.isascii() or not token.isprintable():
        raise UnsafeTokenFile("does not contain a valid token")
    return token


def own() -> str | None:
    """Return the token in this user's home folder; None if there is none, or if it can't be
    trusted."""
    home = Path(os.environ.get("DRAY_HOME") or DEFAULT_HOME).expanduser()
    try:
        return read(home)
    except (UnsafeTokenFile, OSError):
        return None
