"""The checks of a self-test find wrong values, and the probe runs them on a pretended device."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_workers.node.self_test import measures, probe
from ray_workers.node.self_test.measures import SMALL, Mismatch
from tests.fakes import pretend_gpu
from tests.fakes.pretend_nvml import NOT_SUPPORTED, PretendGpu, PretendNvml

CPU = torch.device("cpu")


class _Flip(torch.utils._python_dispatch.TorchDispatchMode):
    """Changes one bit of the nth result of an operator."""

    def __init__(self, operator: Any, number: int) -> None:
        super().__init__()
        self.operator, self.left = operator, number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is self.operator:
            self.left -= 1
            if self.left == 0:
                words = result.view(-1).view(torch.int8)
                words[words.numel() // 2] = int(words[words.numel() // 2]) ^ 1
        return result


def test_sound_devices_pass() -> None:
    first, seconds = measures.product(CPU, SMALL)
    assert measures.product(CPU, SMALL)[0] == first
    assert seconds > 0
    assert measures.memory(CPU, 8 << 20, SMALL) > 0
    assert min(measures.host_copies(CPU, SMALL)) > 0
    assert min(measures.peer_copies([CPU, CPU], SMALL)) > 0
    assert measures.all_reduce([CPU, CPU, CPU], SMALL, _sum) > 0


def _sum(parts: list[Tensor]) -> None:
    total = torch.stack(parts).sum(0)
    for part in parts:
        part.copy_(total)


@pytest.mark.parametrize("number", [2, 4, 6, 8])
def test_one_wrong_bit_in_one_product_is_found(number: int) -> None:
    with pytest.raises(Mismatch, match="matrix product"), _Flip(torch.ops.aten.mm.default, number):
        measures.product(CPU, SMALL)


@pytest.mark.parametrize("number", [1, 5, 16])
def test_one_wrong_bit_of_memory_is_found(number: int) -> None:
    flip = _Flip(torch.ops.aten.fill_.Scalar, number)
    with pytest.raises(Mismatch, match="1 words of memory"), flip:
        measures.memory(CPU, 8 << 20, SMALL)


def test_one_wrong_bit_of_a_copy_is_found() -> None:
    last = _Flip(torch.ops.aten.copy_.default, 2 * SMALL.num_copies)
    with pytest.raises(Mismatch, match="on the way"), last:
        measures.host_copies(CPU, SMALL)


def test_a_wrong_sum_is_found() -> None:
    def reduce(parts: list[Tensor]) -> None:
        _sum(parts)
        parts[1][-1] += 1

    with pytest.raises(Mismatch, match="wrong sum"):
        measures.all_reduce([CPU, CPU], SMALL, reduce)


def test_all_processors_are_tested_and_a_wrong_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    pinned: list[set[int]] = [{0, 1, 2}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: pinned[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: pinned.append(set(cores)))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)

    def product(*_: object) -> tuple[str, float]:
        (core,) = pinned[-1]
        seen.append(core)
        return ("odd" if core == 1 else "usual"), 0.1

    monkeypatch.setattr(measures, "product", product)
    with pytest.raises(Mismatch, match="processor 1: the matrix product differs"):
        measures.processors()
    assert seen == [0, 1, 2]
    assert pinned[-1] == {0, 1, 2}


def test_the_steps_run_on_a_pretended_device() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_on_pretended_device, args=(results,))
    process.start()
    answers = results.get(timeout=120)
    process.join()
    begun, product, memory, copies, unknown = answers
    assert begun == {"ok": {"alike": "pretend:0"}}
    assert product["ok"]["hash"] == measures.product(CPU, SMALL)[0]
    assert memory["ok"]["values"]["memory_bytes_per_s"] > 0
    assert copies["ok"]["values"]["to_device_bytes_per_s"] > 0
    assert "KeyError" in unknown["error"]


def _on_pretended_device(results: Any) -> None:
    pretend_gpu.install()
    requests = io.StringIO("begin\nproduct\nmemory\ncopies\nfly\n")
    answers = io.StringIO()
    probe.serve(probe.device_steps("pretend:0"), requests, answers)
    results.put([json.loads(line) for line in answers.getvalue().splitlines()])


def test_gpus_are_listed_with_what_keeps_them_from_a_test() -> None:
    well, divided, lost = PretendGpu("GPU-a"), PretendGpu("GPU-b"), PretendGpu("GPU-c")
    well.pids, divided.parts, lost.errors = [7], ["MIG-1"], {"nvmlDeviceGetUUID": 15}
    well.errors = {"nvmlDeviceGetMigMode": NOT_SUPPORTED}
    found = probe.list_gpus(PretendNvml(well, divided, lost))
    assert [(gpu["uuid"], gpu["pids"]) for gpu in found] == [
        ("GPU-a", [7]),
        ("GPU-b", []),
        ("index 2", []),
    ]
    assert "error" not in found[0]
    assert found[1]["error"] == "the GPU is divided (Multi-Instance GPU)"
    assert found[2]["error"].startswith("NVML:")
