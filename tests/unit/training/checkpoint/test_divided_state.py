"""A state that several ranks have written is loaded unchanged by any division of the model."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.equality import work
from dray.spec import JobSpec
from dray.train.checkpoints import CheckpointRef
from dray.train.prepared.copies import changed
from ray_workers.recipes import RECIPES
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.checkpoint import checkpoint_files, safetensors_layout
from ray_workers.training.checkpoint.manager import CheckpointManager
from ray_workers.training.checkpoint.manifests import CheckpointMetadata
from ray_workers.training.checkpoint.save_group import SaveGroup
from ray_workers.training.core.compat_torch import store_of_group
from ray_workers.training.parallel import Strategy, StrategyContext, calendar_of, strategy_of
from ray_workers.training.parallel.pieces import Piece
from tests.marks import soak
from tests.unit.training.checkpoint.test_checkpoint_files import own_memory_bytes
from tests.unit.training.jobs import assert_same, document
from tests.unit.training.ranks import run_in_group

CPU = torch.device("cpu")
ABOUT = CheckpointMetadata(3, {}, {})
MESHES: dict[str, work.Mesh] = {
    "alone": (1, {}),
    "replicas": (2, {}),
    "shard of 3": (3, {"shard": 3}),
    **{
        name: work.MESHES[name]
        for name in (
            "shard",
            "shard, ZeRO 1",
            "tensor",
            "context",
            "pipeline",
            "pipeline, interleaved",
            "shard 4",
            "shard, ZeRO 1 4",
            "data x shard",
            "data x shard, ZeRO 1",
            "data x tensor",
            "shard x tensor",
            "shard x pipeline",
            "tensor x pipeline",
        )
    },
}
"""Meshes of one to four ranks; the text's vocabulary and the layers can't be divided by three."""
SHORT = ("alone", "shard of 3", "data x shard", "shard x tensor", "pipeline, interleaved")


def strategy_for(document: Any, rank: int, world_size: int) -> Strategy:
    spec = JobSpec.model_validate(document)
    assert spec.recipe is not None
    workload = RECIPES[spec.recipe].build(spec, DataPolicy.open())
    given = StrategyContext(
        spec, workload, CPU, calendar_of(spec, workload), HeartbeatPage(None), ""
    )
    strategy = strategy_of(given)
    strategy.join_group(rank, world_size)
    return strategy


def made_up(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with random numbers in place of a model's values, and with moments."""
    generator = torch.Generator().manual_seed(1)

    def drawn(one: Any) -> Any:
        return torch.randn(one.shape, generator=generator) if isinstance(one, Tensor) else one

    model: dict[str, Any] = changed(state["model"], drawn)
    names = [name for group in state["optimizer"]["param_groups"] for name in group["params"]]
    moments = {
        name: {
            "step": torch.tensor(7.0),
            "exp_avg": drawn(model[name]),
            "exp_avg_sq": drawn(model[name]).square(),
        }
        for name in names
    }
    return {**state, "model": model, "optimizer": {**state["optimizer"], "state": moments}}


def save_together(base: Path, state: Mapping[str, Any], group: SaveGroup | None) -> CheckpointRef:
    manager = CheckpointManager(base.as_uri(), keep=9, best=None)
    manager.group = group
    manager.save(ABOUT, state)
    manager.wait()
    return ref_of(base)


def ref_of(base: Path) -> CheckpointRef:
    (saved,) = checkpoint_files.committed(base.as_uri())
    return CheckpointRef(saved.url, saved.step, saved.manifest_sha256)


def _save(rank: int, world_size: int, document: Any, alone: CheckpointRef, folder: str) -> None:
    """Load the state that a single process has saved, and save it again."""
    strategy = strategy_for(document, rank, world_size)
    strategy.load(checkpoint_files.load(alone).state)
    group = SaveGroup(store_of_group, rank, world_size, lambda: False)
    save_together(Path(folder), strategy.state(), group)


def _load(
    rank: int,
    world_size: int,
    document: Any,
    alone: CheckpointRef,
    refs: Mapping[str, CheckpointRef],
) -> None:
    """Check that a rank gets the same part of each checkpoint as of the one of a single process."""
    strategy = strategy_for(document, rank, world_size)
    strategy.load(checkpoint_files.load(alone).state)
    expected = changed(strategy.peer_state_dict(), _copied)
    for source, ref in refs.items():
        with torch.no_grad():
            for parameter in strategy.model.parameters():
                parameter.mul_(math.nan)
        loaded = checkpoint_files.load(ref, number=rank, num_ranks=world_size)
        strategy.load(loaded.state)
        try:
            assert_same(strategy.peer_state_dict(), expected)
        except AssertionError as error:
            raise AssertionError(f"loaded what {source} has saved") from error


