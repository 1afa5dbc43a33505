"""A node's copies of uploaded code are checked, made once, and restored at each start."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ray_workers.node.folders import code_cache
from ray_workers.node.folders.code_cache import BadCode, CodeCache
from ray_workers.shared.node_needs import CodeRef

FILES = {
    "train.py": b"print(1)\n",
    "pkg/net.py": b"x = 1\n",
    "empty": b"",
    "run.sh": b"#!/bin/sh\n",
}


class Storage:
    """Code as the service stores it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = folder.as_uri()

    def keep(self, files: dict[str, bytes], name: str = "a") -> CodeRef:
        described, pack = [], b""
        for path, data in files.items():
            part = {
                "sha256": hashlib.sha256(data).hexdigest(),
                "pack": f"code/{name}.pack",
                "start": len(pack),
                "size_bytes": len(data),
            }
            described.append(
                {
                    "path": path,
                    "size_bytes": len(data),
                    "is_executable": path.endswith(".sh"),
                    "parts": [part] if data else [],
                }
            )
            pack += data
        (self.folder / "code").mkdir(parents=True, exist_ok=True)
        (self.folder / "code" / f"{name}.pack").write_bytes(pack)
        text = json.dumps({"version": 1, "files": described}).encode()
        (self.folder / "code" / f"{name}.json").write_bytes(text)
        return CodeRef(
            f"code-{name}", f"{self.url}/code/{name}.json", hashlib.sha256(text).hexdigest()
        )


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path / "storage")


@pytest.fixture
def cache(tmp_path: Path) -> CodeCache:
    return CodeCache(tmp_path / "cache")


def copies(folder: Path) -> dict[str, Path]:
    """The copies in a cache, by their hash."""
    return {
        path.name.partition("-")[0]: path
        for path in folder.iterdir()
        if not path.name.startswith(".")
    }


