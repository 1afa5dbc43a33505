"""Refusals to start, for a person to read: the fault, its place, and what to do."""

from __future__ import annotations

import errno

_REASONS = {
    errno.EEXIST: "is no folder",
    errno.ENOTDIR: "is a file, or below one",
    errno.EACCES: "can't be read and written by this user",
    errno.EPERM: "can't be changed by this user",
    errno.EROFS: "is on a read-only file system",
    errno.ENOSPC: "is on a disk without room",
    errno.EDQUOT: "is on a disk whose quota is used up",
    errno.ENAMETOOLONG: "has a name that is too long",
}


class StartRefused(Exception):
    """The service does not start; the message is a sentence that says what to do."""


def reason_of(error: OSError) -> str:
    """The system's error about a file, as words that go on after its name."""
    return _REASONS.get(error.errno or 0) or f"can't be used ({error.strerror or error})"
