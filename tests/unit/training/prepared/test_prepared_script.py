"""A prepared script in a single process, and in a group started by torchrun."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from dray import train
from dray.train import preparing
from dray.train.prepared.batches import BatchPlan
from dray.train.spool import segments
from tests.unit.training.ranks import run_in_group


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "_state", preparing._State())


def samples(size: int = 40) -> TensorDataset:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def prepared(
    *, batch_size: int = 10, lr: float = 0.1, **tracked: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    loader = DataLoader(samples(), batch_size=batch_size, shuffle=True)
    train.init(seed=5)
    return train.prepare(model, optimizer, loader, **tracked)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def test_alone_a_script_trains_as_without_dray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAY_SPOOL_DIR", str(tmp_path / "spool"))
    monkeypatch.setenv("DRAY_SPOOL_PID", str(os.getpid()))
    model, optimizer, loader = prepared()
    plan = BatchPlan(DataLoader(samples(), batch_size=10, shuffle=True), loader._session.seed)
    twin = network()
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    twin_scheduler = torch.optim.lr_scheduler.StepLR(twin_optimizer, 3)
    for epoch in train.epochs(2):
        for number, batch in enumerate(loader):
            for one, own, lr in (
                (model, optimizer, scheduler),
                (twin, twin_optimizer, twin_scheduler),
            ):
                data = batch
                if one is twin:
                    chosen = plan.share(epoch, number, 0, 1).indices
                    data = [
                        torch.stack(each)
                        for each in zip(*(samples()[i] for i in chosen), strict=True)
                    ]
                own.zero_grad()
                loss = loss_of(one, data)
                loss.backward()
                own.step()
                lr.step()
            train.report({"train/loss": loss})
    for mine, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert train.progress() == train.TrainingProgress(step=8, epoch=1, batch=4, total_steps=8)
    paths = [path for _, path in segments(tmp_path / "spool")]
    lines = [line for path in paths for line in path.read_text().splitlines()]
    bodies = [json.loads(line)["body"] for line in lines]
    told = [body for body in bodies if "values" in body]
    assert [body["step"] for body in told] == list(range(1, 9))


def test_under_torchrun_gradients_are_those_of_ddp_to_the_bit() -> None:
    run_in_group(_as_ddp, 2)


def _as_ddp(rank: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    model, optimizer, loader = prepared()
    twin = DistributedDataParallel(network())
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    assert len(loader) == 4
    for batch in loader:
        assert len(batch[0]) == 5
        for one, own in ((model, optimizer), (twin, twin_optimizer)):
            own.zero_grad()
            loss_of(one, batch).backward()
            nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            own.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_gradients_are_added_up_over_batches_and_scaled_as_alone() -> None:
    run_in_group(_adds_up, 2)


def _adds_up(rank: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, optimizer, loader = prepared(scaler=scaler, lr=0.05)
    model.eval()  # batch statistics would depend on the shares
    twin = network().eval()
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    plan = BatchPlan(DataLoader(samples(), batch_size=10, shuffle=True), loader._session.seed)
    for number, batch in enumerate(loader):
        if number % 2 == 0:
            optimizer.zero_grad()
            twin_optimizer.zero_grad()
            with train.no_sync():
                scaler.scale(loss_of(model, batch)).backward()
        else:
            scaler.scale(loss_of(model, batch)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        chosen = plan.share(0, number, 0, 1).indices
        whole = [torch.stack(each) for each in zip(*(samples()[i] for i in chosen), strict=True)]
        loss_of(twin, whole).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
            twin_optimizer.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert train.progress().step == 2


def test_a_parameter_without_a_part_in_the_step_gets_no_gradient() -> None:
    run_in_group(_unused, 2)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.some, self.never = (nn.Linear(4, 1) for _ in range(3))


def _unused(rank: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    torch.manual_seed(rank)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train.init()
    train.prepare(model, optimizer)
    x = torch.ones(2, 4)
    y = model.always(x) + (model.some(x) if rank == 0 else 0)
    y.sum().backward()
    assert model.never.weight.grad is None
    assert torch.equal(model.some.weight.grad, torch.ones(1, 4))
    assert torch.equal(model.always.weight.grad, torch.full((1, 4), 2.0))


def plan(size: int, **options: Any) -> BatchPlan:
    return BatchPlan(DataLoader(samples(size), **options), 7)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"shuffle": False, "drop_last": True},
        {"sampler": WeightedRandomSampler([1.0] * 20, 20)},
    ],
    ids=["shuffled", "in order", "own sampler"],
)
def test_the_shares_of_all_ranks_are_the_same_batches_at_any_size(
    options: dict[str, Any], world_size: int
) -> None:
    one, other = plan(20, batch_size=6, **options), plan(20, batch_size=6, **options)
    assert one.num_batches(0) == (3 if "drop_last" in options else 4)
    for epoch in (0, 1, 0):
        for batch in range(one.num_batches(epoch)):
            whole = one.share(epoch, batch, 0, 1)
            shares = [other.share(epoch, batch, rank, world_size) for rank in range(world_size)]
            counted = [i for share in shares if not share.is_empty for i in share.indices]
            assert counted == whole.indices
            assert sum(share.num_counted for share in shares) == whole.num_global
            assert all(share.indices for share in shares)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def _twice() -> None:
    train.init()
    train.init()


def _prepare(loader: Any = None, model: nn.Module | None = None, **tracked: Any) -> None:
    train.init()
    one = model or network()
    parameters = list(one.parameters()) or [torch.zeros(1, requires_grad=True)]
    train.prepare(one, torch.optim.SGD(parameters, lr=0.1), loader, **tracked)


WRONG = {
    "no init": (lambda: train.prepare(network(), None), "call train.init"),
    "no prepare": (lambda: train.progress(), "call train.prepare"),
    "init twice": (_twice, "called twice"),
    "endless data": (lambda: _prepare(DataLoader(Endless())), "IterableDataset"),
    "no batches": (lambda: _prepare(DataLoader(samples(), batch_size=None)), "a batch_size"),
    "no loader": (lambda: _prepare(samples()), "a torch DataLoader, in this order, but the third"),
    "nothing to train": (lambda: _prepare(model=nn.Tanh()), "without trainable parameters"),
    "no state": (lambda: _prepare(meter=3), "meter, which has no state_dict"),
    "no steps": (lambda: train.init(checkpoint_every_steps=0), "must be at least 1"),
    "no seconds": (lambda: train.init(checkpoint_every_s=float("nan")), "above 0"),
    "no values": (lambda: train.report(3), "needs the metrics"),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_says_what_to_do(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
        call()
