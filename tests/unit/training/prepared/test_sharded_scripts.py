"""Checkpoints that the ranks of a divided script write together are loaded by any division of its
model. The expected states are gathered with torch's `full_tensor`."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import math
import os
import random
import string
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from dray import train
from dray.train import preparing, reporting
from dray.train.checkpoints import CheckpointRef, commit
from dray.train.prepared import saving
from dray.train.prepared.divided_session import DividedSession
from dray.train.prepared.dtensor import local
from dray.train.prepared.group import SoloGroup, TorchrunGroup
from ray_workers.shared.heartbeat import HeartbeatPage, RankAssignment
from ray_workers.training.checkpoint import checkpoint_files
from ray_workers.training.checkpoint.save_group import SaveGroup
from ray_workers.training.core.compat_torch import PrefixStore, Store, store_of_group
from ray_workers.training.scripts.rank_checkpoints import (
    RankCheckpoints,
    part_of_rank,
    read_divided,
)
from tests.marks import soak
from tests.unit.training.checkpoint.test_divided_state import (
    LIMIT,
    MIB,
    leaves_of,
    peak_of_own_memory,
)
from tests.unit.training.prepared.test_divided_script import PLAN, Residuals, samples, step
from tests.unit.training.ranks import run_in_group

SHARD = {"blocks": "layers.*"}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "shard": (2, SHARD),
    "tensor": (2, {"tensor": 2, "tensor_plan": PLAN}),
    "shard of 3": (3, SHARD),
    "data x shard": (4, {**SHARD, "shard": 2}),
    "shard x tensor": (4, {**SHARD, "tensor": 2, "tensor_plan": PLAN}),
    "data x tensor": (4, {"shard": 1, **SHARD, "tensor": 2, "tensor_plan": PLAN}),
}


class Masters(optim.Optimizer):
    """SGD with momentum on 64-bit copies of the weights."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["of"] = {"master": parameter.detach().double()}
                    state["number"] = torch.tensor(2**24 + 1)
                master = local(state["of"]["master"])
                master.add_(local(parameter.grad).double(), alpha=-float(group["lr"]))
                local(parameter).copy_(master)


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda groups: optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
    "adamw": lambda groups: optim.AdamW(groups, lr=0.01, amsgrad=True),
    "adam": lambda groups: optim.Adam(groups, lr=torch.tensor(0.01), foreach=False),
    "adadelta": lambda groups: optim.Adadelta(groups, lr=0.01),
    "adamax": lambda groups: optim.Adamax(groups, lr=0.01),
    "asgd": lambda groups: optim.ASGD(groups, lr=0.01),
    "nadam": lambda groups: optim.NAdam(groups, lr=0.01),
    "radam": lambda groups: optim.RAdam(groups, lr=0.01),
    "rmsprop": lambda groups: optim.RMSprop(groups, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda groups: optim.Adagrad(groups, lr=0.01, initial_accumulator_value=0.5),
    "masters": lambda groups: Masters(groups),
}
"""All of torch's optimizers but Rprop and Adafactor, whose steps fail on DTensors (torch 2.13), and
one with a state that is more precise than the weights."""


class Averages:
    """A moving average of the weights, whose state begins empty."""

    def __init__(self) -> None:
        self.of: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            known = self.of.setdefault(name, torch.zeros_like(parameter))
            local(known).lerp_(local(parameter), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": dict(self.of)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.of = dict(state["shadow"])


class OfEachRank:
    """An object with a tensor on a mesh that consists of this rank only."""

    def __init__(self, value: float) -> None:
        self.value = torch.full((3,), value)
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("a", "b"))
            self.value = DTensor.from_local(self.value, mesh["b"], [Shard(0)])

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        assert isinstance(state["value"], type(self.value))
        self.value = state["value"]


