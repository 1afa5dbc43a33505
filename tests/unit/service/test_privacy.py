"""What the service and its children write is their user's alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from service.config.home_lock import HomeLock

WRITE = """
import asyncio, os, subprocess, sys
os.umask(0o022)
import service.__main__ as command
from service.runtime import Runtime

async def stand_in():
    from service.config.settings import Settings
    runtime = await Runtime.open(Settings(), loops=False)
    subprocess.run([sys.executable, "-c", "open('of_a_child', 'w'); import os; os.mkdir('folder')"])
    await runtime.stop()

command.serve = stand_in
sys.exit(command.main([]))
"""


def _modes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_mode & 0o777 for path in folder.rglob("*")
    }


def test_a_service_opens_nothing_to_other_users(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "DRAY_HOME": str(tmp_path / "home"), "PYTHONPATH": str(root)}
    subprocess.run(
        [sys.executable, "-c", WRITE], cwd=tmp_path, env=environment, check=True, timeout=120
    )
    modes = _modes(tmp_path)
    assert {"home", "home/dray.db", "of_a_child", "folder"} <= set(modes)
    assert [path for path, mode in modes.items() if mode & 0o077] == []


def test_a_home_that_was_open_is_closed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o755)
    for name in ("dray.db", "dray.db-wal"):
        (home / name).touch()
        (home / name).chmod(0o644)
    HomeLock.acquire(home).release()
    assert home.stat().st_mode & 0o777 == 0o700
    assert set(_modes(home).values()) == {0o600}


def test_a_folder_that_users_share_stays_as_it_is(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    HomeLock.acquire(shared).release()
    assert shared.stat().st_mode & 0o7777 == 0o1777
