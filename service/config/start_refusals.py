"""Errors that prevent startup. Each message states what is wrong, where, and what to do."""

from __future__ import annotations

import errno

_REASONS = {
    errno.EEXIST: "is not a folder",
    errno.ENOTDIR: "is a file, or its path contains a file instead of a folder",
    errno.EACCES: "can't be read and written by this user",
    errno.EPERM: "can't be changed by this user",
    errno.EROFS: "is on a read-only file system",
    errno.ENOSPC: "is on a full disk",
    errno.EDQUOT: "is on a disk whose quota is used up",
    errno.ENAMETOOLONG: "has a name that is too long",
}


class StartRefused(Exception):
    """Raised if the service can't start. The message states what to do."""


def reason_of(error: OSError) -> str:
    """Describe the system's error as a predicate, such as "can't be used", for a message that
    begins with a file's name."""
    return _REASONS.get(error.errno or 0) or f"can't be used ({error.strerror or error})"