class Odd:
    """An object whose state contains drawn values, and is different on each rank."""

    def __init__(self, seed: int, rank: int) -> None:
        chance = random.Random(f"{seed} {rank}")
        self.values: Any = {"top": [drawn(chance, 0) for _ in range(6)], 7: drawn(chance, 0)}

    def state_dict(self) -> Any:
        return self.values

    def load_state_dict(self, state: Any) -> None:
        self.values = state


def drawn(chance: random.Random, depth: int) -> Any:
    """Return a value that can be in the state of a user's object."""
    shape = [chance.randrange(4) for _ in range(chance.randrange(3))]
    tensor = torch.full(shape, chance.random())
    plain: list[Any] = [
        *(None, True, -3, 2**70, -(2**63), 0.1, math.inf, math.nan, "", "ü\ud800\0/'", b"\0\xff"),
        *(np.float64(0.5), np.float32(0.5), np.int64(3), np.bool_(True), np.arange(3.0), 1j),
        *({1, 2}, frozenset("a"), deque([1, None], 3), Path("a/b"), range(3), torch.float16),
        *(random.Random(1).getstate(), np.random.RandomState(1).get_state(), torch.device("cpu")),
        *(datetime(2026, 11, 30, tzinfo=UTC), timedelta(-1), bytearray(b"x")),
        *(tensor, tensor.to(torch.complex64), tensor > 0.5, tensor.half(), tensor.bfloat16()),
        *(torch.arange(6).view(2, 3).T, OrderedDict(a=1), Counter("aab"), torch.Size([2, 3])),
    ]
    kind = chance.randrange(4) if depth < 3 else 0
    several = [drawn(chance, depth + 1) for _ in range(chance.randrange(4))] if kind else []
    if kind == 1:
        return several
    if kind == 2:
        return tuple(several)
    keys = [*string.ascii_letters, "a/b", "", 0, -1, True, None, 1.5, (1, 2), np.int64(9)]
    if kind == 3:
        return dict(zip(chance.sample(keys, len(several)), several, strict=True))
    return chance.choice(plain)


def assert_equal(found: Any, expected: Any, path: str = "") -> None:
    assert type(found) is type(expected), (path, found, expected)
    if isinstance(expected, Tensor):
        assert (found.dtype, found.layout) == (expected.dtype, expected.layout), path
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    elif isinstance(expected, Mapping):
        assert list(map(repr, found)) == list(map(repr, expected)), path
        for (key, one), other in zip(found.items(), expected.values(), strict=True):
            assert_equal(one, other, f"{path}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for at, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal(one, other, f"{path}/{at}")
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected)
    else:
        is_nan = isinstance(expected, float) and math.isnan(expected)
        assert math.isnan(found) if is_nan else found == expected, path


class DividedGroup(TorchrunGroup):
    """Ranks without dray that save and load as in dray."""

    home: Path
    refs: Sequence[CheckpointRef] = ()

    def checkpoints(self, keep: int) -> RankCheckpoints:
        task: Any = SimpleNamespace(
            resume_from=self.refs, device="cpu", checkpoint_url=self.home.as_uri()
        )
        task.master_addr, task.master_port = "", 0
        page = HeartbeatPage(None)
        assignment = RankAssignment(0, self.rank, self.world_size, None)
        made = RankCheckpoints(task, page, assignment, keep)

        def connect() -> Store:
            return PrefixStore(self.home.name, store_of_group())

        made._manager.group = SaveGroup(connect, self.rank, self.world_size, lambda: False)
        return made


class AloneGroup(SoloGroup):
    def read_divided(self, folder: Path) -> Mapping[str, Any]:
        return read_divided(folder)


class Run(NamedTuple):
    model: nn.Module
    optimizer: optim.Optimizer
    loader: Any
    averages: Averages

    @property
    def session(self) -> Any:
        return self.loader._session

    def step(self, batches: Any) -> None:
        step(self.model, self.optimizer, next(batches))
        self.averages.update(self.model)


