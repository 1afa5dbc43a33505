"""Pieces of tensors: who writes them, how they are read again, and what is found to be damaged."""

from __future__ import annotations

import itertools
import json
import math
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dray.train.checkpoints import CheckpointRef
from ray_workers.training.checkpoint import checkpoint_files, resuming, save_group
from ray_workers.training.checkpoint.manager import CheckpointManager
from ray_workers.training.checkpoint.manifests import CheckpointMetadata
from ray_workers.training.checkpoint.save_group import SaveGroup
from ray_workers.training.checkpoint.staging import Stager
from ray_workers.training.core.errors import BrokenCheckpointError
from ray_workers.training.core.faultpoints import FaultPoint, arm
from ray_workers.training.parallel import pieces
from ray_workers.training.parallel.pieces import Piece, Spread
from tests.unit.training.checkpoint.test_checkpoint_files import (
    cut_short,
    empty,
    flip_a_bit,
    folder_of,
    lose,
    make_longer,
    with_manifest,
)

State = dict[str, Any]
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def commit(base_url: str, step: int, states: Sequence[State]) -> CheckpointRef:
    """Save the states of several ranks, one after the other."""
    store = dist.HashStore()
    world_size = len(states)
    saves = [
        SaveGroup(lambda: store, rank, world_size, lambda: False).next_save()
        for rank in range(world_size)
    ]
    for save, state in zip(saves, states, strict=True):
        share = checkpoint_files.write_share(base_url, step, Stager().take(state), save)
        save.send(share)
    about = CheckpointMetadata(step, {}, {"epoch": 0})
    saved = checkpoint_files.commit_shares(base_url, about, saves[0])
    return CheckpointRef(saved.url, step, saved.manifest_sha256)


def halves(value: float) -> list[State]:
    """Return the states of two ranks, each of which has half of `w`, and its own tensor."""
    whole = torch.full((6, 4), value) + torch.arange(24.0).view(6, 4)
    return [
        {
            "model": {"w": Piece(part, (first, 0), whole.shape), name: torch.full((3,), value)},
            "value": value,
        }
        for part, first, name in ((whole[:4], 0, "a"), (whole[4:], 4, "b"))
    ]


def rows_of_w(part: Tensor) -> State:
    """Return a state with the last rows of `w`."""
    return {"model": {"w": Piece(part, (4, 0), torch.Size((6, part.shape[1])))}}


def cut_up(draw: random.Random, whole: Tensor, depth: int) -> list[tuple[list[int], Tensor]]:
    """Cut a tensor along random dimensions; return (offsets, part) of each part."""
    dims = [dim for dim, size in enumerate(whole.shape) if size > 1]
    if depth == 0 or not dims:
        return [([0] * whole.ndim, whole)]
    dim = draw.choice(dims)
    at = draw.randint(1, whole.shape[dim] - 1)
    found = cut_up(draw, whole.narrow(dim, 0, at), depth - 1)
    for offsets, part in cut_up(draw, whole.narrow(dim, at, whole.shape[dim] - at), depth - 1):
        offsets[dim] += at
        found.append((offsets, part))
    return found


@pytest.mark.parametrize("url", ["file://{folder}", "memory://pieces{folder}"])
def test_any_box_of_a_tensor_is_read_from_any_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setattr("ray_workers.training.checkpoint.stored_tensors.READ_BYTES", 64)
    for seed in range(40):
        draw = random.Random(seed)
        states: list[State] = [{} for _ in range(draw.randint(1, 4))]
        wholes = {}
        for name in "uvw":
            shape = [draw.choice((0, 1, 2, 3, 7, 11)) for _ in range(draw.randint(0, 4))]
            whole = torch.randn(shape).mul(9).to(draw.choice(DTYPES))
            wholes[name] = whole
            for number, (offsets, part) in enumerate(cut_up(draw, whole, 2)):
                if number < len(states):
                    states[number][name] = Piece(part, tuple(offsets), whole.shape)
                else:  # one file has at most one piece of a tensor
                    states.append({name: Piece(part, tuple(offsets), whole.shape)})
        ref = commit(url.format(folder=tmp_path / str(seed)), 1, states)
        loaded = checkpoint_files.load(ref).state
        for name, whole in wholes.items():
            assert torch.equal(loaded[name], whole)
            for _ in range(8):
                found, expected = loaded[name], whole
                for dim, size in enumerate(whole.shape):
                    start = draw.randint(0, size)
                    length = draw.randint(0, size - start)
                    found = found.narrow(dim, start, length)
                    expected = expected.narrow(dim, start, length)
                assert torch.equal(found.clone(), expected)
                into = torch.zeros(expected.shape, dtype=torch.float64)
                assert torch.equal(into.copy_(found), expected.double())


