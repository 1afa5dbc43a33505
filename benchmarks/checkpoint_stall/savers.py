"""The ways of saving that are compared."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.optim import Optimizer

from ray_workers.training.checkpoint.manager import CheckpointManager
from ray_workers.training.checkpoint.manifests import CheckpointMetadata
from ray_workers.training.checkpoint.staging import Stager


class Saver(Protocol):
    def save(self, step: int) -> None: ...

    def before_update(self) -> None:
        """Called before each optimizer step."""

    def is_saving(self) -> bool: ...

    def tidy(self) -> None:
        """Called outside the timed part."""


class Nothing:
    """Does not save: measures the noise of the method."""

    def save(self, step: int) -> None:
        pass

    def before_update(self) -> None:
        pass

    def is_saving(self) -> bool:
        return False

    def tidy(self) -> None:
        pass


class Dray(Nothing):
    """Rank 0 saves with the same `CheckpointManager` as in a job."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
        self._model, self._optimizer = model, optimizer
        self._manager = CheckpointManager(folder.as_uri(), keep=1, best=None)

    def save(self, step: int) -> None:
        if dist.get_rank() == 0:
            state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
            metadata = CheckpointMetadata(step, metrics={}, position={})
            self._manager.save(metadata, state, volatile=self._model.buffers())

    def before_update(self) -> None:
        self._manager.hold()

    def is_saving(self) -> bool:
        return self._manager.is_saving


class Copy(Nothing):
    """Rank 0 copies the state to memory, and writes nothing."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._stager = Stager()

    def save(self, step: int) -> None:
        if dist.get_rank() == 0:
            state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
            self._stager.take(state).wait()


class TorchSave(Nothing):
    """Rank 0 saves to the final location and syncs. The other ranks wait for it in the next
    step."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
        self._model, self._optimizer = model, optimizer
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def save(self, step: int) -> None:
        if dist.get_rank() == 0:
            state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
            with open(self._folder / f"{step}.pt", "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())

    def tidy(self) -> None:
        if dist.get_rank() == 0:
            for path in self._folder.iterdir():
                path.unlink()


class Dcp(Nothing):
    """`async_save` on every rank, over a separate process group, with memory that is kept between
    saves (like dray's) and synced files (DCP's default)."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
        self._model, self._optimizer = model, optimizer
        self._folder = folder
        self._group = dist.new_group(backend="gloo")
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._saving: Future[Any] | None = None

    def save(self, step: int) -> None:
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        saving = async_save(
            state,
            storage_writer=FileSystemWriter(self._folder / str(step), sync_files=True),
            process_group=self._group,
            async_stager=self._stager,
        )
        assert isinstance(saving, Future)
        self._saving = saving

    def is_saving(self) -> bool:
        return self._saving is not None and not self._saving.done()

    def tidy(self) -> None:
        if self._saving is not None:
            self._saving.result()  # raises the error, if any
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
