"""Removes unfinished environments, and the least recently used environments beyond the limit."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import time
from pathlib import Path

from ray_workers.node.environments.build import CACHE, size_of
from ray_workers.node.environments.programs import end_all, mark_of
from ray_workers.node.environments.uv import uv_program
from ray_workers.node.shared_work import NotDone
from ray_workers.shared.folders.environment_overlay import EnvironmentRecord, read_record
from ray_workers.shared.folders.removal import remove_tree
from ray_workers.shared.paths import entries

IDLE_S = 600.0
"""Seconds for which an environment is kept after its last use, because ranks may be about to
start."""


def evict(root: Path, limit_bytes: int) -> None:
    """Remove the folders that dead builders have left behind. If the limit is exceeded, also remove
    the installer's cache and the least recently used environments that are not in use. Blocks."""
    kept: dict[Path, EnvironmentRecord] = {}
    for path in entries(root):
        if path.suffix != ".json":
            continue
        if (record := read_record(path)) is None:
            path.unlink(missing_ok=True)
        else:
            kept[path] = record
    remove_unfinished(root)
    total = size_of(root / CACHE)
    for path, record in sorted(kept.items(), key=lambda item: _used_at(item[0]), reverse=True):
        total += record.size_bytes
        is_old = time.time() - _used_at(path) > IDLE_S
        if total > limit_bytes and is_old and _remove(root, path, record):
            total -= record.size_bytes
    if total > limit_bytes:
        with contextlib.suppress(NotDone, OSError, subprocess.SubprocessError):
            command = [uv_program(), "cache", "clean", "--cache-dir", str(root / CACHE)]
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60.0)


def remove_unfinished(root: Path) -> None:
    """Remove the folders of builds whose builder has exited, and end the processes of these builds.
    Blocks."""
    records = (read_record(path) for path in entries(root) if path.suffix == ".json")
    finished = {record.folder for record in records if record is not None}
    for path in entries(root):
        if path.is_dir() and not path.name.startswith(".") and path.name not in finished:
            _remove_if_unfinished(root, path)


def _remove_if_unfinished(root: Path, folder: Path) -> None:
    """Remove a folder whose builder is gone, and end the processes that the builder has started."""
    key = folder.name.split("-")[0]
    with (root / f".lock-{key}").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        record = read_record(root / f"{key}.json")
        if record is not None and record.folder == folder.name:
            return  # it was just finished
        end_all(mark_of(folder))
        remove_tree(folder)


def _remove(root: Path, path: Path, record: EnvironmentRecord) -> bool:
    """Remove an environment. Returns False if ranks are using the environment."""
    folder = root / record.folder
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        path.unlink(missing_ok=True)
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        # Remove the record first, so that no process finds a partially removed folder.
        path.unlink(missing_ok=True)
        remove_tree(folder)
        return True
    finally:
        os.close(lock)


def _used_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