def below(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_every_start_finds_the_same_bytes(
    storage: Storage, cache: CodeCache, tmp_path: Path
) -> None:
    work, outside = tmp_path / "work", tmp_path / "outside"
    outside.mkdir()
    (outside / "kept.txt").write_text("mine")
    code = storage.keep(FILES)
    cache.put_into(code, storage.url, work)
    assert below(work) == FILES
    assert os.access(work / "run.sh", os.X_OK)
    assert not os.access(work / "train.py", os.X_OK)
    # An attempt changes, removes and replaces files, replaces others by links, and leaves new ones.
    (work / "train.py").write_text("print(2)\n")
    (work / "empty").unlink()
    (work / "empty").mkdir()
    (work / "empty" / "x").write_text("x")
    (work / "pkg" / "net.py").unlink()
    (work / "pkg").rmdir()
    (work / "pkg").symlink_to(outside)
    (work / "run.sh").unlink()
    (work / "run.sh").symlink_to(outside / "kept.txt")
    (work / "snapshot.pt").write_bytes(b"state")
    cache.put_into(code, storage.url, work)
    assert below(work) == {**FILES, "snapshot.pt": b"state"}
    assert below(outside) == {"kept.txt": b"mine"}


def test_the_storage_is_read_once(storage: Storage, cache: CodeCache, tmp_path: Path) -> None:
    code = storage.keep(FILES)
    cache.put_into(code, storage.url, tmp_path / "one")
    (storage.folder / "code" / "a.pack").unlink()
    cache.put_into(code, storage.url, tmp_path / "two")
    (tmp_path / "one" / "train.py").write_text("another job's")
    cache.put_into(code, storage.url, tmp_path / "two")
    assert below(tmp_path / "two") == FILES


def test_what_is_damaged_in_the_storage_is_refused_whole(
    storage: Storage, cache: CodeCache, tmp_path: Path
) -> None:
    code = storage.keep(FILES)
    pack = storage.folder / "code" / "a.pack"
    pack.write_bytes(pack.read_bytes()[:-1] + b"?")
    with pytest.raises(BadCode, match=r"run\.sh is damaged"):
        cache.put_into(code, storage.url, tmp_path / "work")
    other = storage.keep({"train.py": b"other"}, "b")
    with pytest.raises(BadCode, match="differs from the upload"):
        cache.put_into(
            CodeRef(code.id, other.manifest_url, code.manifest_sha256), storage.url, tmp_path / "w"
        )
    assert {path.name[:6] for path in (tmp_path / "cache").iterdir()} == {".lock-"}
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("path", ["../out", "/etc/out", "a/../../out"])
def test_a_path_that_leads_out_is_refused_on_the_node_too(
    storage: Storage, cache: CodeCache, tmp_path: Path, path: str
) -> None:
    with pytest.raises(BadCode, match="not allowed"):
        cache.put_into(storage.keep({path: b"x"}), storage.url, tmp_path / "work")


def test_several_attempts_at_once_share_one_copy(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = storage.keep({f"f{n}": bytes([n]) * 1000 for n in range(50)})
    fetched: list[str] = []
    fetch = CodeCache._fetch

    def counted(self: CodeCache, *arguments: object) -> None:
        fetched.append("once")
        fetch(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(CodeCache, "_fetch", counted)
    threads = [
        threading.Thread(
            target=CodeCache(tmp_path / "cache").put_into,
            args=(code, storage.url, tmp_path / f"work-{n}"),
        )
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched == ["once"]
    assert all(len(below(tmp_path / f"work-{n}")) == 50 for n in range(6))


def test_code_that_is_on_the_node_does_not_wait_for_a_storage_that_stands_still(
    storage: Storage, cache: CodeCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of some code share a lock."""
    here = storage.keep(FILES)
    cache.put_into(here, storage.url, tmp_path / "one")
    monkeypatch.setattr(CodeCache, "_lock_of", lambda self, _, kind="": self._root / f".{kind}l")
    fetches, may_end = threading.Event(), threading.Event()

    def stand_still(_: str) -> bytes:
        fetches.set()
        may_end.wait(60)
        raise OSError("the storage does not answer")

    monkeypatch.setattr(code_cache.files, "read", stand_still)
    other = storage.keep({"f": b"x"}, "b")
    with ThreadPoolExecutor(2) as threads:
        stuck = threads.submit(cache.put_into, other, storage.url, tmp_path / "two")
        try:
            assert fetches.wait(60)
            threads.submit(cache.put_into, here, storage.url, tmp_path / "three").result(30)
        finally:
            may_end.set()
        with pytest.raises(OSError, match="does not answer"):
            stuck.result()
    assert below(tmp_path / "three") == FILES


def test_the_least_recently_used_copies_are_evicted(storage: Storage, tmp_path: Path) -> None:
    cache = CodeCache(tmp_path / "cache", limit_bytes=10_000)  # a file takes a block of the disk
    codes = [storage.keep({"f": bytes([n]) * 1000}, f"c{n}") for n in range(4)]
    for number, code in enumerate(codes[:3]):
        cache.put_into(code, storage.url, tmp_path / "work")
        os.utime(copies(tmp_path / "cache")[code.manifest_sha256], (number, number))
    cache.put_into(codes[0], storage.url, tmp_path / "work")  # used again
    cache.put_into(codes[3], storage.url, tmp_path / "work")
    left = copies(tmp_path / "cache")
    assert codes[3].manifest_sha256 in left
    assert codes[0].manifest_sha256 in left
    assert codes[1].manifest_sha256 not in left


def test_a_copy_that_another_process_removes_is_no_error(
    storage: Storage, cache: CodeCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put_into(storage.keep(FILES), storage.url, tmp_path / "work")
    listed = code_cache.entries

    def then_removed(folder: Path) -> list[Path]:
        (folder / ".new-other").mkdir()
        found = listed(folder)
        (folder / ".new-other").rmdir()
        for path in copies(folder).values():
            shutil.rmtree(path)
        return found

    monkeypatch.setattr(code_cache, "entries", then_removed)
    cache.put_into(storage.keep({"f": b"x"}, "b"), storage.url, tmp_path / "other")
    assert below(tmp_path / "other") == {"f": b"x"}


def test_a_copy_is_removed_whole_or_not(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, work = storage.keep(FILES), tmp_path / "work"
    cache = CodeCache(tmp_path / "cache", limit_bytes=1)
    cache.put_into(code, storage.url, work)

    def die_in_the_middle(folder: Path, **_: object) -> None:
        next(path for path in folder.rglob("*") if path.name == "train.py").unlink()

    with monkeypatch.context() as patch:
        patch.setattr(code_cache, "remove_tree", die_in_the_middle)
        cache._evict()
    shutil.rmtree(work)
    cache.put_into(code, storage.url, work)
    assert below(work) == FILES


def test_a_copy_of_an_earlier_boot_is_made_anew(
    storage: Storage, cache: CodeCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, work = storage.keep(FILES), tmp_path / "work"
    cache.put_into(code, storage.url, work)
    (first,) = copies(tmp_path / "cache").values()
    for path in first.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")  # as a power cut may leave it
    monkeypatch.setattr(code_cache, "boot_id", lambda: "the-next")
    cache.put_into(code, storage.url, work)
    assert below(work) == FILES
    cache.put_into(storage.keep({"f": b"x"}, "b"), storage.url, tmp_path / "other")
    assert not first.exists()


def test_names_of_any_length_and_folders_that_were_closed_are_put_back(
    storage: Storage, cache: CodeCache, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    found = {f"{85 * 'é'}é{41 * 'é'}": b"1", f"pkg/{'字' * 85}": b"2", "pkg/" + "x" * 255: b"3"}
    code = storage.keep(found)
    cache.put_into(code, storage.url, work)
    (work / "pkg").chmod(0o500)
    cache.put_into(code, storage.url, work)
    assert below(work) == found
    assert (work / "pkg").stat().st_mode & 0o700 == 0o700


def test_what_another_user_could_have_put_there_is_not_used(
    storage: Storage, tmp_path: Path
) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(PermissionError, match="written to by other users"):
        CodeCache(root).put_into(storage.keep(FILES), storage.url, tmp_path / "work")


def test_a_fetch_that_was_cut_off_leaves_nothing_that_counts(
    storage: Storage, cache: CodeCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = storage.keep(FILES)

    def die(*_: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(code_cache, "_write", die)
        with pytest.raises(OSError, match="No space"):
            cache.put_into(code, storage.url, tmp_path / "work")
    cache.put_into(code, storage.url, tmp_path / "work")
    assert below(tmp_path / "work") == FILES
