"""The weights of a divided model are stored by its ranks, without gathering the model."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor

import dray
from benchmarks.equality import work
from dray.train import files, storage_faults
from ray_workers.recipes import results
from ray_workers.shared.contracts import RankTask
from ray_workers.training.core.faultpoints import FaultPoint, arm
from ray_workers.training.loop import weight_files
from tests.marks import soak
from tests.unit.training.checkpoint.test_divided_state import (
    LIMIT,
    MESHES,
    MIB,
    peak_of_own_memory,
    strategy_for,
)
from tests.unit.training.elastic.test_recovery import die
from tests.unit.training.jobs import assert_same, document, weights
from tests.unit.training.parallel.test_model_parallel import brief
from tests.unit.training.ranks import frames, replaced, run_in_group, run_ranks


def made_up(shapes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape.shape, generator=generator).to(shape.dtype)
        for name, shape in shapes.items()
    }


def _store(rank: int, world_size: int, document: Any, folder: str, **limits: int) -> None:
    for name, number in limits.items():
        setattr(weight_files, name, number)
    os.environ["DRAY_ARTIFACT_URL"] = Path(folder).as_uri()
    strategy = strategy_for(document, rank, world_size)
    strategy.load_model(made_up(strategy.whole()))
    num_parts = math.prod(document["parallel"].get(axis, 1) for axis in AXES)
    stored = weight_files.store(strategy, num_parts, waiting=lambda: None)
    if rank == 0:
        strategy.given.workload.write_results(stored, {}, 1, Path(folder))


AXES = ("shard", "tensor", "pipeline", "context")
SMALL_ROUNDS = {"FILE_BYTES": 1, "ROUND_BYTES": 500}
"""Limits with which a small model is in several files, and a tensor in several rounds."""
SHORT = ("shard of 3", "pipeline, interleaved", "shard x tensor", "data x shard, ZeRO 1")


@pytest.mark.parametrize(
    "mesh",
    [mesh if mesh in SHORT else soak(mesh) for mesh, (_, parallel) in MESHES.items() if parallel],
)
def test_the_files_contain_the_model(tmp_path: Path, mesh: str) -> None:
    """The width of 40 and the vocabulary can't be divided by three."""
    world_size, parallel = MESHES[mesh]
    spec = work.document(work.write_text(tmp_path, num_sentences=120), world_size, parallel)
    spec["model"] = {**work.model_for(parallel), "width": 40}
    folder = tmp_path / "result"
    store = functools.partial(_store, **SMALL_ROUNDS)
    run_in_group(store, world_size, world_size, spec, str(folder))
    expected = made_up(strategy_for(alone(spec), 0, 1).whole())
    assert_same(results.read_weights(folder), expected)
    check_by_safetensors(folder, expected, num_files=math.prod(parallel.get(a, 1) for a in AXES))
    model = dray.load(folder).model
    assert_same(dict(model.state_dict()), expected)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    huggingface_hub.load_torch_model(model, folder, strict=True)
    assert_same(dict(model.state_dict()), expected)


