"""The storage, the home and its lock, and the settings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from service.config.home_lock import HomeInUse, HomeLock
from service.config.settings import Settings
from service.domain.errors import FolderSpoilt, StorageUnavailable
from service.storage.storage import BadKey, Storage, check_key

HOLD = """
import sys
from pathlib import Path
from service.config.home_lock import HomeLock
lock = HomeLock.acquire(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["file", "memory"])
def any_storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "file":
        return Storage((tmp_path / "storage").as_uri())
    return Storage(f"memory://{uuid.uuid4().hex}")


def test_what_is_written_is_read_back_whole_and_in_parts(any_storage: Storage) -> None:
    any_storage.write_bytes("jobs/a/log", b"0123456789")
    assert any_storage.read_bytes("jobs/a/log") == b"0123456789"
    assert any_storage.read_bytes("jobs/a/log", 2, 5) == b"234"
    assert any_storage.read_bytes("jobs/a/log", 8) == b"89"
    assert any_storage.size_bytes("jobs/a/log") == 10
    any_storage.write_bytes("jobs/a/log", b"new")
    assert any_storage.read_bytes("jobs/a/log") == b"new"


def test_what_is_not_there_is_not_found(any_storage: Storage) -> None:
    with pytest.raises(FileNotFoundError):
        any_storage.read_bytes("jobs/none")
    with pytest.raises(FileNotFoundError):
        any_storage.size_bytes("jobs/none")
    any_storage.delete_tree("jobs/none")


def test_a_deleted_tree_is_gone_and_its_neighbours_stay(any_storage: Storage) -> None:
    for key in ("jobs/a/x", "jobs/a/b/y", "jobs/ab/z"):
        any_storage.write_bytes(key, b"1")
    any_storage.delete_tree("jobs/a")
    with pytest.raises(FileNotFoundError):
        any_storage.read_bytes("jobs/a/b/y")
    assert any_storage.read_bytes("jobs/ab/z") == b"1"


def test_urls_and_keys_lead_to_each_other(any_storage: Storage) -> None:
    url = any_storage.url_of("jobs/a b/x")
    assert any_storage.key_of(url) == "jobs/a b/x"
    for foreign in (f"{any_storage.url}x/y", "http://elsewhere/x", any_storage.url):
        with pytest.raises(BadKey):
            any_storage.key_of(foreign)


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/", ".", "a\0b", "a\\b"]
)
def test_a_key_can_not_lead_out_of_the_storage(any_storage: Storage, key: str) -> None:
    with pytest.raises(BadKey):
        check_key(key)
    for call in (any_storage.read_bytes, any_storage.delete_tree, any_storage.url_of):
        with pytest.raises(BadKey):
            call(key)


def test_a_link_can_not_lead_out_of_the_storage(tmp_path: Path) -> None:
    storage = Storage((tmp_path / "storage").as_uri())
    secret = tmp_path / "secret"
    secret.write_text("s")
    (tmp_path / "storage" / "link").symlink_to(secret)
    with pytest.raises(BadKey):
        storage.read_bytes("link")
    storage.delete_tree("link")
    assert secret.exists()


def test_a_link_can_not_lead_from_one_job_to_another(tmp_path: Path) -> None:
    storage = Storage((tmp_path / "storage").as_uri())
    storage.write_bytes("jobs/other/model", b"theirs")
    (tmp_path / "storage" / "jobs" / "mine").symlink_to(tmp_path / "storage" / "jobs" / "other")
    with pytest.raises(BadKey):
        storage.read_bytes("jobs/mine/model")
    with pytest.raises(FolderSpoilt):
        storage.write_bytes("jobs/mine/model", b"mine")
    assert storage.read_bytes("jobs/other/model") == b"theirs"


def test_folders_without_permissions_are_deleted_and_no_link_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage((tmp_path / "storage").as_uri())
    storage.write_bytes("jobs/a/x/y/file", b"f")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o500)
    (tmp_path / "storage" / "jobs" / "a" / "link").symlink_to(elsewhere)
    for name in ("x/y", "x", "."):
        (tmp_path / "storage" / "jobs" / "a" / name).chmod(0o500)
    rmtree = shutil.rmtree

    def as_no_root(path: Path) -> None:
        for at, _, _ in os.walk(path):
            if not Path(at).stat().st_mode & 0o200:
                raise PermissionError(13, "Permission denied")
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", as_no_root)
    storage.delete_tree("jobs/a")
    assert not (tmp_path / "storage" / "jobs" / "a").exists()
    assert elsewhere.stat().st_mode & 0o777 == 0o500


def test_a_deletion_that_fails_is_told_as_an_error_of_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage((tmp_path / "storage").as_uri())
    storage.write_bytes("jobs/a/file", b"f")

    def fail(_: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(shutil, "rmtree", fail)
    with pytest.raises(StorageUnavailable, match="Read-only"):
        storage.delete_tree("jobs/a")


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage((tmp_path / "storage").as_uri())
    storage.write_bytes("a", b"old")

    def fail(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(KeyboardInterrupt):
            storage.write_bytes("a", b"new")
    assert storage.read_bytes("a") == b"old"
    assert [p.name for p in (tmp_path / "storage").iterdir()] == ["a"]


def test_a_second_process_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(home)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[4],
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(HomeInUse, match=rf"process id {holder.pid}\b"):
            HomeLock.acquire(home)
        holder.kill()
        holder.wait()
    with HomeLock.acquire(home):
        assert (home / "lock").read_text() == f"{os.getpid()}\n"
    HomeLock.acquire(home).release()


def test_the_defaults_lie_under_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("DRAY_")]:
        monkeypatch.delenv(name)
    settings = Settings()
    assert settings.home == tmp_path / ".dray"
    assert settings.database_url == f"sqlite:///{tmp_path}/.dray/dray.db"
    assert settings.storage_url == f"file://{tmp_path}/.dray/storage"
    assert (settings.host, settings.port, settings.ray_address) == ("127.0.0.1", 8420, "local")


def test_settings_come_from_the_environment_and_the_dotenv_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("DRAY_PORT=1234\nDRAY_HOST=::1\nSOMETHING=else\n")
    monkeypatch.setenv("DRAY_PORT", "4321")
    monkeypatch.setenv("DRAY_LOCAL_SLOTS", "")
    settings = Settings()
    assert (settings.port, settings.host, settings.local_slots) == (4321, "::1", None)


def test_a_password_is_not_printed_with_the_settings() -> None:
    settings = Settings(database_url="postgresql://u:hunter2@h/d")
    assert "hunter2" not in repr(settings)