def schedulers_of(optimizer: optim.Optimizer) -> list[Any]:
    return [
        lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20, cycle_momentum=False),
        lr_scheduler.MultiStepLR(optimizer, [1, 3, 3]),
        lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
        lr_scheduler.ReduceLROnPlateau(optimizer),
        lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)],
            [2],
        ),
    ]


def begin(name: str, group: Any, division: Mapping[str, Any], seed: int, **tracked: Any) -> Run:
    preparing._state = preparing._State(new_group=lambda: group)
    train.init(seed=5, checkpoint_every_s=None, keep=9)
    torch.manual_seed(0)
    model = Residuals()
    model.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
    groups = [
        {"params": list(model.layers.parameters()), "weight_decay": 0.1},
        {"params": list(model.head.parameters()), "lr": 0.02},
    ]
    optimizer = OPTIMIZERS[name](groups)
    averages = Averages()
    loader = DataLoader(samples(), batch_size=12, shuffle=True)
    schedulers = schedulers_of(optimizer)
    model, optimizer, loader = train.prepare(
        *(model, optimizer, loader),
        **division,
        **{"scheduler": schedulers, "averages": averages, "odd": Odd(seed, group.rank), **tracked},
        of_each_rank=OfEachRank(seed + group.rank),
    )
    return Run(model, optimizer, loader, averages)


def whole_of(run: Run) -> Any:
    return saving.on_host(run.session.state())


