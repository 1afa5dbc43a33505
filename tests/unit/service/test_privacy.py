"""Files written by the service, the server, and their child processes are accessible only to their
user."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

from service.config.home_lock import HomeLock
from service.db.session import Database

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


def test_so_does_a_server(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "DRAY_HOME": str(tmp_path / "home"), "DRAY_PORT": "0"}
    server = subprocess.Popen(
        [sys.executable, "-m", "api", "--no-loops"],
        cwd=root, env=environment, stdout=subprocess.PIPE, text=True, umask=0o022,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        assert "dray answers at" in server.stdout.readline()
        modes = _modes(tmp_path)
        umask = Path(f"/proc/{server.pid}/status").read_text().split("Umask:")[1].split()[0]
    finally:
        server.kill()
        server.communicate()
    assert {"home", "home/dray.db"} <= set(modes)
    assert [path for path, mode in modes.items() if mode & 0o077] == []
    assert umask == "0077", "of the embedded Ray that it starts"


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


def test_a_database_outside_of_the_home_that_was_open_is_closed_when_it_is_written(
    tmp_path: Path,
) -> None:
    path = tmp_path / "elsewhere.db"
    with contextlib.closing(sqlite3.connect(path)) as older:
        older.execute("PRAGMA journal_mode=WAL")
        older.execute("CREATE TABLE t (x)")
        for name in ("elsewhere.db", "elsewhere.db-wal", "elsewhere.db-shm"):
            (tmp_path / name).chmod(0o644)
        Database(f"sqlite:///{path}").close()
        modes = _modes(tmp_path)
    assert set(modes) == {"elsewhere.db", "elsewhere.db-wal", "elsewhere.db-shm"}
    assert set(modes.values()) == {0o600}


def test_a_folder_that_users_share_stays_as_it_is(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    HomeLock.acquire(shared).release()
    assert shared.stat().st_mode & 0o7777 == 0o1777
