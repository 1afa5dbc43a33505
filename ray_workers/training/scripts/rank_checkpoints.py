"""Checkpoints of a prepared script whose model is divided, saved and loaded like the checkpoints of
recipes: each rank writes its part of the state.

All divided tensors of a script's state are DTensors. Rank 0 writes all other values, such as
running means, because they can differ between ranks.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from dray import train
from dray.train import checkpoints
from dray.train.checkpoints import CheckpointRef
from dray.train.prepared import saving
from dray.train.prepared.copies import changed
from dray.train.storage_faults import StorageError
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.heartbeat import HeartbeatPage, RankAssignment
from ray_workers.training.checkpoint import checkpoint_files, manifests, resuming
from ray_workers.training.checkpoint.checkpoint_files import LoadedCheckpoint
from ray_workers.training.checkpoint.manager import CheckpointManager
from ray_workers.training.checkpoint.manifests import CheckpointMetadata
from ray_workers.training.checkpoint.save_group import SaveGroup
from ray_workers.training.checkpoint.tagged_values import tagged, untagged
from ray_workers.training.core.errors import BrokenCheckpointError, UnreachableCheckpointError
from ray_workers.training.elastic import process_group
from ray_workers.training.parallel.pieces import Piece, Spread


class RankCheckpoints:
    """The checkpoints of one rank. Implements `DividedCheckpoints`."""

    def __init__(
        self, task: RankTask, page: HeartbeatPage, assignment: RankAssignment, keep: int
    ) -> None:
        """keep: number of checkpoints to keep."""
        self._refs = task.resume_from
        self._rank, self._world_size = assignment.rank, assignment.world_size
        self._device = torch.device(task.device)
        self._manager = CheckpointManager(
            task.checkpoint_url,
            keep=keep,
            best=None,
            progressed=page.move,
            saves_any_number=True,
        )
        self._manager.group = SaveGroup.of(task, assignment, page)

    def load(self) -> Mapping[str, Any] | None:
        def everywhere(is_valid: bool) -> bool:
            is_same = process_group.all_same(is_valid, self._device, self._world_size)
            return is_same and is_valid

        loaded, passed_over = resuming.choose(
            self._refs, everywhere, number=self._rank, num_ranks=self._world_size, read=_read
        )
        step = 0 if loaded is None else loaded.saved.step
        if self._rank == 0:
            resuming.log_passed_over(passed_over)
            if loaded is not None:
                self._manager.adopt(self._refs[len(passed_over) :])
            report = resuming.receipt(loaded, passed_over, step=step, position=None)
            train.emit(report.KIND, report.body())
        return None if loaded is None else untagged(loaded.state)

    def check(self, state: Mapping[str, Any]) -> None:
        part_of_rank(state, 0)  # on all ranks, so that all of them raise the error

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        about = CheckpointMetadata(step, {}, {"world_size": self._world_size})
        part = functools.partial(part_of_rank, state, self._rank)
        # The script may change any tensor at any time.
        self._manager.save(about, part, volatile=None)

    @property
    def is_saving(self) -> bool:
        return self._manager.is_saving

    def wait(self) -> None:
        self._manager.wait()

    def close(self) -> None:
        """Commit the checkpoint that is being saved if the other ranks report soon, and delete
        superseded checkpoints."""
        self._manager.disband()
        self._manager.wait()
        self._manager.tidy()


def read_divided(folder: Path) -> Mapping[str, Any]:
    """Return the state that the ranks of a group have written to a folder."""
    state = untagged(checkpoint_files.read_folder(folder))
    whole: dict[str, Any] = changed(
        state, lambda one: one.clone() if isinstance(one, Tensor) else one
    )
    return whole


def _read(ref: CheckpointRef, *, number: int, num_ranks: int) -> LoadedCheckpoint:
    """Read a checkpoint that was written by the ranks or, in earlier versions of dray, by rank
    0."""
    saved, manifest = manifests.read_manifest(ref)
    if manifest["version"] != 0:
        return checkpoint_files.load(ref, number=number, num_ranks=num_ranks)
    with tempfile.TemporaryDirectory(prefix="dray-checkpoint-") as scratch:
        try:
            folder = checkpoints.fetch(ref, Path(scratch))
        except checkpoints.BrokenCheckpoint as error:
            raise BrokenCheckpointError(str(error)) from error
        except StorageError as error:
            raise UnreachableCheckpointError(str(error)) from error
        return LoadedCheckpoint(saved, saving.read_whole(folder, ref.step), {}, None)


def part_of_rank(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return what this rank writes: `Piece`s of divided tensors and, on rank 0, everything else.
    Raises ValueError if an object can't be saved. A collective if the state contains sums that have
    not been added up yet."""
    part: dict[str, Any] = _OwnPart(rank).of(state, "")
    if rank != 0:
        part = _pieces_only(part)
    return part


class _OwnPart:
    def __init__(self, rank: int) -> None:
        self._is_first = rank == 0
        self._spreads: dict[DeviceMesh, Spread] = {}

    def of(self, value: Any, path: str) -> Any:
        if isinstance(value, DTensor):
            return self._piece(value)
        if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
            # Ranks can have the same items in a different order.
            made = {key: self.of(value[key], _under(path, key)) for key in sorted(value, key=repr)}
            return {key: made[key] for key in value}
        if type(value) in (list, tuple):
            return type(value)([self.of(one, _under(path, at)) for at, one in enumerate(value)])
        return tagged(value, path) if self._is_first else None

    def _piece(self, tensor: DTensor) -> Any:
        mesh = tensor.device_mesh
        if any(placement.is_partial() for placement in tensor.placements):
            added = [Replicate() if each.is_partial() else each for each in tensor.placements]
            tensor = tensor.redistribute(mesh, added)
        if mesh.mesh_dim_names is None:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} is distributed over a device mesh "
                "without mesh_dim_names: name the dimensions of the mesh"
            )
        if 0 not in mesh.mesh:  # other ranks have the values that are saved
            return Piece(None, (0,) * tensor.ndim, tensor.shape)
        if mesh not in self._spreads:
            sizes = enumerate(mesh.mesh_dim_names)
            positions = {name: (mesh.size(dim), mesh.get_local_rank(dim)) for dim, name in sizes}
            self._spreads[mesh] = Spread(positions)
        return self._spreads[mesh].pieces(tensor)


def _under(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def _pieces_only(value: Any) -> Any:
    """Return the pieces of a state that this rank writes, at the same paths, and nothing else."""
    if isinstance(value, Piece):
        return value
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return None
    found = {key: _pieces_only(one) for key, one in value.items()}
    return {key: one for key, one in found.items() if one is not None and _has_tensor(one)}


def _has_tensor(value: Any) -> bool:
    return value.tensor is not None if isinstance(value, Piece) else bool(value)