def in_rank(rank: int, world_size: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    reporting._job_checkpoints = None


def _save(
    rank: int, world_size: int, division: Any, home: str, names: Sequence[str], seed: int
) -> None:
    in_rank(rank, world_size)
    for name in names:
        DividedGroup.home, DividedGroup.refs = Path(home, name), ()
        run = begin(name, DividedGroup(), division, seed)
        batches = iter(run.loader)
        for _ in range(2):
            run.step(batches)
        train.checkpoint()
        batch = next(batches)
        expected = whole_of(run)
        step(run.model, run.optimizer, batch)  # while the state is written
        run.session.checkpoints.close()
        if rank == 0:
            torch.save(expected, f"{home}/{name}/expected.pt")
        dist.barrier()


def _load(
    rank: int, world_size: int, division: Any, home: str, names: Sequence[str], seed: int
) -> None:
    in_rank(rank, world_size)
    for name in names:
        folder = Path(home, name)
        expected = torch.load(folder / "expected.pt", weights_only=False)
        DividedGroup.home, DividedGroup.refs = folder / f"later-{name}", (ref_of(folder),)
        run = begin(name, DividedGroup(), division, seed + 1)
        check(run, expected)


def _load_alone(rank: int, home: str, names: Sequence[str], seed: int) -> None:
    """Load in a process without a group, as a script that was started by itself."""
    dist.destroy_process_group()
    in_rank(rank, 1)
    for name in names:
        folder = Path(home, name)
        ref = ref_of(folder)
        os.environ["DRAY_RESUME_FROM"] = json.dumps([vars(ref)])
        reporting._job_checkpoints = None
        run = begin(name, AloneGroup(), {}, seed + 1)
        check(run, torch.load(folder / "expected.pt", weights_only=False))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def check(run: Run, expected: Any) -> None:
    found = whole_of(run)
    for key in expected:
        if key not in ("ops", "copied_before_step"):
            assert_equal(found[key], expected[key], key)
    assert_equal(run.optimizer.param_groups[0]["lr"], expected["groups"][0][0]["lr"])
    step(run.model, run.optimizer, next(iter(run.loader)))


def ref_of(folder: Path) -> CheckpointRef:
    (saved,) = checkpoint_files.committed(folder.as_uri())
    return CheckpointRef(saved.url, saved.step, saved.manifest_sha256)


def check_by_dcp(folder: Path) -> None:
    """Read the tensors of the models and optimizers with torch, which shares no code with dray."""
    state = torch.load(folder / "expected.pt", weights_only=False)
    expected = {f"models/0/{name}": one for name, one in state["models"][0].items()}
    for number, values in state["optimizers"][0]["state"].items():
        of_one = {key: one for key, one in values.items() if isinstance(one, Tensor)}
        expected |= {f"optimizers/0/state/{number}/{key}": one for key, one in of_one.items()}
    found = {name: torch.full_like(one, 7) for name, one in expected.items()}
    (step_folder,) = folder.glob("step-*")
    reader = dcp.HuggingFaceStorageReader(str(step_folder))
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert_equal(found, expected)


@pytest.mark.parametrize(
    ("source", "targets", "names"),
    [
        ("shard", ("tensor", "shard of 3", "alone"), ("adamw", "adagrad", "masters")),
        soak("shard x tensor", ("shard", "alone"), ("adam", "sgd")),
        *(soak(source, tuple(MESHES), tuple(OPTIMIZERS)) for source in list(MESHES)[1:]),
    ],
)
def test_every_division_loads_what_every_division_has_saved(
    tmp_path: Path, source: str, targets: Sequence[str], names: Sequence[str]
) -> None:
    world_size, division = MESHES[source]
    seed = len(source)
    for name in names:
        (tmp_path / name).mkdir()
    run_in_group(_save, world_size, world_size, division, str(tmp_path), names, seed)
    for name in names:
        check_by_dcp(tmp_path / name)
    for target in targets:
        world_size, division = MESHES[target]
        if target == "alone":
            run_in_group(_load_alone, 1, str(tmp_path), names, seed)
        else:
            run_in_group(_load, world_size, world_size, division, str(tmp_path), names, seed)


def _unfreeze(rank: int, home: str) -> None:
    """Train layers that are given to the optimizer in the second epoch, and resume after that."""
    in_rank(rank, 2)
    ends = []
    for name in ("whole", "resumed"):
        DividedGroup.home = Path(home, name)
        preparing._state = preparing._State(new_group=DividedGroup)
        train.init(seed=5, checkpoint_every_s=None)
        torch.manual_seed(0)
        model = Residuals()
        optimizer = optim.AdamW(model.layers[0].parameters(), lr=0.01)
        loader: Any = DataLoader(samples(), batch_size=12, shuffle=True)
        model, optimizer, loader = train.prepare(model, optimizer, loader, **SHARD)
        for epoch in train.epochs(2):
            if epoch == 1:
                optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.02})
            for batch in loader:
                model.zero_grad()
                step(model, optimizer, batch)
                if train.progress().step == 6 and name == "whole":
                    train.checkpoint()
        loader._session.checkpoints.close()
        ends.append(saving.on_host([loader._session.state()[key] for key in ENDS]))
        dist.barrier()
        DividedGroup.refs = (ref_of(Path(home, "whole")),)
    DividedGroup.refs = ()
    assert_equal(ends[1], ends[0])


ENDS = ("models", "optimizers", "groups", "position", "steps")


def test_groups_that_a_script_adds_later_are_restored(tmp_path: Path) -> None:
    run_in_group(_unfreeze, 2, str(tmp_path))


