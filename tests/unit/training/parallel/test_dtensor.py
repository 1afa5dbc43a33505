"""The positions of the parts of a tensor that is divided along one dimension by two axes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from dray.train.prepared.dtensor import Cut, box_of, cuts_of, local, part_of
from tests.marks import SOAK
from tests.unit.training.ranks import run_in_group

SHARD, TENSOR = 4, 2
UNEVEN = 17
"""Number of rows, not divisible by either axis: FSDP assigns no rows to the last rank of one
half."""


@pytest.mark.parametrize("length", range(1, 20))
@pytest.mark.parametrize("parts", range(1, 6))
def test_a_cut_is_torchs(length: int, parts: int) -> None:
    cut = Cut(axis=0, dim=0, parts=parts, number=0)
    found = [torch.arange(length)[slice(*cut.bounds(length, number))] for number in range(parts)]
    expected = torch.arange(length).chunk(parts)
    assert [each.tolist() for each in found if len(each)] == [each.tolist() for each in expected]


def _cut_twice(rank: int) -> None:
    mesh = init_device_mesh("cpu", (SHARD, TENSOR), mesh_dim_names=("shard", "tensor"))
    model = torch.nn.Sequential(torch.nn.Linear(UNEVEN, UNEVEN), torch.nn.Linear(UNEVEN, UNEVEN))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["shard"])
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        whole = torch.randn(parameter.shape, generator=generator)
        part = part_of(whole, parameter)
        assert local(part).shape == local(parameter).shape, name
        assert part.placements == parameter.placements, name
        found = torch.zeros_like(whole)
        target = found
        assert isinstance(part, DTensor)
        for dim, (start, length) in enumerate(zip(*box_of(part), strict=True)):
            target = target.narrow(dim, start, length)
        target.copy_(local(part))
        dist.all_reduce(found)
        num_holders = dist.get_world_size() // math.prod(c.parts for c in cuts_of(part))
        assert torch.equal(found, whole * num_holders), name


@SOAK
def test_fsdp_over_tensor_parts_that_are_not_even() -> None:
    """Each rank takes the part assigned by FSDP, and together they have the whole tensor."""
    run_in_group(_cut_twice, SHARD * TENSOR)