def test_a_stored_tensor_is_read_and_never_changed(tmp_path: Path) -> None:
    loaded = checkpoint_files.load(commit(tmp_path.as_uri(), 1, halves(1.0))).state
    stored = loaded["model"]["w"]
    assert stored.sum() == 24 + 276
    assert (stored + 1)[5, 3] == stored[5, 3] + 1
    with pytest.raises(RuntimeError, match="is in a file"):
        stored += 1
    layer = torch.nn.Linear(4, 6, bias=False)
    layer.load_state_dict({"weight": stored})
    assert torch.equal(layer.weight, stored)


def test_every_element_is_written_once_and_by_all_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SPLIT_FROM_BYTES", 256)
    for seed in range(40):
        draw = random.Random(seed)
        sizes = {axis: draw.choice((1, 2, 3)) for axis in ("data", "held", "tensor")}
        divided = tuple(axis for axis in sizes if draw.random() < 0.3)
        shapes = [
            [draw.choice((1, 2, 5, 33)) for _ in range(draw.randint(0, 3))]
            for _ in range(draw.randint(1, 30))
        ]
        ranks = list(itertools.product(*map(range, sizes.values())))
        written: dict[Any, list[Tensor]] = {}
        num_bytes: dict[Any, list[int]] = {}
        for rank in ranks:
            at = dict(zip(sizes, rank, strict=True))
            spread = Spread({axis: (sizes[axis], at[axis]) for axis in sizes})
            tensors = {str(number): torch.ones(shape) for number, shape in enumerate(shapes)}
            state = dict(draw.sample(list(tensors.items()), len(tensors)))  # in any order
            made = spread.pieces(state, divided=divided)
            holders = tuple(at[axis] for axis in divided)
            counts = written.setdefault(holders, [torch.zeros(shape) for shape in shapes])
            for number, count in enumerate(counts):
                piece = made[str(number)]
                if piece.tensor is not None:
                    box = zip(piece.offsets, piece.tensor.shape, strict=True)
                    count[tuple(slice(start, start + size) for start, size in box)] += 1
            own = (piece.tensor for piece in made.values() if piece.tensor is not None)
            num_bytes.setdefault(holders, []).append(sum(one.nbytes for one in own))
        assert all((count == 1).all() for counts in written.values() for count in counts)
        for each in num_bytes.values():  # a split tensor has at most 33 x 33 rows of one number
            assert max(each) - min(each) <= 256 + 4 * 33 * 33 * len(shapes)


FILES = (
    "state-g0-00001-of-00002.safetensors",
    "state-g0-00002-of-00002.safetensors",
    "state.json",
    "manifest.json",
)