class Holding:
    """An object whose state can't be saved."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> Any:
        return {"inner": [self.held]}

    def load_state_dict(self, state: Any) -> None:
        pass


def _refuse(rank: int, home: str) -> None:
    in_rank(rank, 2)
    DividedGroup.home, DividedGroup.refs = Path(home), ()
    with pytest.raises(ValueError, match="tracked/hidden/inner/0 is a Fraction, which the check"):
        begin("sgd", DividedGroup(), SHARD, 1, hidden=Holding(Fraction(1)))
    held = Holding(1)
    run = begin("sgd", DividedGroup(), SHARD, 1, hidden=held)
    batches = iter(run.loader)
    run.step(batches)
    held.held = Fraction(1)
    next(batches)
    train.checkpoint()
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        run.step(batches)
        run.session.checkpoints.close()
    text = "tracked/hidden/inner/0 is a Fraction, which the checkpoints of divided models can't"
    assert (text in written.getvalue()) == (rank == 0), written.getvalue()
    assert checkpoint_files.committed(Path(home).as_uri()) == []


def test_a_value_that_cannot_be_saved_is_refused_by_prepare_and_named(tmp_path: Path) -> None:
    run_in_group(_refuse, 2, str(tmp_path))


def _read_older(rank: int, home: str) -> None:
    in_rank(rank, 2)
    DividedGroup.home, DividedGroup.refs = Path(home, "new"), ()
    first = begin("adamw", DividedGroup(), SHARD, 1)
    batches = iter(first.loader)
    first.step(batches)
    next(batches)
    expected = whole_of(first)
    older: list[Any] = [None]
    if rank == 0:
        folder = Path(home, "files")
        folder.mkdir()
        torch.save(expected, folder / saving.FILE)
        older = [commit(folder, Path(home, "old").as_uri(), 1, {})[0]]
    dist.broadcast_object_list(older)
    DividedGroup.refs = older
    check(begin("adamw", DividedGroup(), SHARD, 2), older_state(home))


def older_state(home: str) -> Any:
    return torch.load(Path(home, "files", saving.FILE), weights_only=False)


def test_a_checkpoint_of_an_older_version_is_read_by_all_ranks(tmp_path: Path) -> None:
    run_in_group(_read_older, 2, str(tmp_path))


WIDTH = 1024


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 8 * WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = sum(layer(x).mean() for layer in self.layers)  # type: ignore[assignment]
        return total


def wide(group: Any) -> Any:
    preparing._state = preparing._State(new_group=lambda: group)
    train.init(seed=5, checkpoint_every_s=None)
    model = Wide()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    data = DataLoader(TensorDataset(torch.ones(8, WIDTH)), batch_size=2)
    return train.prepare(model, optimizer, data, **SHARD)


def _stay_small(rank: int, home: str) -> None:
    in_rank(rank, 2)
    DividedGroup.home, DividedGroup.refs = Path(home), ()
    model, optimizer, loader = wide(DividedGroup())
    for number, (x,) in zip(range(5), loader, strict=False):
        if number < 3:  # then nothing accumulates gradients
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
        else:
            break
    session = loader._session
    gc.collect()
    state = session.own_state()
    share = sum(
        one.tensor.nbytes for one in leaves_of(part_of_rank(state, rank)) if one.tensor is not None
    )
    assert 100 * MIB < share < 170 * MIB, share
    with peak_of_own_memory() as peak:
        session.checkpoints.save(session.steps, state)
        session.checkpoints.wait()
    assert peak[0] < share + LIMIT, f"{peak[0] / MIB:.0f} MiB to save {share / MIB:.0f} MiB"
    dist.barrier()
    DividedGroup.refs = (ref_of(Path(home)),)
    DividedGroup.home = Path(home, "later")
    del state, session, loader, model, optimizer
    preparing._state = preparing._State()
    gc.collect()
    group = DividedGroup()
    fresh = begin_wide_only(group)
    gc.collect()
    with peak_of_own_memory() as peak:
        fresh()
    assert peak[0] < share * 2 // 3 + LIMIT, f"{peak[0] / MIB:.0f} MiB to load"


def begin_wide_only(group: Any) -> Callable[[], None]:
    """Divide a model as `prepare` does, and return a function that loads the checkpoint."""
    calls: list[Callable[[], None]] = []
    begin_session = DividedSession.begin

    def defer(self: DividedSession, load: Any) -> None:
        calls.append(lambda: begin_session(self, load))

    with mock.patch.object(DividedSession, "begin", defer):
        wide(group)
    return calls[0]


def test_a_rank_of_a_script_needs_memory_for_its_share_only(tmp_path: Path) -> None:
    run_in_group(_stay_small, 2, str(tmp_path))
