"""How ranks that save together see whether the others still write."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dray.train.checkpoints import CheckpointRef
from ray_workers.training.checkpoint import (
    checkpoint_files,
    direct_io,
    manager,
    manifests,
    save_group,
)
from ray_workers.training.checkpoint.manager import CheckpointManager
from ray_workers.training.checkpoint.manifests import CheckpointMetadata
from ray_workers.training.checkpoint.save_group import RankReport, SaveAbandonedError, SaveGroup
from ray_workers.training.checkpoint.stored_tensors import StoredFile, stored_tensors
from ray_workers.training.core.faultpoints import disarm
from ray_workers.training.parallel.pieces import Piece

ABOUT = CheckpointMetadata(3, {}, {"epoch": 0})
WHOLE = torch.Size((2,))


@pytest.fixture(autouse=True)
def _spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DRAY_SPOOL_DIR", str(tmp_path / "attempt-1" / "spool" / "r0.0.metrics"))
    yield
    disarm()


def groups(num: int, **more: Any) -> list[SaveGroup]:
    store = dist.HashStore()
    return [SaveGroup(lambda: store, rank, num, lambda: False, **more) for rank in range(num)]


def half(rank: int) -> dict[str, Any]:
    return {"w": Piece(torch.full((1,), float(rank)), (rank,), WHOLE)}


def managers(folder: Path, *, generation: int = 0) -> list[CheckpointManager]:
    made = []
    for group in groups(2, generation=generation):
        one = CheckpointManager((folder / "checkpoints").as_uri(), keep=9, best=None)
        one.group = group
        made.append(one)
    return made


def test_the_store_does_not_grow_with_the_number_of_saves() -> None:
    ranks = groups(2)
    sizes = []
    for number in range(20):
        saves = [group.next_save() for group in ranks]
        for save in saves:
            save.wrote()
            save.send(RankReport(tree=number))
        assert [report.tree for report in saves[0].reports()] == [number, number]
        saves[0].conclude()
        saves[1].await_conclusion()
        sizes.append(ranks[0].store.num_keys())
    assert sizes[1:] == sizes[1:2] * 19


def test_a_rank_of_a_broken_group_that_still_writes_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = (group.next_save() for group in groups(2))
    clock = [0.0]
    monkeypatch.setattr(save_group.time, "monotonic", lambda: clock[0])
    chunks = iter(range(5))

    def pass_time(_: float) -> None:
        clock[0] += 0.9 * save_group.GRACE_S
        if next(chunks, None) is not None:
            second.wrote()
        elif clock[0] > 6 * save_group.GRACE_S:
            second.send(RankReport(tree=2))

    monkeypatch.setattr(save_group.time, "sleep", pass_time)
    first.send(RankReport(tree=1))
    first._group.disband()
    assert [report.tree for report in first.reports()] == [1, 2]


def test_a_rank_of_a_broken_group_that_writes_no_more_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(save_group, "GRACE_S", 0.05)
    first, second = (group.next_save() for group in groups(2))
    first.send(RankReport())
    second.wrote()
    first._group.disband()
    with pytest.raises(SaveAbandonedError, match="1 of 2"):
        first.reports()


def test_a_rank_that_waits_for_a_save_counts_as_alive_only_while_any_rank_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "LOOK_S", 0.001)
    first, second = managers(tmp_path)
    signs: list[int] = []
    seen = threading.Event()
    first._progressed = lambda: (signs.append(1), seen.set())  # type: ignore[assignment,func-returns-value]
    first.save(ABOUT, half(0))
    first.hold()
    save = second.group.next_save()  # type: ignore[union-attr]
    waiting = threading.Thread(target=first.wait)
    waiting.start()
    for _ in range(3):
        assert seen.wait(30.0)
        seen.clear()
        save.wrote()
    assert seen.wait(30.0)
    known = first._num_chunks
    for _ in range(5):  # nobody writes
        waiting.join(0.01)
    assert first._num_chunks == known
    assert waiting.is_alive()
    save.send(RankReport(problem="rank 1: no"))
    waiting.join(30.0)
    assert not waiting.is_alive()
    assert len(signs) <= known + 1


def test_a_rank_that_was_rank_0_takes_part_in_a_save_of_a_step_that_it_has_saved(
    tmp_path: Path,
) -> None:
    first, second = managers(tmp_path)
    second._saved = [
        manifests.CommittedCheckpoint(manifests.url_of(second._base_url, 3), 3, "", 0, {})
    ]
    for rank, one in enumerate((first, second)):
        one.save(ABOUT, half(rank))
    for one in (first, second):
        one.wait()
    assert [one.step for one in checkpoint_files.committed(first._base_url)] == [3]


def test_a_rank_0_that_was_cut_off_spares_the_checkpoint_of_the_next_group(
    tmp_path: Path,
) -> None:
    cut_off = managers(tmp_path)[0]
    cut_off.save(ABOUT, half(5))
    while not list((tmp_path / "checkpoints").glob("*/state-g0-*.safetensors")):
        assert cut_off.is_saving
    following = managers(tmp_path, generation=1)
    for rank, one in enumerate(following):
        one.save(ABOUT, half(rank))
    for one in following:
        one.wait()
    cut_off.group.store.set("report-1", "damaged")  # type: ignore[union-attr]
    cut_off.group.store.set("reported-1", "1")  # type: ignore[union-attr]
    cut_off.wait()
    (saved,) = checkpoint_files.committed(cut_off._base_url)
    ref = CheckpointRef(saved.url, saved.step, saved.manifest_sha256)
    assert checkpoint_files.load(ref).state["w"].clone().tolist() == [0.0, 1.0]


def test_a_file_that_is_replaced_while_it_is_hashed_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, one in enumerate(both := managers(tmp_path)):
        one.save(ABOUT, half(rank))
    for one in both:
        one.wait()
    (saved,) = checkpoint_files.committed(both[0]._base_url)
    measure = direct_io.measure

    def replace_after(url: str) -> tuple[int, str]:
        found = measure(url)
        path = direct_io.local_path(url)
        assert path is not None
        if path.suffix == ".safetensors":
            other = path.with_suffix(".other")
            other.write_bytes(bytes(path.stat().st_size))
            other.replace(path)
        return found

    monkeypatch.setattr(direct_io, "measure", replace_after)
    ref = CheckpointRef(saved.url, saved.step, saved.manifest_sha256)
    assert checkpoint_files.load(ref).state["w"].clone().tolist() == [0.0, 1.0]


def test_chunks_are_counted_and_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(direct_io, "DIRECT", 0)
    synced: list[int] = []
    monkeypatch.setattr(direct_io.os, "fsync", synced.append)
    data = memoryview(bytes(3 * 4096))
    heard: list[int] = []
    direct_io.write_buffer(
        (tmp_path / "file").as_uri(), data, 2 * 4096 + 1, lambda: heard.append(len(synced))
    )
    assert heard == [1, 2, 2]
    assert len(synced) == 3


@pytest.mark.parametrize("seed", range(3))
def test_pieces_are_accepted_exactly_if_they_have_each_element_once(seed: int) -> None:
    draw = random.Random(seed)
    verdicts = set()
    for _ in range(300):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(0, 3))]
        pieces = divided([0] * len(shape), shape, draw)
        if draw.random() < 0.6 and shape:
            changed = draw.choice(pieces)
            changed[draw.randint(0, 1)][draw.randrange(len(shape))] += draw.choice((-1, 1))
        if draw.random() < 0.2:
            pieces.append(draw.choice(pieces))
        index = {
            "w": {
                "dtype": "U8",
                "shape": shape,
                "pieces": [["f", 0, at, size] for at, size in pieces],
            }
        }
        try:
            stored_tensors(index, {"f": StoredFile(torch.empty, 999)})
            is_accepted = True
        except ValueError:
            is_accepted = False
        assert is_accepted == is_each_once(pieces, shape), (pieces, shape)
        verdicts.add(is_accepted)
    assert verdicts == {True, False}


def divided(at: list[int], size: list[int], draw: random.Random) -> list[tuple[list[int], ...]]:
    """Cut a box at random into boxes (index of the first element, shape)."""
    dims = [dim for dim, each in enumerate(size) if each > 1]
    if not dims or draw.random() < 0.3:
        return [(list(at), list(size))]
    dim = draw.choice(dims)
    cut = draw.randint(1, size[dim] - 1)
    after, first, second = list(at), list(size), list(size)
    after[dim] += cut
    first[dim], second[dim] = cut, size[dim] - cut
    return divided(at, first, draw) + divided(after, second, draw)


def is_each_once(pieces: list[tuple[list[int], ...]], shape: list[int]) -> bool:
    """Count every element of every piece."""
    counts = torch.zeros([each + 8 for each in shape])  # a piece can extend beyond the tensor
    expected = counts.clone()
    expected[tuple(slice(4, 4 + each) for each in shape)] = 1
    for at, size in pieces:
        if min([0, *at, *size]) < 0:
            return False
        counts[tuple(slice(4 + a, 4 + a + n) for a, n in zip(at, size, strict=True))] += 1
    return bool((counts == expected).all())