def swap(path: Path) -> None:
    other = path.with_name(FILES[1] if path.name == FILES[0] else FILES[0])
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def take_from_other_step(path: Path) -> None:
    path.write_bytes((path.parents[1] / "step-000000000005" / path.name).read_bytes())


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "damage",
    [flip_a_bit, cut_short, empty, make_longer, lose, swap, take_from_other_step],
)
def test_damage_in_any_rank_s_file_is_found_by_the_ranks_together(
    tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    older, newer = (commit(tmp_path.as_uri(), step, halves(float(step))) for step in (5, 9))
    damage(folder_of(newer) / name)
    assert_taken(newer, older, step=5)


def assert_taken(*refs: CheckpointRef, step: int) -> None:
    """Check which checkpoint two ranks choose, each of which verifies half of the files."""
    barrier = threading.Barrier(2, timeout=30.0)
    verdicts = [False, False]
    chosen: list[Any] = [None, None]

    def choose(rank: int) -> None:
        def everywhere(is_valid: bool) -> bool:
            barrier.wait()
            verdicts[rank] = is_valid
            barrier.wait()
            return all(verdicts)

        chosen[rank] = resuming.choose(refs, everywhere, number=rank, num_ranks=2)[0]

    ranks = [threading.Thread(target=choose, args=(rank,)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    for loaded in chosen:
        assert loaded.saved.step == step
        assert loaded.state["model"]["w"][5, 3] == step + 23


def test_each_file_is_hashed_by_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = commit(tmp_path.as_uri(), 5, halves(5.0))
    measured: list[str] = []
    measure = checkpoint_files.direct_io.measure
    monkeypatch.setattr(
        checkpoint_files.direct_io,
        "measure",
        lambda url: measured.append(url.rpartition("/")[2]) or measure(url),
    )
    for rank in range(2):
        checkpoint_files.load(ref, number=rank, num_ranks=2)
    assert [name for name in measured if name != "state.json"] == list(FILES[:2])


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors["model/w"]["pieces"].pop(),
        lambda tensors: tensors["model/w"]["pieces"][0][2].__setitem__(0, 3),
        lambda tensors: tensors["model/w"]["pieces"][0].__setitem__(0, "../x"),
        lambda tensors: tensors["model/w"].update(shape=[6]),
        lambda tensors: tensors["model/w"].update(dtype="F33"),
        lambda tensors: tensors.pop("model/a"),
        lambda tensors: tensors["model/w"].update(pieces=None),
        lambda tensors: tensors["model/w"]["pieces"][0].__setitem__(1, -4),
        lambda tensors: tensors["model/w"]["pieces"][0].__setitem__(1, 1 << 40),
        lambda tensors: tensors["model/w"]["pieces"][0].__setitem__(1, 4097),
        lambda tensors: tensors["model/w"]["pieces"][0].__setitem__(1, math.inf),
        lambda tensors: tensors["model/w"].update(shape=[1 << 70, 4]),
        lambda tensors: tensors["model/w"].update(shape=[6, 4] + [1] * 70),
        lambda tensors: tensors["model/w"]["pieces"][1][2].__setitem__(0, 0),  # overlaps
    ],
)
def test_an_index_that_does_not_fit_the_tensors_is_refused(
    tmp_path: Path, change: Callable[[Any], Any]
) -> None:
    ref = commit(tmp_path.as_uri(), 5, halves(5.0))
    path = folder_of(ref) / "state.json"
    document = json.loads(path.read_text())
    change(document["tensors"])
    path.write_text(json.dumps(document))
    manifest = json.loads((folder_of(ref) / "manifest.json").read_text())
    size, sha256 = checkpoint_files.files.measure(path)
    manifest["files"][2] |= {"size_bytes": size, "sha256": sha256}
    with pytest.raises(BrokenCheckpointError, match="does not contain a training state"):
        checkpoint_files.load(with_manifest(ref, json.dumps(manifest)))


@pytest.mark.parametrize(
    "states",
    [
        halves(1.0)[:1],
        [halves(1.0)[0], halves(1.0)[0]],
        [halves(1.0)[0], {"model": {"w": torch.ones(6, 4)}}],
        [
            halves(1.0)[0],
            {"model": {"w": Piece(torch.ones(2, 4).half(), (4, 0), torch.Size((6, 4)))}},
        ],
        [halves(1.0)[0], {"model": {"w": Piece(torch.ones(2, 5), (4, 0), torch.Size((6, 5)))}}],
        [{"w": Piece(None, (0,), torch.Size((3,)))}, {}],
    ],
    ids=["too few", "twice", "too many", "another type", "another shape", "nobody's"],
)
def test_shares_that_do_not_fit_together_are_not_committed(
    tmp_path: Path, states: list[State]
) -> None:
    with pytest.raises(ValueError, match="w"):
        commit(tmp_path.as_uri(), 5, states)
    assert not list(tmp_path.iterdir())


def test_the_state_is_the_union_and_groups_with_the_same_options_are_joined(tmp_path: Path) -> None:
    def stage(names: list[str], **more: Any) -> State:
        groups = [{"lr": 0.1, "params": names}, {"lr": 0.2, **more, "params": [f"{names[0]}.bias"]}]
        states = {name: {"step": torch.ones(())} for name in names}
        return {"optimizer": {"state": states, "param_groups": groups}, "scaler": {"scale": 8.0}}

    ref = commit(tmp_path.as_uri(), 5, [stage(["a", "b"]), stage(["c"], stowed=3)])
    state = checkpoint_files.load(ref).state
    assert list(state["optimizer"]["state"]) == ["a", "b", "c"]
    assert state["scaler"] == {"scale": 8.0}
    assert state["optimizer"]["param_groups"] == [
        {"lr": 0.1, "params": ["a", "b", "c"]},
        {"lr": 0.2, "params": ["a.bias"]},
        {"lr": 0.2, "stowed": 3, "params": ["c.bias"]},
    ]


class Ranks:
    """The checkpoint managers of two ranks in one process."""

    def __init__(self, folder: Path) -> None:
        self.base_url = folder.as_uri()
        self.store = dist.HashStore()
        self.groups = [SaveGroup(lambda: self.store, rank, 2, lambda: False) for rank in range(2)]
        self.managers = [CheckpointManager(self.base_url, keep=9, best=None) for _ in range(2)]
        for manager, group in zip(self.managers, self.groups, strict=True):
            manager.group = group

    def save(self, step: int, states: Sequence[State]) -> None:
        about = CheckpointMetadata(step, {}, {"epoch": 0})
        for manager, state in zip(self.managers, states, strict=False):
            manager.save(about, state)

    def steps(self) -> list[int]:
        for manager in self.managers:
            manager.wait()
        return [one.step for one in checkpoint_files.committed(self.base_url)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["infinity", "an unknown type"])
def test_what_one_rank_can_not_save_no_rank_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rank: int, what: str
) -> None:
    ranks = Ranks(tmp_path)
    bad = {"infinity": torch.tensor(torch.inf), "an unknown type": torch.ones(2).cfloat()}[what]
    states = halves(1.0)
    states[rank]["model"]["bad"] = bad
    ranks.save(3, states)
    assert ranks.steps() == []
    assert not list(tmp_path.glob("step-*"))
    said = capsys.readouterr().out
    assert said.count("the checkpoint of step 3") == 1
    assert ("NaN or infinity" if what == "infinity" else f"rank {rank}: ") in said
    ranks.save(6, halves(2.0))
    assert ranks.steps() == [6]


