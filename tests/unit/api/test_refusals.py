"""A home or database that can't be used: one sentence explains where and what to do."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from service.config.home_lock import HomeLock, HomeUnusable
from service.config.settings import Settings
from service.db.damage import DatabaseUnusable
from service.db.migrate import migrate
from service.db.session import Database
from service.domain.errors import DatabaseUnavailable
from service.runtime import Runtime
from tests.marks import soak
from tests.unit.api.serving import Refused
from tests.unit.api.test_server import ROOT, refusal


def _no_database(path: Path) -> None:
    path.write_bytes(b"garbage" * 1000)


def _truncated(path: Path) -> None:
    os.truncate(path, 8192)


def _emptied(path: Path) -> None:
    os.truncate(path, 0)
    (path.parent / "storage" / ".dray-nonce").write_text("a service has used it")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _of_another_program(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE jobs (name TEXT)")


def _of_a_newer_version(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a database that has been used."""
    home = tmp_path / "home"
    (home / "storage").mkdir(parents=True)
    database = Database(f"sqlite:///{home / 'dray.db'}")
    migrate(database)
    database.close()
    return home


@pytest.mark.parametrize(
    ("break_", "said"),
    [
        (_no_database, "{path} is damaged (file is not a database): restore the home"),
        (_truncated, "{path} is damaged (database disk image is malformed): restore the home"),
        (_emptied, "{path} is damaged (the file is empty): restore the home"),
        (_folder, "{path} is a folder instead of a file: move the folder away"),
        (_of_another_program, "{path} can't be used (table jobs already exists)"),
        (_of_a_newer_version, "{path} is at revision 9999, which is unknown to this version"),
    ],
)
@pytest.mark.parametrize("program", ["api", soak("service")])
def test_a_database_that_can_not_be_used_is_named(
    refused: Refused, home: Path, break_: Callable[[Path], None], said: str, program: str
) -> None:
    path = home / "dray.db"
    break_(path)
    text = refused(home) if program == "api" else refusal(_service(home))
    last = text.strip().splitlines()[-1]
    assert said.format(path=path) in last
    assert last.startswith("the database ")


def _service(home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "service"],
        cwd=ROOT,
        env={**os.environ, "DRAY_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_new_database_may_be_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "dray.db").touch()
    database = Database(f"sqlite:///{tmp_path / 'dray.db'}")
    migrate(database)
    database.close()


@pytest.mark.parametrize("below", ["", "home"])
def test_a_home_that_is_or_lies_below_a_file_is_named(
    refused: Refused, tmp_path: Path, below: str
) -> None:
    (tmp_path / "file").write_text("")
    home = tmp_path / "file" / below
    text = refused(home)
    assert text.count("\n") == 1
    assert text.startswith(f"the home {home} is")
    assert "set DRAY_HOME" in text


def test_a_storage_that_is_a_file_is_named(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = refused(tmp_path / "home", DRAY_STORAGE_URL=(tmp_path / "file").as_uri())
    assert f"the storage {(tmp_path / 'file').as_uri()} is not a folder" in text


def test_a_folder_of_the_database_that_can_not_be_made_is_named(
    refused: Refused, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    url = f"sqlite:///{tmp_path}/file/dray.db"
    text = refused(tmp_path / "home", DRAY_DATABASE_URL=url)
    assert f"the database's folder {tmp_path}/file is not a folder" in text


def test_a_server_of_the_database_that_does_not_answer_is_named(
    refused: Refused, tmp_path: Path
) -> None:
    url = "postgresql://dray:secret@127.0.0.1:1/dray"
    text = refused(tmp_path / "home", DRAY_DATABASE_URL=url)
    assert "127.0.0.1:1/dray can't be used: " in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "is on a full disk"),
        (errno.EROFS, "is on a read-only file system"),
        (errno.EACCES, "can't be read and written by this user"),
        (errno.EIO, "can't be used"),
    ],
)
@pytest.mark.parametrize("call", ["open", "write"])
def test_a_home_that_takes_no_file_is_named_and_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str, call: str
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(HomeUnusable, match=f"{tmp_path} {said}.*set DRAY_HOME"):
            HomeLock.acquire(tmp_path)
    HomeLock.acquire(tmp_path).release()


async def test_a_home_is_free_again_after_a_start_that_was_refused(home: Path) -> None:
    _no_database(home / "dray.db")
    settings = Settings(home=home, database_url="", storage_url="")
    with pytest.raises(DatabaseUnusable):
        await Runtime.open(settings, loops=False)
    HomeLock.acquire(home).release()


async def test_damage_that_is_found_while_it_runs_makes_the_service_not_ready(home: Path) -> None:
    settings = Settings(home=home, database_url="", storage_url="")
    runtime = await Runtime.open(settings, loops=False)
    path = home / "dray.db"
    try:
        assert (await runtime.ready()).checks["database"] == "ok"
        with sqlite3.connect(path) as connection:  # so that pages are read from the database file
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * (size - 4096))
        runtime.database._read_engine.dispose()
        runtime.database._near_engine.dispose()
        with pytest.raises(DatabaseUnavailable, match="the database is damaged"):
            await runtime.jobs.get("job-" + "0" * 26)
        readiness = await runtime.ready()
        assert not readiness.ok
        assert f"the database {path} is damaged" in readiness.checks["database"]
    finally:
        await runtime.stop()
