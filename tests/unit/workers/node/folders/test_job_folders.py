"""The files that a script leaves in its folders are kept, once, whatever their kind."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dray.train import files, storage_faults
from ray_workers.node.folders import folder_keeper, job_folders
from ray_workers.node.folders.folder_keeper import FolderKeeper
from ray_workers.node.folders.folder_mirror import FolderMirror
from ray_workers.node.folders.job_folders import (
    FilesKept,
    FolderPlan,
    OutputFiles,
    keep_output,
    sizes_in,
)
from ray_workers.shared import paths, spool_reader
from ray_workers.shared.contracts import FrameKind
from ray_workers.shared.folders.work_dir import checkpoint_dir, output_dir
from service.storage.storage import Storage, check_file_name


class Node:
    """The folders of one attempt on one node, and its storage."""

    def __init__(
        self, home: Path, *, rank: int = 0, node_rank: int = 0, limit_bytes: int = 1 << 40
    ) -> None:
        self.folder, self.spools = home / f"folders{rank}", home / f"spools{rank}"
        self.storage = Storage((home / "storage").as_uri())
        base = f"{self.storage.url}/jobs/j/attempts/1/output"
        self.plan = FolderPlan(
            *(rank, node_rank, base, f"{self.storage.url}/jobs/j/f", 1 << 20, limit_bytes), code=""
        )
        job_folders.begin(self.folder, self.plan)
        self.output = output_dir(self.folder)
        self.waits: list[str] = []

    def write(self, name: str, text: str = "x") -> Path:
        path = self.output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def keep(self, *taken: str, num_bytes: int = 0) -> FilesKept:
        return keep_output(self.folder, self.spools, taken, num_bytes, on_wait=self.waits.append)

    def reported(self) -> dict[str, dict[str, Any]]:
        keys = sorted(path.name for path in self.spools.iterdir())
        data = spool_reader.read_all(self.spools, keys, {}, 64 << 20).data
        found = [f for key, chunk in data.items() for f in spool_reader.decode(key, chunk)]
        assert {f.kind for f in found} <= {FrameKind.ARTIFACT}
        assert {f.rank for f in found} <= {self.plan.rank}
        return {f.body["path"]: dict(f.body) for f in found}

    def text_of(self, report: dict[str, Any]) -> str:
        return self.storage.read_bytes(self.storage.key_of(report["url"])).decode()


def test_every_file_is_an_artifact_by_its_relative_path(tmp_path: Path) -> None:
    node = Node(tmp_path)
    texts = {"model.pt": "abc", "logs/run 1/a#b?c%41.txt": "odd", "é/ü.txt": "u", "empty": ""}
    for name, text in texts.items():
        node.write(name, text)
    assert node.keep() == FilesKept(4, None, "", "")
    found = node.reported()
    assert {name: node.text_of(report) for name, report in found.items()} == texts
    assert found["model.pt"]["size_bytes"] == 3
    assert found["model.pt"]["url"].endswith("/output/0/model.pt")
    node.write("late")
    assert node.keep().num_kept == 4, "it is done once"
    assert len(list(node.spools.iterdir())) == 1


def test_hostile_files_are_left_out_and_named(tmp_path: Path) -> None:
    node = Node(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("s")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key").write_text("k")
    node.write("good/real")
    (node.output / "inside").symlink_to("good/real")
    (node.output / "out").symlink_to(secret)
    (node.output / "folder").symlink_to(tmp_path / "secrets")
    (node.output / "loop").symlink_to("loop")
    os.mkfifo(node.output / "pipe")
    node.write("a\nb")
    node.write("a\\b")
    (node.output / os.fsdecode(b"\xff")).write_text("x")
    kept = node.keep()
    assert (kept.num_kept, kept.problem) == (2, None)
    assert set(node.reported()) == {"good/real", "inside"}
    assert kept.left_out.startswith("6 files of DRAY_OUTPUT_DIR can't be kept: ")
    assert kept.left_out.isprintable()
    assert kept.left_out.isascii()
    for name in sizes_in(node.folder):
        assert check_file_name(name) == name


@pytest.mark.parametrize("num_bytes", [0, 999_000])
def test_files_that_are_too_large_together_are_left_out_and_named(
    tmp_path: Path, num_bytes: int
) -> None:
    """A sparse file takes no space on the node, but its whole length in the storage."""
    node = Node(tmp_path, limit_bytes=1_000_000)
    with node.write("hole.bin", "x").open("r+b") as file:
        file.truncate(1 << 40)
    assert (node.output / "hole.bin").stat().st_blocks * 512 < 1 << 20
    node.write("model.pt", "m" * 900)
    node.write("log", "l" * 90)
    (node.output / "again").symlink_to("model.pt")  # the storage gets it twice
    assert sizes_in(node.folder) == {"model.pt": 900, "again": 900, "log": 90}
    kept = node.keep(num_bytes=num_bytes)
    assert kept.problem is None
    assert "'hole.bin' (1,099,511,627,776 bytes, but only" in kept.left_out
    found = set(node.reported())
    if num_bytes:  # 1,000 of 1,890 bytes fit
        assert found in ({"model.pt", "log"}, {"again", "log"})
        assert kept.left_out.startswith("2 files of DRAY_OUTPUT_DIR can't be kept: ")
    else:
        assert found == {"model.pt", "again", "log"}
    assert not any("hole" in path.name for path in (tmp_path / "storage").rglob("*"))


def test_of_too_many_files_those_of_upper_folders_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_folders, "MAX_FILES", 3)
    node = Node(tmp_path)
    for name in ("frames/0", "frames/1", "frames/2", "log.txt", "model.pt"):
        node.write(name)
    kept = node.keep()
    assert (kept.num_kept, set(node.reported())) == (3, {"log.txt", "model.pt", "frames/0"})
    assert "2 files" in kept.left_out
    assert "more than 3 files" in kept.left_out


def test_files_of_the_same_name_on_two_nodes_are_both_kept(tmp_path: Path) -> None:
    first, second = Node(tmp_path), Node(tmp_path, rank=2, node_rank=1)
    first.write("log.txt", "of 0")
    second.write("log.txt", "of 2")
    second.write("more")
    first.keep()
    second.keep("log.txt")
    assert set(second.reported()) == {"node-1/log.txt", "more"}
    assert first.text_of(first.reported()["log.txt"]) == "of 0"
    assert second.text_of(second.reported()["node-1/log.txt"]) == "of 2"


@pytest.mark.parametrize(("wait_s", "num_kept"), [(600.0, 1), (-1.0, 0)])
def test_a_full_storage_is_waited_for_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_s: float, num_kept: int
) -> None:
    monkeypatch.setattr(storage_faults, "WAIT_S", wait_s)
    monkeypatch.setattr(storage_faults, "PAUSE_S", 0.0)
    node, store, tries = Node(tmp_path), files.store, []

    def full_at_first(path: Path, url: str) -> tuple[int, str]:
        tries.append(path)
        if len(tries) == 1:
            raise storage_faults.StorageError("no space left on device")
        return store(path, url)

    monkeypatch.setattr(files, "store", full_at_first)
    node.write("model.pt")
    kept = node.keep()
    assert kept.num_kept == num_kept
    assert (kept.problem is None) == bool(num_kept)
    assert kept.problem is None or "no space left" in kept.problem
    ending = "retrying for at most 600 s: no space left on device"
    assert [sentence.endswith(ending) for sentence in node.waits] == [True] * num_kept


def test_an_agent_that_died_while_it_reported_does_so_again(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.write("model.pt", "abc")
    node.keep()
    (node.folder / "kept.json").unlink()
    assert node.keep().num_kept == 1
    assert len(list(node.spools.iterdir())) == 2
    assert set(node.reported()) == {"model.pt"}


def test_a_folder_that_the_script_removed_has_no_files(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.output.rmdir()
    assert node.keep() == FilesKept(0, None, "", "")
    assert OutputFiles(node.output).files == {}
    assert keep_output(tmp_path / "no attempt", node.spools, ()) == FilesKept(0, None, "", "")


def test_a_link_at_the_path_of_the_output_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "private").write_text("p")
    for number, target in enumerate((str(tmp_path / "elsewhere"), "output", "nowhere")):
        node = Node(tmp_path, rank=number)
        node.output.rmdir()
        node.output.symlink_to(target)
        kept = node.keep()
        assert (kept.num_kept, kept.problem) == (0, None)
        assert "'.' (the folder was replaced by a link)" in kept.left_out
        assert sizes_in(node.folder) == {}


async def test_a_listing_that_takes_long_or_fails_is_answered_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(paths.NODE_TMPDIR, str(tmp_path))
    monkeypatch.setattr(folder_keeper, "ANSWER_S", 0.001)
    may_end, calls = threading.Event(), []

    def listing(folder: Path) -> dict[str, int]:
        calls.append(folder)
        may_end.wait(30)
        raise OSError("the disk is broken")

    monkeypatch.setattr(job_folders, "sizes_in", listing)
    keeper, key = FolderKeeper("d", "n"), ("j", 1)
    assert await keeper.sizes(key) is None
    assert await keeper.sizes(key) is None
    may_end.set()
    while (sizes := await keeper.sizes(key)) is None:
        pass
    assert (sizes, len(calls)) == ({}, 1)


async def test_a_node_makes_keeps_and_drops_the_folders_of_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(paths.NODE_TMPDIR, str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    keeper, key = FolderKeeper("d", "n"), ("j", 1)
    plan = Node(tmp_path).plan
    assert await keeper.begin(key, plan) is None
    folder = paths.folders_dir("d", "n", "j", 1)
    (output_dir(folder) / "a").write_text("x")
    while (sizes := await keeper.sizes(key)) is None:
        pass
    assert sizes == {"a": 1}
    assert checkpoint_dir(folder, plan.folder_url) == tmp_path / "storage" / "jobs" / "j" / "f"
    while isinstance(kept := await keeper.keep(key, []), str):
        assert not kept
    assert kept == FilesKept(1, None, "", "")
    await keeper.drop(key)
    assert not folder.exists()
    broken = FolderPlan(0, 0, plan.output_url, "nonesuch://x", 1, 1, "")
    assert "nonesuch" in str(await keeper.begin(key, broken))


@pytest.fixture
def url() -> str:
    return f"memory://folder-{os.urandom(8).hex()}/f"


def mirror(folder: Path, url: str) -> FolderMirror:
    folder.mkdir(exist_ok=True)
    return FolderMirror(folder, url)


def test_a_mirror_copies_what_has_stopped_changing_and_another_node_finds_it(
    tmp_path: Path, url: str
) -> None:
    first = mirror(tmp_path / "a", url)
    assert first.restore() == 0
    (tmp_path / "a" / "step-1").mkdir()
    (tmp_path / "a" / "step-1" / "w.pt").write_text("one")
    (tmp_path / "a" / "out").symlink_to("/etc/passwd")
    first.copy(everything=False)
    assert mirror(tmp_path / "b", url).restore() == 0, "it may still be written to"
    first.copy(everything=False)
    other = mirror(tmp_path / "c", url)
    assert other.restore() == 1
    assert (tmp_path / "c" / "step-1" / "w.pt").read_text() == "one"
    (tmp_path / "a" / "step-2.pt").write_text("two")
    first.copy(everything=True)
    (tmp_path / "a" / "step-1" / "w.pt").unlink()
    first.copy(everything=True)
    other.copy(everything=True)  # its own old copy is no change
    assert mirror(tmp_path / "d", url).restore() == 1
    assert (tmp_path / "d" / "step-2.pt").read_text() == "two"


def test_a_mirror_copies_again_what_changed_meanwhile(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, store = tmp_path / "a" / "w.pt", files.store

    def torn(source: Path, to: str) -> tuple[int, str]:
        stored = store(source, to)
        monkeypatch.setattr(files, "store", store)
        path.write_text("longer")
        return stored

    mine = mirror(tmp_path / "a", url)
    path.write_text("w")
    monkeypatch.setattr(files, "store", torn)
    mine.copy(everything=True)
    mine.copy(everything=True)
    mirror(tmp_path / "b", url).restore()
    assert (tmp_path / "b" / "w.pt").read_text() == "longer"


def test_a_mirror_deletes_nothing_because_its_folder_is_gone_or_another(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, folder = mirror(tmp_path / "a", url), tmp_path / "a"
    (folder / "w.pt").write_text("w")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "private").write_text("p")
    mine.copy(everything=True)

    def unreadable(_: Path, *, onerror: Callable[[OSError], None]) -> Iterator[Any]:
        onerror(PermissionError("may not be read"))
        yield from ()

    with monkeypatch.context() as patch:
        patch.setattr(os, "walk", unreadable)
        with pytest.raises(PermissionError):
            mine.copy(everything=True)
    shutil.rmtree(folder)
    mine.copy(everything=True)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotADirectoryError):
        mine.copy(everything=True)
    folder.unlink()
    folder.mkdir()
    mine.end()
    mine.copy(everything=True)  # an attempt that is dropped
    assert mirror(tmp_path / "b", url).restore() == 1
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["w.pt"]


async def test_a_copy_that_is_under_way_at_the_end_is_not_overtaken(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, store = mirror(tmp_path / "a", url), files.store
    path, is_storing, may_store = tmp_path / "a" / "w.pt", threading.Event(), threading.Event()
    path.write_text("old")

    def slow(source: Path, to: str) -> tuple[int, str]:
        text = source.read_text()
        is_storing.set()
        may_store.wait(30)
        (tmp_path / "copy").write_text(text)
        return store(tmp_path / "copy", to)

    monkeypatch.setattr(files, "store", slow)
    first = asyncio.ensure_future(asyncio.to_thread(mine.copy, everything=True))
    await asyncio.to_thread(is_storing.wait, 30)
    path.write_text("newer")
    monkeypatch.setattr(files, "store", store)
    second = asyncio.ensure_future(asyncio.to_thread(mine.copy, everything=True))
    await asyncio.wait({second}, timeout=0.05)
    may_store.set()
    await asyncio.gather(first, second)
    mirror(tmp_path / "b", url).restore()
    assert (tmp_path / "b" / "w.pt").read_text() == "newer"


def test_the_end_of_a_mirror_does_not_wait_for_a_storage_that_stands_still(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, store = mirror(tmp_path / "a", url), files.store
    is_storing, may_store = threading.Event(), threading.Event()
    (tmp_path / "a" / "1.pt").write_text("1")
    mine.copy(everything=True)

    def stand_still(source: Path, to: str) -> tuple[int, str]:
        is_storing.set()
        may_store.wait(60)
        return store(source, to)

    monkeypatch.setattr(files, "store", stand_still)
    (tmp_path / "a" / "1.pt").unlink()
    (tmp_path / "a" / "2.pt").write_text("2")
    (tmp_path / "a" / "3.pt").write_text("3")
    with ThreadPoolExecutor(2) as threads:
        copying = threads.submit(mine.copy, everything=True)
        try:
            assert is_storing.wait(60)
            threads.submit(mine.end).result(30)
        finally:
            may_store.set()
        copying.result()
    assert mirror(tmp_path / "b", url).restore() == 2, "neither the third file nor the deletion"


async def test_an_attempt_that_is_dropped_while_its_folder_is_fetched_leaves_nothing(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(paths.NODE_TMPDIR, str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    source = mirror(tmp_path / "a", url)
    (tmp_path / "a" / "w.pt").write_text("w")
    source.copy(everything=True)
    keeper, key, fetch = FolderKeeper("d", "n"), ("j", 1), files.fetch
    is_fetching, may_fetch = threading.Event(), threading.Event()

    def slow(place: str, target: Path) -> tuple[int, str]:
        is_fetching.set()
        may_fetch.wait(30)
        return fetch(place, target)

    monkeypatch.setattr(files, "fetch", slow)
    plan = FolderPlan(0, 0, f"{url}/output", url, 1 << 20, 1 << 40, "")
    beginning = asyncio.ensure_future(keeper.begin(key, plan))
    await asyncio.to_thread(is_fetching.wait, 30)
    await keeper.drop(key)
    may_fetch.set()
    assert await beginning == "the attempt is over"
    assert not paths.folders_dir("d", "n", "j", 1).exists()
    assert mirror(tmp_path / "b", url).restore() == 1