def test_no_rank_begins_a_save_before_all_have_finished_the_one_before(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    opened = threading.Event()
    arm(FaultPoint.BEFORE_MANIFEST, lambda: opened.wait(30.0) and None, at_step=3)
    ranks.save(3, halves(1.0))
    assert all(manager.is_saving for manager in ranks.managers)
    opened.set()
    assert ranks.steps() == [3]
    ranks.save(6, halves(2.0))
    assert ranks.steps() == [3, 6]


def test_a_save_is_given_up_when_the_group_breaks_before_a_rank_has_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_group, "GRACE_S", 0.05)
    ranks = Ranks(tmp_path)
    ranks.save(3, halves(1.0)[:1])  # rank 1 has died
    assert ranks.managers[0].is_saving
    ranks.managers[0].disband()
    assert ranks.steps() == []
    assert "the group broke when 1 of 2 ranks had written their parts" in capsys.readouterr().out
    assert not list(tmp_path.glob("step-*"))


def test_a_save_whose_parts_all_arrived_is_committed_although_the_group_broke(
    tmp_path: Path,
) -> None:
    ranks = Ranks(tmp_path)
    opened = threading.Event()
    arm(FaultPoint.SHARE_WRITTEN, lambda: opened.wait(30.0) and None, at_step=3)
    ranks.save(3, halves(1.0))
    for manager in ranks.managers:
        manager.group.disband()
    opened.set()
    assert ranks.steps() == [3]


def test_files_of_an_unfinished_save_do_not_stay_beside_those_of_the_next(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    folder = tmp_path / "step-000000000003"
    folder.mkdir()
    (folder / "state-00003-of-00003.safetensors").write_bytes(b"old")
    ranks.save(3, halves(1.0))
    assert ranks.steps() == [3]
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
