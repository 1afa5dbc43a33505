"""Checkpoints of a model that FSDP2 divides among two ranks, saved and loaded by each contender in
turn. Run it with `python -m benchmarks.checkpoint_stall.divided`; it prints the medians.

The stall is measured as in `rank`. The commit takes from the call until the checkpoint is complete
on disk, without steps in between. The files are in the page cache when they are loaded.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from benchmarks.checkpoint_stall.rank import Loop
from benchmarks.checkpoint_stall.savers import Dcp, Nothing, Saver
from benchmarks.checkpoint_stall.work import WORKS, Work
from benchmarks.torchrun import torchrun
from dray.train.checkpoints import CheckpointRef
from dray.train.prepared.copies import changed
from dray.train.prepared.dtensor import local, part_of, plain_part_of
from ray_workers.training.checkpoint import checkpoint_files
from ray_workers.training.checkpoint.manager import CheckpointManager
from ray_workers.training.checkpoint.manifests import CheckpointMetadata
from ray_workers.training.checkpoint.save_group import SaveGroup
from ray_workers.training.core.compat_torch import store_of_group
from ray_workers.training.parallel.pieces import Spread

NUM_RANKS = 2


class Divided(Nothing):
    """A way to save and load the state of a divided model."""

    can_load = False

    def __init__(self, model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, folder

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self) -> None:
        """Load the last checkpoint into the model and the optimizer."""


class Dray(Divided):
    can_load = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._manager = CheckpointManager(self.folder.as_uri(), keep=1, best=None)
        rank = dist.get_rank()
        self._manager.group = SaveGroup(store_of_group, rank, NUM_RANKS, lambda: False)
        self._positions = {"held": (NUM_RANKS, rank)}

    def save(self, step: int) -> None:
        pieces = Spread(self._positions).pieces(self.state())
        self._manager.save(CheckpointMetadata(step, {}, {}), pieces)

    def before_update(self) -> None:
        self._manager.hold()

    def is_saving(self) -> bool:
        return self._manager.is_saving

    def load(self) -> None:
        (saved,) = checkpoint_files.committed(self.folder.as_uri())
        ref = CheckpointRef(saved.url, saved.step, saved.manifest_sha256)
        state = checkpoint_files.load(ref, number=dist.get_rank(), num_ranks=NUM_RANKS).state
        with torch.no_grad():
            for name, own in self.model.state_dict().items():
                local(own).copy_(plain_part_of(state["model"][name], own))
        parameters = list(self.model.parameters())
        moments = {
            index: {name: _own(one, parameters[index]) for name, one in each.items()}
            for index, each in state["optimizer"]["state"].items()
        }
        self.optimizer.load_state_dict({**state["optimizer"], "state": moments})


class DcpAsync(Divided):
    """`async_save`, as in `savers.Dcp`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._saver = Dcp(*given)

    def save(self, step: int) -> None:
        self._saver.save(step)

    def is_saving(self) -> bool:
        return self._saver.is_saving()

    def tidy(self) -> None:
        self._saver.tidy()


class DcpSync(Divided):
    """`dcp.save` with synced files, and `dcp.load`."""

    can_load = True

    def save(self, step: int) -> None:
        save(self.state(), storage_writer=FileSystemWriter(self.folder, sync_files=True))

    def load(self) -> None:
        state = self.state()
        load(state, storage_reader=FileSystemReader(self.folder))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Gathered(Divided):
    """Gathers the state on all ranks; rank 0 saves it with `torch.save`."""

    def save(self, step: int) -> None:
        whole = changed(
            self.state(), lambda one: one.full_tensor() if isinstance(one, DTensor) else one
        )
        if dist.get_rank() == 0:
            self.folder.mkdir(exist_ok=True)
            with open(self.folder / "state.pt", "wb") as file:
                torch.save(whole, file)
                file.flush()
                os.fsync(file.fileno())


class DividedLoop(Loop):
    """A plain FSDP2 loop from which contenders save."""

    def __init__(self, work: Work, folder: Path) -> None:
        self.model = work.model()
        mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("held",))
        for layer in self.model.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self._module: Any = self.model
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._inputs = torch.randn(work.batch_size, work.width)
        self.step = 0
        kinds = {
            "dray": Dray,
            "dcp.async_save": DcpAsync,
            "dcp.save": DcpSync,
            "torch.save": Gathered,
        }
        self.savers = {
            name: kind(self.model, self._optimizer, folder / name) for name, kind in kinds.items()
        }
        self.train(Nothing())

    def save(self, saver: Saver) -> None:
        """Save, and wait until the checkpoint is complete."""
        self.step += 1
        saver.save(self.step)
        while saver.is_saving():
            time.sleep(0.001)
        dist.barrier()


def _own(value: Tensor, parameter: nn.Parameter) -> Tensor:
    return part_of(value, parameter) if value.ndim else value.clone()


def _timed(act: Callable[[], None]) -> float:
    dist.barrier()
    began = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - began


def _rank(work: Work, num_turns: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loop = DividedLoop(work, folder)
    found: dict[str, dict[str, list[float]]] = {
        name: {"stall": [], "commit": [], "load": []} for name in loop.savers
    }
    for number in range(num_turns + 1):
        names = list(loop.savers)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            saver: Any = loop.savers[name]
            stall = loop.turn(saver)
            commit = _timed(functools.partial(loop.save, saver))
            load = _timed(saver.load)
            saver.tidy()
            if number:  # the first turn creates memory and threads
                found[name]["stall"].append(stall)
                found[name]["commit"].append(commit)
                if saver.can_load:
                    found[name]["load"].append(load)
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can abort during the interpreter's shutdown


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", choices=WORKS, default="500 MB")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    work = WORKS[options.work]
    if options.folder is not None:
        _rank(work, options.turns, options.folder)
    home = Path(tempfile.mkdtemp(prefix="dray-bench-"))
    try:
        given = ["--work", work.name, "--turns", str(options.turns), "--folder", str(home)]
        torchrun(
            "benchmarks.checkpoint_stall.divided", given, num_ranks=NUM_RANKS, timeout_s=3600.0
        )
        found = json.loads((home / "found.json").read_text())
    finally:
        shutil.rmtree(home)
    for name, figures in found.items():
        medians = (f"{key} {statistics.median(of):.3f} s" for key, of in figures.items() if of)
        print(f"{name:16}", *medians, sep="  ")


if __name__ == "__main__":
    main()
