"""The directory in which a job's script runs. Each job has one such directory per node, which is
kept between attempts.

Each file next to the script is linked into the directory under the same relative path. Folders are
created instead of linked, so that files that the job writes to them belong to the job; only large
folders are linked.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from dray.train import files
from ray_workers.shared.folders.removal import remove_tree
from ray_workers.shared.paths import entries

MAX_LINKS = 2000
"""Maximum number of links per script. Creating a link takes about 10 microseconds. Once the limit
is reached, folders are linked instead of created."""
LEFT_OUT = frozenset({"__pycache__"})


def enter(directory: Path, script_dir: Path) -> None:
    """Create the directory, link the files next to the script, and make it the current directory.

    The ranks of a node can call this function concurrently. Existing files are not changed.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    _link_all(script_dir, directory)
    os.chdir(directory)


def _link_all(source: Path, target: Path) -> None:
    """Link the files of one folder after another, starting with the folders nearest to the
    script."""
    folders, left = [(source, target)], MAX_LINKS
    for folder, copy in folders:
        found = _listed(folder)
        left -= len(found)
        if left < 0 and folder != source:
            _link(folder, copy)
            continue
        copy.mkdir(exist_ok=True)
        for entry in found:
            link = copy / entry.name
            # Hidden folders, such as .git, belong to tools and are often large.
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                if not link.is_symlink() and not target.is_relative_to(entry.path):
                    folders.append((Path(entry.path), link))
            else:
                _link(Path(entry.path), link)


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        return sorted((e for e in found if e.name not in LEFT_OUT), key=lambda e: e.name)
    return []


def _link(source: Path, link: Path) -> None:
    with contextlib.suppress(FileExistsError):
        link.symlink_to(source)


def jobs_in(root: Path) -> list[str]:
    """Return the jobs that have a directory below `root`."""
    return sorted(path.name for path in entries(root))


def remove(root: Path, job_ids: Iterable[str]) -> None:
    """Delete the directories of these jobs. Anything that can't be deleted now is deleted later."""
    for job_id in set(job_ids) & set(jobs_in(root)):
        remove_tree(root / job_id)


def output_dir(folders: Path) -> Path:
    """Return DRAY_OUTPUT_DIR. `folders` is `ray_workers.shared.paths.folders_dir`."""
    return folders / "output"


def checkpoint_dir(folders: Path, folder_url: str) -> Path:
    """Return DRAY_CHECKPOINT_DIR: the folder in the storage, or the node's copy of it."""
    return files.local_path(folder_url) or folders / "checkpoints"
