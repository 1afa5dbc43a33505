"""The token in a service's home, with which callers other than its user's processes sign in.

A service without a tokens file writes it at its first start. This user's SDK and command line read
it where the service has put it: below `DRAY_HOME`, or `.dray` in the current folder.
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
"""How these tokens begin. The web page takes only such a token from a link."""
_MAX_BYTES = 256


class UnsafeTokenFile(Exception):
    """The file can't hold a secret of this user; the message completes a sentence on the file."""


def is_loopback(host: str) -> bool:
    """Whether a host, by its address or name, can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def path_in(home: Path) -> Path:
    return home / FILE_NAME


def read(home: Path) -> str | None:
    """Return the token in a home; None if there is none.

    Raises UnsafeTokenFile if other users may have read or written the token, and OSError.
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
            raise UnsafeTokenFile("is no file")
        if status.st_uid != os.geteuid():
            raise UnsafeTokenFile(f"belongs to the user with id {status.st_uid}")
        if status.st_mode & 0o077:
            raise UnsafeTokenFile("is open to other users")
        token = file.read(_MAX_BYTES).decode("ascii", "replace").strip()
    if not token.startswith(PREFIX) or not token.isascii() or not token.isprintable():
        raise UnsafeTokenFile("holds no token of a home")
    return token


def own() -> str | None:
    """The token in this user's home; None if there is none, or it can't be trusted."""
    home = Path(os.environ.get("DRAY_HOME") or DEFAULT_HOME).expanduser()
    try:
        return read(home)
    except (UnsafeTokenFile, OSError):
        return None