def _copied(one: Any) -> Any:
    return one.clone() if isinstance(one, Tensor) else one


def _check_by_dcp(folder: Path, whole: Mapping[str, Any]) -> None:
    """Read the folder with torch, which shares no code with dray."""
    expected = {name: piece.tensor for name, piece in safetensors_layout.flatten(whole)[1].items()}
    found = {name: torch.full_like(tensor, math.nan) for name, tensor in expected.items()}
    reader = dcp.HuggingFaceStorageReader(str(folder))
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert_same(found, expected)


@pytest.mark.parametrize("meshes", [SHORT, soak(tuple(MESHES))], ids=len)
def test_every_mesh_loads_what_every_mesh_has_saved(tmp_path: Path, meshes: Sequence[str]) -> None:
    source = work.write_text(tmp_path, num_sentences=120)
    model = {**work.model_for({}), "width": 40}
    documents = {
        name: (size, work.document(source, size, parallel) | {"model": model})
        for name, (size, parallel) in ((name, MESHES[name]) for name in meshes)
    }
    offloaded = {"optimizer": {"name": "adamw", "lr": 0.002, "offload": True}}
    for name in meshes[2:4]:
        size, parallel = MESHES[name]
        spec = work.document(source, size, parallel, **offloaded) | {"model": model}
        spec["resources"]["gpus_per_worker"] = 1  # the state of a CPU job can't be offloaded
        documents[f"{name}, offloaded"] = (size, spec)
    _, document = documents["alone"]
    whole = made_up(strategy_for(document, 0, 1).state())
    alone = save_together(tmp_path / "alone", whole, None)
    refs = {"alone": alone}
    for name, (world_size, document) in documents.items():
        if document["parallel"]:
            folder = tmp_path / name
            run_in_group(_save, world_size, world_size, document, alone, str(folder))
            refs[name] = ref_of(folder)
            _check_by_dcp(folder / "step-000000000003", whole)
    for world_size, document in documents.values():
        if world_size == 1:
            _load(0, 1, document, alone, refs)
        else:
            run_in_group(_load, world_size, world_size, document, alone, refs)


MIB = 1 << 20
LIMIT = 128 * MIB
"""Maximum number of bytes that a save or a load may take besides the state and its staged copy."""
WIDE = {"name": "mlp", "width": 2048, "num_layers": 6}
"""About 23 million parameters: with two moments each, the state has 270 MB."""


def _stay_small(rank: int, folder: str, spec: Any) -> None:
    strategy = strategy_for(spec, rank, 2)
    strategy.load_model({k: torch.ones(v.shape) for k, v in strategy.whole().items()})
    for parameter in strategy.model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    strategy.gradients._norm = torch.ones(())  # type: ignore[attr-defined]
    strategy.update._optimizer.step()  # type: ignore[attr-defined]
    strategy.update._optimizer.zero_grad()  # type: ignore[attr-defined]
    gc.collect()
    manager = CheckpointManager(Path(folder).as_uri(), keep=9, best=None)
    manager.group = SaveGroup(store_of_group, rank, 2, lambda: False)
    state = strategy.state()
    share = sum(piece.tensor.nbytes for piece in leaves_of(state) if piece.tensor is not None)
    assert 100 * MIB < share < 170 * MIB, share
    with peak_of_own_memory() as peak:
        manager.save(ABOUT, state)
        manager.wait()
    assert peak[0] < share + LIMIT, f"{peak[0] / MIB:.0f} MiB to save {share / MIB:.0f} MiB"
    dist.barrier()
    ref = ref_of(Path(folder))
    del manager, state
    gc.collect()
    with peak_of_own_memory() as peak:  # the moments are replaced one after the other
        strategy.load(checkpoint_files.load(ref, number=rank, num_ranks=2).state)
    assert peak[0] < share * 2 // 3 + LIMIT, f"{peak[0] / MIB:.0f} MiB to load"


def leaves_of(state: Any) -> Iterator[Piece]:
    found: list[Piece] = []
    changed(state, lambda one: found.append(one) if isinstance(one, Piece) else one)
    return iter(found)


@contextmanager
def peak_of_own_memory() -> Iterator[list[int]]:
    """Measure the increase of this process's anonymous memory, in bytes."""
    begun, peak, is_over = own_memory_bytes(), [0], threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            peak[0] = max(peak[0], own_memory_bytes() - begun)
            is_over.wait(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        is_over.set()
        watcher.join()


def test_a_rank_needs_memory_for_its_share_only(tmp_path: Path) -> None:
    spec = document(2, optimizer={"name": "adamw"}) | {"parallel": {"shard": 2}, "model": WIDE}
    run_in_group(_stay_small, 2, str(tmp_path), spec)
