"""torch's private names are there and do what dray takes them for; else dray is to be mended."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ray_workers.training.core import compat_torch
from tests.unit.training.ranks import run_in_group

CHANGED = f"torch {torch.__version__} has changed a private name: see compat_torch.py"


def test_groups_are_listed_limited_and_counted() -> None:
    run_in_group(_groups, 2)


def _groups(rank: int) -> None:
    second = dist.new_group()
    assert set(compat_torch.groups()) == {dist.group.WORLD, second}, CHANGED
    for group in compat_torch.groups():
        compat_torch.set_timeout(group, timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.barrier(second)
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    compat_torch.count_groups_from_zero()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2)
    name = dist.distributed_c10d._world.pg_names[dist.group.WORLD]
    assert name == "0", CHANGED


def test_tensors_are_broadcast_and_parts_exchanged_with_their_gradient() -> None:
    run_in_group(_exchanges, 2)


def _exchanges(rank: int) -> None:
    tensors = [torch.full((3,), float(rank)), torch.full((2, 2), 5.0 + rank)]
    compat_torch.broadcast_from_rank_0(tensors, 8)
    assert [tensor.max().item() for tensor in tensors] == [0.0, 5.0], CHANGED
    mine = torch.arange(4.0).add(10 * rank).requires_grad_()
    assert dist.group.WORLD is not None
    received = compat_torch.exchange_parts(mine, dist.group.WORLD)
    assert received.tolist() == [2 * rank, 2 * rank + 1, 10 + 2 * rank, 11 + 2 * rank], CHANGED
    (received * (1 + rank)).sum().backward()
    assert mine.grad is not None
    assert mine.grad.tolist() == [1.0, 1.0, 2.0, 2.0], CHANGED


def test_an_unhooked_module_exchanges_nothing() -> None:
    run_in_group(_unhooks, 2)


def _unhooks(rank: int) -> None:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    wrapped = DistributedDataParallel(layer)
    wrapped(torch.ones(1, 1)).sum().backward()
    compat_torch.unhook(wrapped)
    layer.weight.grad = None
    layer(torch.full((1, 1), float(rank))).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.item() == rank, CHANGED


def test_a_gathered_state_can_be_let_go_of() -> None:
    run_in_group(_gathers, 2)


def _gathers(rank: int) -> None:
    layer = nn.Linear(2, 2)
    optimizer = ZeroRedundancyOptimizer(layer.parameters(), torch.optim.AdamW)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        optimizer.state_dict()
        compat_torch.forget_gathered_state(optimizer)
        with pytest.raises(RuntimeError, match="consolidate"):
            optimizer.state_dict()


@pytest.mark.parametrize("overflowed", [0.0, 1.0])
def test_the_scaler_is_told_of_an_overflow(overflowed: float) -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    compat_torch.report_overflow(scaler, optimizer, torch.tensor(overflowed))
    scaler.update()
    assert scaler.get_scale() == (4.0 if overflowed else 16.0), CHANGED


def test_an_operation_has_a_name() -> None:
    assert compat_torch.name_of(torch.ops.aten.mm.default) == "aten::mm", CHANGED
    assert compat_torch.name_of(torch.mm) is None


def test_parameters_are_replaced_and_put_back() -> None:
    layer = nn.Linear(2, 2, bias=False)
    weight, other = layer.weight, nn.Parameter(torch.zeros(2, 2))
    had = compat_torch.replace_parameters(layer, {"weight": other})
    assert layer.weight is other, CHANGED
    compat_torch.replace_parameters(layer, had)
    assert layer.weight is weight
    assert layer.bias is None


def test_the_logger_of_the_exporter_is_the_one_that_advises() -> None:
    pytest.importorskip("onnxscript")
    import torch.onnx  # noqa: F401
    from torch.onnx._internal.exporter import _registration

    assert _registration.logger is logging.getLogger(compat_torch.ONNX_REGISTRATION_LOGGER), CHANGED
