"""torch's private names exist and behave as dray expects; a failing test states the name that
changed."""

from __future__ import annotations

import ast
import importlib.util
import logging
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dray.train.prepared.compat_torch import StridedShard, when_backward_ends
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


def test_groups_are_aborted_without_waiting_for_their_operations() -> None:
    run_in_group(_aborts, 2)


def _aborts(rank: int) -> None:
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    compat_torch.abort_groups()
    assert not dist.is_initialized(), CHANGED
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


def test_ddp_leaves_excluded_parameters_alone() -> None:
    run_in_group(_excludes, 2)


def _excludes(rank: int) -> None:
    model = nn.Linear(1, 1)
    compat_torch.exclude_from_ddp(model, "bias")
    wrapped = DistributedDataParallel(model)
    wrapped(torch.full((1, 1), float(rank))).mul(rank).sum().backward()
    assert model.weight.grad is not None
    assert model.bias.grad is not None
    assert model.weight.grad.item() == 0.5, CHANGED
    assert model.bias.grad.item() == rank, CHANGED


def test_fsdp_cuts_what_the_tensor_axis_has_cut_in_strides() -> None:
    run_in_group(_cuts, 4)


def _cuts(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("held", "tensor"))
    layer = nn.Linear(4, 8)
    parallelize_module(layer, mesh["tensor"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["held"])
    assert isinstance(layer.weight, DTensor)
    over_shards, over_tensor = layer.weight.placements
    assert isinstance(over_shards, StridedShard), CHANGED
    assert isinstance(over_tensor, Shard), CHANGED
    assert not isinstance(over_tensor, StridedShard)


def test_what_torch_imports_late_is_there() -> None:
    for name in compat_torch.IMPORTED_LATE:
        assert importlib.util.find_spec(name) is not None, CHANGED


PACKAGES = ("api", "service", "ray_workers", "dray")


def test_a_call_for_the_end_of_a_backward_pass_comes_after_the_gradients() -> None:
    model = torch.nn.Linear(3, 1)
    seen: list[torch.Tensor] = []

    def hook(_: torch.Tensor) -> None:
        when_backward_ends(lambda: seen.append(torch.cat([p.grad.flatten() for p in parameters])))

    parameters = list(model.parameters())
    parameters[0].register_post_accumulate_grad_hook(hook)
    model(torch.ones(2, 3)).sum().backward()
    assert [each.tolist() for each in seen] == [[2.0, 2.0, 2.0, 2.0]], CHANGED


COMPAT = {"compat_torch.py", "compat_ray.py"}
PRIVATE = re.compile(r"\b(torch|ray)(\.\w+)*\._(?!_|foreach_)\w+")
"""Matches the path of a private name, except for `torch._foreach_*`, which is documented."""


def test_private_names_of_torch_and_ray_are_used_in_the_compat_modules_alone() -> None:
    root = Path(compat_torch.__file__).parents[3]
    files = [path for name in PACKAGES for path in (root / name).rglob("*.py")]
    assert len(files) > 300
    found = [
        f"{path.relative_to(root)}: {name}"
        for path in files
        if path.name not in COMPAT
        for name in private_names(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch._dynamo", ["torch._dynamo"]),
        ("from torch.distributed import _tools", ["torch.distributed._tools"]),
        ("import ray\nray._private.services.f()", ["ray._private"]),
        ("import torch.distributed as dist\ndist._a()", ["torch.distributed._a"]),
        ("from torch.nn import Linear\nLinear._version", ["torch.nn.Linear._version"]),
        ("name = 'torch.profiler._cupti_monitor'", ["torch.profiler._cupti_monitor"]),
        ("import torch\ntorch._foreach_add_\ntorch.__version__\nself._torch", []),
    ],
)
def test_a_private_name_is_found(source: str, expected: list[str]) -> None:
    assert private_names(source) == expected


def private_names(source: str) -> list[str]:
    """Return the private names of torch and Ray that a module imports, uses, or contains in a
    string."""
    if re.search(r"\b(torch|ray)\b", source) is None:
        return []
    tree = ast.parse(source)
    names: dict[str, str] = {}
    """The full name of each name that the module imports."""
    paths: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                paths.append(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                paths.append(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            paths.append(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            root, *rest = ast.unparse(node).split(".")
            paths.append(".".join((names.get(root, ""), *rest)))
    found = [match.group() for path in paths if (match := PRIVATE.search(path))]
    return list(dict.fromkeys(found))


def test_a_tensor_without_values_gets_its_operations() -> None:
    seen: list[bool] = []

    class Empty(torch.Tensor):
        @classmethod
        def __torch_dispatch__(  # type: ignore[override]  # torch's annotation lacks the class
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(compat_torch.changes_a_tensor(func))
            return args[0]

    made = compat_torch.tensor_without_values(Empty, [2, 3], torch.bfloat16)
    assert (made.shape, made.dtype, made.device.type) == ((2, 3), torch.bfloat16, "cpu")
    made.add_(1)
    made.add(1)
    assert seen == [True, False]


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
