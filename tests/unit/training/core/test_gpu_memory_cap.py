"""The share of a GPU's memory that a process may use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dray.spec import JobSpec
from ray_workers.training.core import compat_torch, gpu_memory_cap
from ray_workers.training.process import rank_main
from tests.wire import rank_task

SHARED = {"gpus_per_worker": 0.25, "share_gpus": True}


def variables(**resources: Any) -> dict[str, str]:
    document = {"recipe": "image_classification", "resources": resources}
    return rank_main.environment(rank_task(), JobSpec.model_validate(document))


def test_a_rank_is_told_its_part() -> None:
    told = variables(**SHARED)
    assert told["DRAY_GPU_MEMORY_FRACTION"] == "0.25"
    assert told["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.25"
    for alone in ({}, {"gpus_per_worker": 1}):
        assert "DRAY_GPU_MEMORY_FRACTION" not in variables(**alone)


@pytest.mark.parametrize(
    ("version", "environ", "set_"),
    [
        ("2.13.0+cu130", {}, {"PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction:0.25"}),
        (
            "3.0",
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True,per_process_memory_fraction:0.25"},
        ),
        ("2.9.1", {}, {}),
        ("nightly", {}, {}),
        (None, {}, {}),
    ],
)
def test_another_torch_is_told_by_its_own_setting(
    version: str | None, environ: dict[str, str], set_: dict[str, str]
) -> None:
    assert gpu_memory_cap.for_torch(version, {**environ, **gpu_memory_cap.variables(0.25)}) == set_
    assert gpu_memory_cap.for_torch(version, environ) == {}, "its GPU is its own"


def test_a_recipe_is_capped_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []

    class Cuda:
        def set_device(self, index: int) -> None:
            calls.append(("device", index))

        def set_per_process_memory_fraction(self, share: float, index: int) -> None:
            calls.append(("cap", (share, index)))

    monkeypatch.setattr(rank_main, "module_of", lambda device: Cuda())
    monkeypatch.setattr(rank_main, "run", lambda *arguments: calls.append(("runs", None)))
    for resources in (SHARED, {"gpus_per_worker": 1}):
        document = {"recipe": "image_classification", "resources": resources}
        spec, task = JobSpec.model_validate(document), rank_task(device="cuda")
        rank_main.run_recipe(task, spec, None)  # type: ignore[arg-type]
    assert calls == [
        *(("device", 0), ("cap", (0.25, 0)), ("runs", None)),
        *(("device", 0), ("runs", None)),
    ]


def test_a_script_is_capped_when_it_first_uses_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[Any] = []
    capped: list[Any] = []
    monkeypatch.setattr(torch.cuda, "_lazy_call", queued.append)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *given: capped.append(given)
    )
    compat_torch.cap_memory_when_used(0.25)
    assert not capped
    (call,) = queued
    call()
    assert capped == [(0.25, 0)]
