"""Deletion of folders that a user's programs have filled, with any modes and depth."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ray_workers.shared.folders.removal import remove_tree
from tests.unit.workers.other_user import NOBODY


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder that another user can reach; only root can reach pytest's own folders."""
    folder = Path(tempfile.mkdtemp())
    if os.getuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


def without_roots_rights(work: Callable[[], None]) -> int:
    """The exit code of the work in a process that heeds file modes, unlike a process of root."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        work()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("mode", [0o500, 0o000])
def test_folders_that_may_not_be_written_to_go_and_what_links_name_stays(
    root: Path, mode: int
) -> None:
    def work() -> None:
        kept = root / "kept"
        kept.mkdir()
        (kept / "file").touch()
        kept.chmod(0o500)
        doomed = root / "doomed"
        inner = doomed / "a" / "b"
        inner.mkdir(parents=True)
        (inner / "file").touch()
        (inner / "link").symlink_to(kept)
        (doomed / "link").symlink_to(kept)
        for folder in (inner, inner.parent, doomed):
            folder.chmod(mode)
        remove_tree(doomed)
        assert sorted(p.name for p in root.iterdir()) == ["kept"]
        assert kept.stat().st_mode & 0o777 == 0o500
        assert (kept / "file").exists()

    assert without_roots_rights(work) == 0


def test_a_tree_deeper_than_pythons_stack_goes(tmp_path: Path) -> None:
    doomed = tmp_path / "doomed"
    doomed.mkdir()
    folder = os.open(doomed, os.O_RDONLY)
    for _ in range(1050):
        os.mkdir("d", dir_fd=folder)
        below = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)
    try:
        remove_tree(doomed)
        assert not doomed.exists()
    finally:  # pytest itself could not remove it
        subprocess.run(["rm", "-rf", str(doomed)], check=True)


def test_a_link_or_nothing_at_all_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    remove_tree(tmp_path / "link")
    remove_tree(tmp_path / "nothing")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept", "link"]
