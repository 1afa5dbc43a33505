"""A home that is backed up while in use and restored elsewhere has the same contents."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from dray.views import JobState
from ray_workers.shared.contracts import Frame, FrameKind
from ray_workers.shared.names import attempt_prefix
from service.__main__ import main
from service.config.home_lock import HomeInUse, HomeLock
from service.config.settings import Settings
from service.db.session import Database
from service.storage.backup import BackupError, backup, restore
from service.storage.storage import Storage
from tests.unit.service.helpers import Service, frame, log, metrics

STATE = b"weights" * 1000


def saved(service: Service, job_id: str, step: int) -> Frame:
    """Write the files of a checkpoint, and return the frame that reports it."""
    key = f"{attempt_prefix(job_id, 1)}/checkpoints/step-{step}"
    entry = {
        "path": "state.pt",
        "size_bytes": len(STATE),
        "sha256": hashlib.sha256(STATE).hexdigest(),
    }
    manifest = json.dumps({"files": [entry], "step": step}).encode()
    service.storage.write_bytes(f"{key}/state.pt", STATE)
    service.storage.write_bytes(f"{key}/manifest.json", manifest)
    body = {
        "step": step,
        "url": service.storage.url_of(key),
        "size_bytes": len(STATE) + len(manifest),
        "manifest_sha256": hashlib.sha256(manifest).hexdigest(),
        "metrics": {},
    }
    return frame(FrameKind.CHECKPOINT, body)


def artifact(service: Service, job_id: str) -> Frame:
    service.storage.write_bytes(f"{attempt_prefix(job_id, 1)}/artifacts/model", b"model")
    return service.artifact(job_id, 1, "model")


class Home(Service):
    """A service with a SQLite home."""

    def __init__(self, home: Path) -> None:
        settings = Settings(home=home)
        super().__init__(Database(settings.database_url), Storage(settings.storage_url), home)

    async def everything(self, job_id: str) -> dict[str, Any]:
        """Return everything that can be read about a job, including its files, with the URL
        replaced by STORAGE."""
        queries = self.queries
        answers = {
            "job": await self.jobs.get(job_id),
            "metrics": await queries.metrics(job_id),
            "logs": await queries.logs(job_id),
            "events": await queries.events(job_id),
            "attempts": await queries.attempts(job_id),
            "checkpoints": await queries.checkpoints(job_id),
            "artifacts": await queries.artifacts(job_id),
        }
        read: dict[str, Any] = {
            name: json.loads(view.model_dump_json().replace(self.storage.url, "STORAGE"))
            for name, view in answers.items()
        }
        for item in answers["artifacts"].items:
            _, url = await queries.artifact(job_id, item.id)
            read[item.path] = self.storage.read_bytes(self.storage.key_of(url))
        for item in answers["checkpoints"].items:
            for file in (await queries.checkpoint_files(job_id, item.step)).items:
                _, key = await queries.checkpoint_file(job_id, item.step, file.path)
                read[key] = self.storage.read_bytes(key)
        return read


@pytest.fixture
def old(sqlite_url: str, tmp_path: Path) -> Home:
    home = tmp_path / "old"
    home.mkdir()
    Path(sqlite_url.removeprefix("sqlite:///")).rename(home / "dray.db")
    return Home(home)


async def finished(service: Service) -> str:
    job_id = await service.running(labels={"a": "b"})
    lines = [log(i, "x" * 1000) for i in range(100)]
    points = [metrics(step, {"loss": 1.0 / step}) for step in range(1, 2001)]
    frames = [*points, *lines, saved(service, job_id, 5), artifact(service, job_id)]
    service.report(job_id, 1, frames)
    service.end(job_id, 1)
    return job_id


async def test_a_restored_home_reads_the_same(old: Home, tmp_path: Path) -> None:
    done = await finished(old)
    from_it = await old.submit(init_from={"job": done})
    before = {job_id: await old.everything(job_id) for job_id in (done, from_it)}
    about = backup(old.settings, tmp_path / "copy.tar")
    assert (about.num_jobs, about.has_files) == (2, True)
    assert restore(tmp_path / "copy.tar", tmp_path / "new") == about
    new = Home(tmp_path / "new")
    for job_id, answers in before.items():
        assert await new.everything(job_id) == answers
    claimed = new.claim(from_it)
    assert claimed is not None
    assert claimed.init_from is not None
    assert claimed.init_from.url.startswith(new.storage.url)
    assert (await new.submit()) not in before, "it is a home to go on with"


async def test_an_archive_and_the_files_of_an_older_open_one_are_for_their_user_alone(
    old: Home, tmp_path: Path
) -> None:
    await finished(old)
    umask = os.umask(0o022)
    try:
        backup(old.settings, tmp_path / "copy.tar")
        with (
            tarfile.open(tmp_path / "copy.tar") as copy,
            tarfile.open(tmp_path / "open.tar", "w") as older,
        ):
            for member in copy:
                older.addfile(member.replace(mode=0o644), copy.extractfile(member))
        restore(tmp_path / "open.tar", tmp_path / "new")
    finally:
        os.umask(umask)
    assert (tmp_path / "copy.tar").stat().st_mode & 0o777 == 0o600
    files = [path for path in (tmp_path / "new").rglob("*") if path.is_file()]
    assert len(files) > 3
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


async def test_it_is_taken_by_command_while_the_service_writes(
    old: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await finished(old)
    dest, new = tmp_path / "copy.tar", tmp_path / "new"
    environment = {**os.environ, "DRAY_HOME": str(old.settings.home)}
    with HomeLock.acquire(old.settings.home):
        taking = subprocess.Popen(
            [sys.executable, "-m", "service", "backup", str(dest)], env=environment
        )
        while taking.poll() is None:
            await old.submit()
    assert taking.returncode == 0
    assert main(["restore", str(dest), "--home", str(new)]) == 0
    assert "jobs and" in capsys.readouterr().out
    restored = Home(new)
    assert await restored.everything(job_id) == await old.everything(job_id)
    with sqlite3.connect(new / "dray.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "nowhere"))
    assert main(["backup", str(tmp_path / "other.tar")]) == 1
    assert "there is no database" in capsys.readouterr().err


async def test_a_running_job_is_taken_with_what_it_had(old: Home, tmp_path: Path) -> None:
    job_id = await old.running()
    old.report(job_id, 1, [saved(old, job_id, 5)])
    backup(old.settings, tmp_path / "copy.tar")
    restore(tmp_path / "copy.tar", tmp_path / "new")
    new = Home(tmp_path / "new")
    assert (await new.jobs.get(job_id)).state is JobState.RUNNING
    assert [c.step for c in (await new.queries.checkpoints(job_id)).items] == [5]


async def test_a_pipe_that_a_job_left_is_not_waited_for(old: Home, tmp_path: Path) -> None:
    job_id = await finished(old)
    folder = old.storage.local_path(f"jobs/{job_id}")
    assert folder is not None
    os.mkfifo(folder / "pipe")
    before = await old.everything(job_id)
    backup(old.settings, tmp_path / "copy.tar")
    restore(tmp_path / "copy.tar", tmp_path / "new")
    assert await Home(tmp_path / "new").everything(job_id) == before


async def test_what_was_deleted_while_it_was_taken_is_left_out(old: Home, tmp_path: Path) -> None:
    job_id = await finished(old)
    extra = await old.running()
    old.report(extra, 1, [saved(old, extra, 5), saved(old, extra, 6), artifact(old, extra)])
    old.storage.delete_tree(f"{attempt_prefix(extra, 1)}/checkpoints/step-5")
    old.storage.delete_tree(f"{attempt_prefix(extra, 1)}/artifacts")
    folder = old.storage.folder
    assert folder is not None
    (folder / f"jobs/{job_id}/.half-written").write_bytes(b"x")
    (folder / f"jobs/{job_id}/link").symlink_to("/etc/passwd")
    backup(old.settings, tmp_path / "copy.tar")
    restore(tmp_path / "copy.tar", tmp_path / "new")
    new = Home(tmp_path / "new")
    assert [c.step for c in (await new.queries.checkpoints(extra)).items] == [6]
    assert (await new.queries.artifacts(extra)).items == []
    logs = next((folder / f"jobs/{job_id}").rglob("*.jsonl"))
    logs.unlink()
    backup(old.settings, tmp_path / "second.tar")
    names = [path.name for path in (tmp_path / "new" / "storage" / "jobs" / job_id).iterdir()]
    assert names == ["attempts"]


async def test_what_is_in_the_way_is_not_overwritten(old: Home, tmp_path: Path) -> None:
    await finished(old)
    dest = tmp_path / "copy.tar"
    backup(old.settings, dest)
    with pytest.raises(BackupError, match="already exists"):
        backup(old.settings, dest)
    with pytest.raises(BackupError, match="is not empty"):
        restore(dest, old.settings.home)
    with HomeLock.acquire(tmp_path / "used"), pytest.raises(HomeInUse):
        restore(dest, tmp_path / "used")
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]
    with pytest.raises(BackupError, match="can't be written"):
        backup(old.settings, tmp_path / "no" / "such" / "folder.tar")


async def test_what_is_no_backup_is_refused(old: Home, tmp_path: Path) -> None:
    await finished(old)
    whole = tmp_path / "whole.tar"
    backup(old.settings, whole)
    cut = tmp_path / "cut.tar"
    cut.write_bytes(whole.read_bytes()[:20_480])
    text = tmp_path / "text.tar"
    text.write_text("this is no tar file" * 100)
    newer = _repacked(whole, tmp_path / "newer.tar", {"format": 2})
    broken = _repacked(whole, tmp_path / "broken.tar", {"database_sha256": "0" * 64})
    for number, (source, says) in enumerate(
        [
            (cut, "truncated|can't be read"),
            (text, "can't be read"),
            (tmp_path / "none.tar", "can't be read"),
            (newer, "has format 2"),
            (broken, "is damaged"),
        ]
    ):
        with pytest.raises(BackupError, match=says):
            restore(source, tmp_path / f"home-{number}")


def _repacked(source: Path, dest: Path, changes: dict[str, Any]) -> Path:
    """Copy a backup, with changes to its description."""
    with tarfile.open(source) as old, tarfile.open(dest, "w") as new:
        for member in old:
            file = old.extractfile(member)
            assert file is not None
            data = file.read()
            if member.name == "backup.json":
                data = json.dumps(json.loads(data) | changes).encode()
                member.size = len(data)
            path = dest.with_suffix(".member")
            path.write_bytes(data)
            with path.open("rb") as again:
                new.addfile(member, again)
    return dest


def test_of_postgresql_its_own_tools_make_copies(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, database_url="postgresql://nobody@nowhere/none")
    with pytest.raises(BackupError, match="pg_dump"):
        backup(settings, tmp_path / "copy.tar")


async def test_of_a_storage_that_is_no_folder_only_the_database_is_taken(
    old: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = await old.submit()
    monkeypatch.setenv("DRAY_HOME", str(old.settings.home))
    monkeypatch.setenv("DRAY_STORAGE_URL", "memory://somewhere")
    assert main(["backup", str(tmp_path / "copy.tar")]) == 0
    assert "copy it separately" in capsys.readouterr().out
    about = restore(tmp_path / "copy.tar", tmp_path / "new")
    assert (about.has_files, about.num_files) == (False, 0)
    assert (await Home(tmp_path / "new").jobs.get(job_id)).id == job_id