def alone(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {**spec, "parallel": {}, "resources": {"num_workers": 1}}


def check_by_safetensors(folder: Path, expected: Mapping[str, Tensor], *, num_files: int) -> None:
    """Read the files with safetensors itself, as their format says."""
    names = [f"model-{n:05d}-of-{num_files:05d}.safetensors" for n in range(1, num_files + 1)]
    assert sorted(path.name for path in folder.glob("*.safetensors")) == names
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in expected.values())
    assert index["weight_map"].keys() == expected.keys()
    for name in names:
        with safetensors.safe_open(folder / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert set(file.keys()) == {k for k, v in index["weight_map"].items() if v == name}
            for key in file.keys():  # noqa: SIM118  # it is not a dictionary
                assert torch.equal(file.get_tensor(key), expected[key])


WIDE = {"name": "mlp", "width": 2048, "num_layers": 19}
"""About 76 million parameters, 303 MB; the largest tensor has 16 MB."""


def _stay_small(rank: int, folder: str, spec: Any) -> None:
    os.environ["DRAY_ARTIFACT_URL"] = Path(folder).as_uri()
    strategy = strategy_for(spec, rank, 2)
    strategy.load_model({k: torch.ones(v.shape) for k, v in strategy.whole().items()})
    sizes = [math.prod(each.shape) * 4 for each in strategy.whole().values()]
    assert sum(sizes) > 300e6
    with peak_of_own_memory() as peak:
        weight_files.store(strategy, 2, waiting=lambda: None)
    assert peak[0] < LIMIT + max(sizes), f"{peak[0] / MIB:.0f} MiB"


@pytest.mark.parametrize("parallel", [{"shard": 2}, soak({"shard": 2, "zero": 1})], ids=["3", "1"])
def test_no_rank_holds_the_model(tmp_path: Path, parallel: dict[str, Any]) -> None:
    spec = document(2) | {"parallel": parallel, "model": WIDE}
    run_in_group(_stay_small, 2, str(tmp_path), spec)
    assert len(list(tmp_path.glob("model-0000?-of-00002.safetensors"))) == 2


def _limited(task: RankTask, then: Any = None) -> None:
    weight_files.FILE_BYTES, weight_files.ROUND_BYTES = 1, 500
    if then is not None:
        then(task)


def job(folder: Path, mesh: str = "data x shard") -> tuple[int, dict[str, Any]]:
    world_size, parallel = work.MESHES[mesh]
    return world_size, brief(folder, world_size, parallel, max_steps=4)


ALL = [
    "config.json",
    "metrics.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
]


def stored(home: Path, world_size: int) -> list[str]:
    """Return the names of the artifacts that any process of a rank has reported."""
    told = [one for rank in range(world_size) for one in frames(home, rank=rank, kind="artifact")]
    return sorted({one["path"] for one in told})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("undisturbed")
    world_size, spec = job(home)
    assert run_ranks(home, spec, world_size=world_size) == [0] * world_size
    assert stored(home, world_size) == ["config.json", "metrics.json", "model.safetensors"]
    return home


def _kill_in_round(task: RankTask, culprit: int) -> None:
    """Kill a rank between two rounds of the exchange."""
    if task.rank != culprit or task.incarnation:
        return
    exchanged = weight_files.Exchange._exchanged

    def die_in_round_5(self: weight_files.Exchange, number: int) -> Sequence[Tensor]:
        if number == 5:
            die()
        return exchanged(self, number)

    weight_files.Exchange._exchanged = die_in_round_5  # type: ignore[method-assign]


def _kill_at_the_end(task: RankTask, culprit: int) -> None:
    if task.rank == culprit and not task.incarnation:
        arm(FaultPoint.WEIGHTS_STORED, die)


@pytest.mark.parametrize(
    ("kill", "culprit"),
    [
        soak(_kill_in_round, 2),
        soak(_kill_in_round, 0),
        soak(_kill_in_round, 1),
        (_kill_at_the_end, 0),
        soak(_kill_at_the_end, 3),
    ],
)
def test_after_a_loss_the_result_is_written_again(
    tmp_path: Path, undisturbed: Path, kill: Any, culprit: int
) -> None:
    world_size, spec = job(tmp_path)
    before = functools.partial(_limited, then=functools.partial(kill, culprit=culprit))
    codes = run_ranks(tmp_path, spec, world_size=world_size, before=before, recovers=True)
    assert codes == [0] * world_size
    assert replaced(tmp_path) == [culprit]
    assert stored(tmp_path, world_size) == ALL
    assert_same(weights(tmp_path), weights(undisturbed))


def _fill_the_node(task: RankTask) -> None:
    """Let the local disk of rank 2, which writes the second file, be full in two attempts."""
    storage_faults.PAUSE_S = 0.05
    write, refusals = weight_files.FileWriter.write, iter(range(2))

    def refuse(self: weight_files.FileWriter, number: int, received: Sequence[Tensor]) -> None:
        if number == 3 and task.rank == 2 and next(refusals, None) is not None:
            raise OSError(28, os.strerror(28))
        write(self, number, received)

    weight_files.FileWriter.write = refuse  # type: ignore[method-assign]


def _fill_the_storage(task: RankTask) -> None:
    storage_faults.PAUSE_S = 0.05
    store, refusals = files.store, iter(range(3))

    def refuse(source: Path, url: str) -> tuple[int, str]:
        if task.rank == 2 and next(refusals, None) is not None:
            raise files.StorageError(f"{url} can't be written: no space left on device")
        return store(source, url)

    files.store = refuse


@pytest.mark.parametrize("fill", [soak(_fill_the_node), _fill_the_storage])
def test_all_ranks_wait_for_space_on_one(tmp_path: Path, undisturbed: Path, fill: Any) -> None:
    world_size, spec = job(tmp_path)
    before = functools.partial(_limited, then=fill)
    assert run_ranks(tmp_path, spec, world_size=world_size, before=before) == [0] * world_size
    assert stored(tmp_path, world_size) == ALL
    assert_same(weights(tmp_path), weights(undisturbed))


@pytest.fixture
def divided_result(tmp_path: Path) -> Path:
    """A result whose weights were divided among files by Hugging Face's library."""
    spec = document(1) | {"model": {"name": "mlp", "width": 32}}
    strategy = strategy_for(spec, 0, 1)
    strategy.load_model(made_up(strategy.whole()))
    workload, model = strategy.given.workload, strategy.model
    workload.write_results(model, {}, 1, tmp_path)
    (tmp_path / "divided").mkdir()
    huggingface_hub.save_torch_model(model, tmp_path / "divided", max_shard_size="5KB")
    (tmp_path / "model.safetensors").unlink()
    for path in (tmp_path / "divided").iterdir():
        path.rename(tmp_path / path.name)
    return tmp_path


def test_a_divided_result_is_loaded_and_exported(divided_result: Path) -> None:
    assert len(list(divided_result.glob("model-*"))) > 1
    classifier = dray.load(divided_result)
    expected = made_up(classifier.model.state_dict())
    assert_same(dict(classifier.model.state_dict()), expected)
    exported = torch.export.load(classifier.export(divided_result / "digits.pt2"))
    samples = torch.rand(3, 1, 8, 8)
    found = exported.module()(samples)
    torch.testing.assert_close(found, classifier.model(samples))


def test_a_divided_result_that_is_not_complete_is_refused(divided_result: Path) -> None:
    *_, last = sorted(divided_result.glob("model-*"))
    content = last.read_bytes()
    last.unlink()
    with pytest.raises(FileNotFoundError, match=rf"{last.name} is missing. Download the complete"):
        dray.load(divided_result)
    tensors = safetensors.torch.load(content)
    _, tensor = tensors.popitem()
    safetensors.torch.save_file({**tensors, "another": tensor}, last)
    with pytest.raises(ValueError, match="do not contain the same tensors"):
        dray.load(divided_result)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"w": 3}}'),
        *('{"weight_map": {"w": "../w.safetensors"}}', '{"weight_map": {"w": "/w.safetensors"}}'),
    ],
)
def test_an_index_that_is_damaged_is_refused(divided_result: Path, text: str) -> None:
    (divided_result / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"is not an index of safetensors files"):
        dray.load(divided_result)


@pytest.mark.parametrize(
    ("sizes", "max_files", "expected"),
    [
        ([3, 3, 3, 3], 4, [1, 1, 1, 1]),
        ([3, 3, 3, 3], 9, [1, 1, 1, 1]),
        ([3, 3, 3, 3], 2, [2, 2]),
        ([1, 1, 8, 1, 1], 3, [2, 1, 2]),
        ([9, 1], 5, [1, 1]),
        ([0, 0], 2, [2]),
        ([], 2, [0]),
    ],
)
def test_files_have_similar_sizes(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], max_files: int, expected: list[int]
) -> None:
    monkeypatch.setattr(weight_files, "FILE_BYTES", 1)
    groups = weight_files.divided({str(n): size for n, size in enumerate(sizes)}, max_files)
    assert [len(group) for group in groups] == expected
    assert [name for group in groups for name in group] == [str(n) for n in range(len(sizes))]


@pytest.mark.parametrize(("mib", "num_files"), [(0, 1), (127, 1), (128, 2), (320, 5), (900, 8)])
def test_a_small_model_is_one_file(mib: int, num_files: int) -> None:
    sizes = {str(n): MIB for n in range(mib)}
    assert len(weight_files.divided(sizes, 8)) == num_files
