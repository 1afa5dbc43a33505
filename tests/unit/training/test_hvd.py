"""Horovod's API on top of torch.distributed: two ranks get the same results as a single process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dray.train import hvd
from tests.unit.training.ranks import run_in_group


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hvd, "_is_initialized", False)


@pytest.mark.usefixtures("alone")
def test_a_process_without_peers_is_rank_0_of_1() -> None:
    with pytest.raises(ValueError, match=r"call hvd\.init\(\) first"):
        hvd.rank()
    hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
    assert hvd.is_initialized()
    tensor = torch.tensor([1.0, 2.0])
    for found in (hvd.allreduce(tensor), hvd.allgather(tensor), hvd.broadcast(tensor, 0)):
        assert torch.equal(found, tensor)
        assert found is not tensor
    model, plain = _model(0), _model(0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    _learn(model, optimizer, _batch(0))
    _learn(plain, torch.optim.SGD(plain.parameters(), lr=0.1), _batch(0))
    assert _same(model, plain)
    hvd.shutdown()
    assert not hvd.is_initialized()


def test_two_ranks_agree() -> None:
    run_in_group(_calls, 2)


def _calls(rank: int) -> None:
    os.environ.update(_of_rank(rank))
    hvd.init()
    _calls_of_an_optimizer(rank)
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (rank, 2, rank, 2)
    own = torch.tensor([1.0, 2.0]) * (rank + 1)
    assert hvd.allreduce(own).tolist() == [1.5, 3.0]
    assert hvd.allreduce(own, average=False).tolist() == [3.0, 6.0]
    assert hvd.allreduce(own, op=hvd.Max).tolist() == [2.0, 4.0]
    assert hvd.allreduce(torch.tensor([-1, 2])).tolist() == [-1, 2]
    assert hvd.allreduce(torch.tensor([-rank, 3 * rank])).tolist() == [0, 1]
    assert own.tolist() == [rank + 1.0, 2.0 * (rank + 1)], "a copy is reduced"
    turned = torch.arange(6.0).reshape(2, 3).t()
    hvd.allreduce_(turned, op=hvd.Sum)
    assert torch.equal(turned, 2 * torch.arange(6.0).reshape(2, 3).t())
    gathered = hvd.allgather(torch.full((rank + 1, 2), float(rank)))
    assert gathered.tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    assert hvd.broadcast(own, root_rank=1).tolist() == [2.0, 4.0]
    assert hvd.broadcast_object({"epoch": rank}, root_rank=1) == {"epoch": 1}
    assert hvd.allgather_object(rank) == [0, 1]

    state = hvd.elastic.TorchState(model=_model(rank), epoch=10 * rank)
    called: list[int] = []
    state.register_reset_callbacks([lambda: called.append(rank)])
    assert _train(state, 3) == (0, 3)
    assert _same(state.model, _model(0))
    assert called == [], "there was no earlier attempt"


@hvd.elastic.run
def _train(state: Any, steps: int) -> tuple[int, int]:
    state.commit()  # has no effect outside dray
    return state.epoch, steps


def _calls_of_an_optimizer(rank: int) -> None:
    """Check that two ranks with half of a batch each get the same result as one process with the
    whole batch."""
    model, plain = _model(rank), _model(0)
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert _same(model, plain)
    inner = torch.optim.Adam(model.parameters(), lr=0.01 if rank == 0 else 0.5)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert isinstance(optimizer, torch.optim.Adam)
    for step in range(3):
        halves = _batch(2 * step), _batch(2 * step + 1)
        _learn(model, optimizer, halves[rank])
        whole = tuple(torch.cat(parts) for parts in zip(*halves, strict=True))
        _learn(plain, plain_optimizer, whole)
        assert _same(model, plain), step

    # A parameter on only one rank, gradients that are clipped after the exchange, and a closure.
    model.zero_grad()
    if rank == 0:
        model[0].weight.sum().backward()
    optimizer.synchronize()
    assert torch.equal(model[0].weight.grad, torch.full_like(model[0].weight, 0.5))
    assert model[0].bias.grad.abs().max() == 0
    with optimizer.skip_synchronize():
        model[0].weight.grad.fill_(float(rank))
        optimizer.step()
    assert torch.equal(model[0].weight.grad, torch.full_like(model[0].weight, float(rank)))

    weight = nn.Parameter(torch.zeros(3))
    stepping = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)

    def closure() -> Any:
        stepping.zero_grad()
        loss = (rank + 1) * weight.sum()
        loss.backward()
        return loss

    stepping.step(closure)
    assert weight.tolist() == [-3.0] * 3
    half = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), compression=hvd.Compression.fp16
    )
    weight.grad = torch.full((3,), 1.0 + 1e-5)
    half.step()
    assert weight.tolist() == [-4.0] * 3


def test_a_job_goes_on_from_the_newest_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    from dray.train.checkpoints import Checkpoint
    from dray.train.reporting import Context

    saved: list[tuple[int, bytes]] = []
    context = Context("job-1", 1, 0, 1, 0, None, None, None)

    def save(folder: str, step: int) -> None:
        saved.append((step, (Path(folder) / hvd.COMMIT_FILE).read_bytes()))

    monkeypatch.setattr(hvd, "context", lambda: context)
    monkeypatch.setattr(hvd, "save_checkpoint", save)
    monkeypatch.setattr(hvd, "load_checkpoint", lambda: None)
    state = hvd.elastic.TorchState(model=_model(3), epoch=7)
    assert _train(state, 1) == (7, 1)
    state.epoch = 8
    state.commit()
    assert [step for step, _ in saved] == [1, 2]

    (tmp_path / hvd.COMMIT_FILE).write_bytes(saved[-1][1])
    monkeypatch.setattr(hvd, "load_checkpoint", lambda: Checkpoint(2, tmp_path))
    again = hvd.elastic.TorchState(model=_model(4), epoch=0)
    called: list[int] = []
    again.register_reset_callbacks([lambda: called.append(1)])
    assert _train(again, 1) == (8, 1)
    assert _same(again.model, _model(3))
    assert called == [1]
    assert saved[-1][0] == 3, "the numbers of commits go on"


def _of_rank(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"} | {
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
    }


def _model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3))


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=source), torch.randn(8, 3, generator=source)


def _learn(model: nn.Module, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    inputs, targets = batch
    ((model(inputs) - targets) ** 2).mean().backward()
    optimizer.step()


def _same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)
