"""Why the service can't start: what is wrong, where, and what to do, for a person to read."""

from __future__ import annotations

import errno

_REASONS = {
    errno.EEXIST: "is no folder",
    errno.ENOTDIR: "is, or lies below, a file",
    errno.EACCES: "can't be read and written by this user",
    errno.EPERM: "can't be changed by this user",
    errno.EROFS: "lies on a read-only file system",
    errno.ENOSPC: "lies on a disk without room",
    errno.EDQUOT: "lies on a disk whose quota is used up",
    errno.ENAMETOOLONG: "has a name that is too long",
}


class StartRefused(Exception):
    """The service does not start; the message is a sentence that says what to do."""


def reason_of(error: OSError) -> str:
    """What the system says of a file, to go on after its name."""
    return _REASONS.get(error.errno or 0) or f"can't be used ({error.strerror or error})"
