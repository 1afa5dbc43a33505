"""Deletion of folders written by users' programs."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: Path) -> None:
    """Delete a folder and everything in it, including folders without permissions and folders
    nested more deeply than Python's stack. Links are not followed. Entries that can't be deleted
    are left."""
    with contextlib.suppress(OSError):
        top = _opened(os.fspath(path), None)
        try:
            _empty(top)
        finally:
            os.close(top)
        path.rmdir()


def _opened(name: str, parent: int | None) -> int:
    """Give a folder's owner all permissions, open the folder, and return the descriptor."""
    descriptor = os.open(name, os.O_PATH | _FOLDER, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{descriptor}", 0o700)  # noqa: PTH101
    finally:
        os.close(descriptor)
    return os.open(name, os.O_RDONLY | _FOLDER, dir_fd=parent)


def _empty(top: int) -> None:
    """Delete the contents of a folder. To handle any depth, nested folders are first moved up."""
    tried: set[str] = set()
    while names := set(os.listdir(top)) - tried:
        tried |= names
        for name in names:
            if not _unlinked(name, top):
                with contextlib.suppress(OSError):
                    _remove_folder(name, top)


def _remove_folder(name: str, top: int) -> None:
    folder = _opened(name, top)
    try:
        for each in os.listdir(folder):  # noqa: PTH208
            if not _unlinked(each, folder):
                with contextlib.suppress(OSError):
                    os.close(_opened(each, folder))  # only a writable folder can be moved
                    os.rename(each, secrets.token_hex(16), src_dir_fd=folder, dst_dir_fd=top)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=top)


def _unlinked(name: str, folder: int) -> bool:
    """Delete an entry unless it is a folder. Return whether it is gone."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
