"""Training on a simulated GPU, to find code that only works on a CPU.

Each job ends with weights that are bitwise equal to the weights on the CPU, because the same values
are computed through the code paths for GPUs.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from sklearn.datasets import load_diabetes, load_wine

import dray
from ray_workers.shared.contracts import LEFT_EXIT_CODE, Cause, RankTask
from ray_workers.supervision.rules.failure_attribution import RankExit, judge
from ray_workers.training.core.faultpoints import FaultPoint, arm
from tests.fakes import pretend_gpu, pretend_nccl
from tests.marks import ONE_SET, SOAK, soak, soak_but
from tests.unit.recipes.test_image_segmentation import NAMES, draw
from tests.unit.training.core import test_divergence
from tests.unit.training.jobs import (
    assert_same,
    keep_nothing_in_memory,
    series,
    wait_for_checkpoint,
    weights,
)
from tests.unit.training.parallel.test_local_sgd import ask_rank_0_to_leave
from tests.unit.training.ranks import checkpoint_refs, frames, run_in_group, run_ranks

GPUS = {"resources": {"gpus_per_worker": 1}}
COLOURS = ("red", "green", "blue")
SENTENCE = "the quick brown fox jumps over the lazy dog. "
CNN = {"recipe": "image_classification", "model": {"name": "cnn", "width": 4}}
MLP = {"recipe": "image_classification", "model": {"name": "mlp", "width": 16}}
WINE = {"recipe": "tabular_classification", "data": {"source": "sklearn://wine"}}
DIABETES = {"recipe": "tabular_regression", "data": {"source": "sklearn://diabetes"}}
GPT = {
    "recipe": "language_model",
    "model": {"num_layers": 2, "num_heads": 2, "width": 16, "context_length": 8, "dropout": 0.1},
    "data": {"source": "TEXT"},
}
UNET = {
    "recipe": "image_segmentation",
    "model": {"width": 4, "depth": 1},
    "data": {"source": "SHAPES", "classes": NAMES},
}
TABLE = {
    "recipe": "tabular_classification",
    "data": {"source": "TABLE", "format": "csv", "target": "kind"},
}
RESNET = {"recipe": "image_classification", "model": {"name": "resnet", "width": 4, "depth": 8}}


def job(
    base: Mapping[str, Any], rest: Mapping[str, Any] | None = None, **train: Any
) -> dict[str, Any]:
    optimizer = {"lr": 0.01, **train.pop("optimizer", {})}
    steps = {"max_steps": 4, "epochs": 99, "global_batch_size": 16, "optimizer": optimizer}
    return {**base, **(rest or {}), "train": steps | train, "checkpoint": {"every_steps": 2}}


JOBS = {
    "cnn": job(CNN, micro_batch_size=6, label_smoothing=0.1),
    "resnet": job(RESNET, optimizer={"name": "sgd", "momentum": 0.9}, recompute="full"),
    "unet": job(UNET, global_batch_size=4, ema={"decay": 0.5}),
    "classes": job(WINE, max_grad_norm=0.1, ema={"decay": 0.5}),
    "numbers": job(DIABETES, early_stopping={}, optimizer={"name": "adafactor"}),
    "gpt": job(GPT, recompute="selective", max_grad_norm=0.5),
    "gpt in bf16": job(GPT, precision="bf16"),
    "cnn in fp16": job(CNN, precision="fp16", max_grad_norm=0.1, optimizer={"name": "sgd"}),
    "unet in bf16": job(UNET, global_batch_size=4, precision="bf16"),
    "lars": job(MLP, optimizer={"name": "lars", "momentum": 0.9}),
    "lamb": job(MLP, optimizer={"name": "lamb"}),
    "offloaded": job(MLP, GPUS, optimizer={"offload": True}),
    "offloaded as bf16": job(MLP, GPUS, optimizer={"offload": True, "state_dtype": "bf16"}),
    "kept as bf16": job(MLP, optimizer={"state_dtype": "bf16"}),
    "exact": job(MLP, {"elastic": {"min_workers": 1, "exact": True}}),
    "topk": job(
        MLP,
        {"sync": {"compression": {"name": "topk", "ratio": 0.1}}},
        optimizer={"name": "sgd", "momentum": 0.9},
    ),
    "powersgd": job(MLP, {"sync": {"compression": {"name": "powersgd", "start_step": 2}}}),
    "half": job(MLP, {"sync": {"compression": {"name": "fp16"}}}),
    "local steps": job(MLP, {"sync": {"every": 2, "outer": {}}}),
    "balanced": job(MLP, {"parallel": {"balance": "auto"}}),
    "streamed": job(CNN, {"data": {"source": "sklearn://digits", "loader_workers": 1}}),
    "categories": job(TABLE, label_smoothing=0.1),
    "categories in bf16": job(TABLE, precision="bf16"),
    "numbers in fp16": job(DIABETES, precision="fp16", ema={"decay": 0.5}),
    "gpt in fp16": job(GPT, precision="fp16", max_grad_norm=0.5),
    "skipping": job(CNN, on_divergence="skip_step"),
    "profiled": job(MLP, {"profile": {"at_step": 2, "num_steps": 2}}),
}


SHORT = {"unet", "gpt", "numbers", "cnn in fp16", "offloaded", "categories in bf16"}
"""Cases for `make test`: each recipe, and each precision."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("sources")
    (home / "text.txt").write_text(SENTENCE * 20)
    rows = [f"{n % 7},{COLOURS[n % 3]},{'odd' if n % 2 else 'even'}" for n in range(60)]
    (home / "table.csv").write_text("\n".join(["size,colour,kind", *rows]))
    return {
        "TABLE": (home / "table.csv").as_uri(),
        "TEXT": (home / "text.txt").as_uri(),
        "SHAPES": draw(home / "shapes", 20, size=16),
    }


def with_data(document: dict[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
    data = document.get("data", {"source": "sklearn://digits"})
    return {**document, "data": {**data, "source": sources.get(data["source"], data["source"])}}


@ONE_SET
@pytest.mark.parametrize("name", soak_but(JOBS, short=SHORT))
def test_a_job_learns_what_it_learns_on_a_cpu(
    name: str, tmp_path: Path, sources: dict[str, str]
) -> None:
    document = with_data(JOBS[name], sources)
    here, there = tmp_path / "cpu", tmp_path / "pretend"
    assert run_ranks(here, document, world_size=1) == [0]
    before = streaming if name == "streamed" else pretend_gpu.install
    train = functools.partial(
        run_ranks, there, document, world_size=1, device=pretend_gpu.NAME, before=before
    )
    assert train() == [0]
    _assert_learnt_the_same(there, here, rel=ROUNDED.get(name, 0.0))
    if name in ASKED:
        run_in_group(_answers_are_the_cpus, 1, str(there / "attempt-1" / "artifacts"), name)
    if name == "topk":
        return  # a resumed run does not have the previously omitted gradients
    after_2 = [ref for ref in checkpoint_refs(there) if ref.step == 2]
    assert train(attempt=2, resume_from=after_2) == [0]
    assert min(series(there, "train/loss", attempt=2)) == 3
    assert_same(weights(there, attempt=2), weights(there))


def streaming(task: RankTask) -> None:
    pretend_gpu.install()
    keep_nothing_in_memory(task)


def _assert_learnt_the_same(there: Path, here: Path, *, rel: float = 0.0, but: str = "") -> None:
    """Assert that the series are bitwise equal, or within `rel` in bf16, in which autocast adds the
    gradients of a tied weight in a different order. but: a metric to ignore."""
    keys = [key for key in _told(here) if not key.startswith("perf/") and key != but]
    assert {"train/loss", "train/grad_norm", "val/loss"} < set(keys)
    for key in keys:
        assert series(there, key) == pytest.approx(series(here, key), rel=rel, abs=rel)
    if not rel:
        assert_same(weights(there), weights(here))


def _told(home: Path) -> list[str]:
    """Return the keys of all metrics."""
    told = frames(home, kind="metrics")
    return sorted({key for body in told for key in body["values"]})


ROUNDED = {"gpt in bf16": 0.02, "gpt in fp16": 0.02}
"""Jobs whose losses differ, with the relative difference."""
ASKED: dict[str, Any] = {
    "cnn": np.arange(3 * 64, dtype=np.uint8).reshape(3, 8, 8),
    "resnet": [np.full((8, 8), 0.5, dtype=np.float32)] * 300,
    "unet": np.arange(512, dtype=np.uint8).reshape(2, 16, 16),
    "classes": [dict.fromkeys(load_wine().feature_names, 1.0)],
    "categories": [{"size": 3, "colour": "red"}, {"size": 4, "colour": "blue"}],
    "numbers": [dict.fromkeys(load_diabetes().feature_names, 0.01)],
    "gpt": "the quick",
}
"""Inputs for checking a job's result, by the job's name."""


def _answers_are_the_cpus(rank: int, folder: str, name: str) -> None:
    pretend_gpu.install()
    asked = ASKED[name]
    on_cpu, on_gpu = dray.load(folder), dray.load(folder, device=pretend_gpu.NAME)
    assert {p.device.type for p in on_gpu.model.parameters()} == {pretend_gpu.NAME}
    assert {b.device.type for b in on_gpu.model.buffers()} <= {pretend_gpu.NAME}
    with pytest.raises(RuntimeError, match="same device"):
        on_gpu.model(on_cpu.form.tensor(asked) if name != "gpt" else torch.tensor([[1, 2]]))
    found, expected = on_gpu.predict(asked), on_cpu.predict(asked)
    if isinstance(expected, torch.Tensor):
        found, expected = found.tolist(), expected.tolist()
    assert found == expected
    if name != "numbers":
        chances = on_gpu.predict_proba(asked), on_cpu.predict_proba(asked)
        # The CPU's attention kernel, which is used only for inference, rounds differently.
        np.testing.assert_allclose(*chances, rtol=1e-5 if name == "gpt" else 0.0)


def test_a_job_begins_with_the_weights_that_another_device_left(tmp_path: Path) -> None:
    first, here, there = (tmp_path / name for name in ("first", "cpu", "pretend"))
    assert run_ranks(first, job(MLP), world_size=1) == [0]
    ref = checkpoint_refs(first)[0]
    document = job(MLP, {"init_from": {"job": "job-first"}}, ema={"decay": 0.5})
    run = functools.partial(run_ranks, world_size=1, init_from=ref)
    assert run(here, document) == [0]
    assert run(there, document, device=pretend_gpu.NAME, before=pretend_gpu.install) == [0]
    _assert_learnt_the_same(there, here)


@ONE_SET
@pytest.mark.parametrize("rule", ["skip_step", "fail"])
def test_what_is_not_finite_is_found_on_the_device(rule: str, tmp_path: Path) -> None:
    document = job(MLP, on_divergence=rule)
    code = 0 if rule == "skip_step" else 1
    here, there = tmp_path / "cpu", tmp_path / "pretend"
    assert run_ranks(here, document, world_size=1, before=spoil_step_4) == [code]
    run = functools.partial(run_ranks, world_size=1, device=pretend_gpu.NAME)
    assert run(there, document, before=spoil_step_4) == [code]
    for home in (here, there):
        assert [told["step"] for told in frames(home, kind="divergence")] == [4]
    if rule == "skip_step":
        assert_same(weights(there), weights(here))


def spoil_step_4(task: RankTask) -> None:
    if task.device == pretend_gpu.NAME:
        pretend_gpu.install()
    test_divergence._spoil(4, 5, task)


def test_who_is_asked_to_leave_the_device_leaves_what_it_has(tmp_path: Path) -> None:
    undisturbed, left = tmp_path / "undisturbed", tmp_path / "left"
    document = job(MLP)
    run = functools.partial(run_ranks, world_size=1, device=pretend_gpu.NAME)
    assert run(undisturbed, document, before=pretend_gpu.install) == [0]
    assert run(left, document, before=leave_at_step_3) == [LEFT_EXIT_CODE]
    refs = checkpoint_refs(left)
    assert refs[0].step == 3
    assert run(left, document, attempt=2, resume_from=refs, before=pretend_gpu.install) == [0]
    assert_same(weights(left, attempt=2), weights(undisturbed))


def leave_at_step_3(task: RankTask) -> None:
    pretend_gpu.install()
    ask_rank_0_to_leave(task, at_step=3, others_end_at=5)


TWO = {"resources": {"num_workers": 2}}
SHARED = {
    "replicated": job(MLP, TWO),
    "exact": job(MLP, {**TWO, "elastic": {"min_workers": 1, "exact": True}}),
    "zero 1": job(MLP, {**TWO, "parallel": {"shard": 2, "zero": 1}}),
    "local steps": job(MLP, {**TWO, "sync": {"every": 2, "outer": {}}}),
    "d_psgd": job(MLP, {**TWO, "sync": {"kind": "gossip"}}),
    "sgp": job(MLP, {**TWO, "sync": {"kind": "gossip", "mode": "sgp", "graph": "exponential"}}),
    "gossip of all": job(MLP, {**TWO, "sync": {"kind": "gossip", "graph": "complete"}}),
    "topk": job(MLP, {**TWO, "sync": {"compression": {"name": "topk", "ratio": 0.1}}}),
    "powersgd": job(MLP, {**TWO, "sync": {"compression": {"name": "powersgd", "start_step": 2}}}),
    "half": job(MLP, {**TWO, "sync": {"compression": {"name": "fp16"}}}),
    "balanced": job(MLP, {**TWO, "parallel": {"balance": "auto"}}),
    "scaled": job(CNN, TWO, precision="fp16", max_grad_norm=0.1, ema={"decay": 0.5}),
    "one sample": job(
        WINE,
        {**TWO, "data": {"source": "sklearn://wine", "validation_fraction": 0.02}},
        micro_batch_size=1,
        early_stopping={},
    ),
    "masks": job(UNET, TWO, global_batch_size=4),
    "shard": job(MLP, {**TWO, "parallel": {"shard": 2}}, max_grad_norm=0.1),
    "zero 2": job(UNET, {**TWO, "parallel": {"shard": 2, "zero": 2}}, global_batch_size=4),
    "context": job(GPT, {**TWO, "parallel": {"context": 2}}),
    "pipeline": job(GPT, {**TWO, "parallel": {"pipeline": 2}}, micro_batch_size=4),
    "tensor": job(GPT, {**TWO, "parallel": {"tensor": 2}}),
}


@ONE_SET
@pytest.mark.parametrize("name", soak_but(SHARED, short=["replicated", "shard"]))
def test_two_ranks_learn_by_the_rules_of_nccl_what_they_learn_by_gloo(
    name: str, tmp_path: Path, sources: dict[str, str]
) -> None:
    document = with_data(SHARED[name], sources)
    here, there = tmp_path / "cpu", tmp_path / "pretend"
    assert run_ranks(here, document, world_size=2) == [0, 0]
    assert run_pretended(there, document) == [0, 0]
    # The kernel counts bytes sent by gloo, but not by NCCL.
    _assert_learnt_the_same(there, here, but="sync/sent_bytes")
    if name in (
        "zero 1",
        "local steps",
        "d_psgd",
        "sgp",
        "pipeline",
        "shard",
    ):  # its checkpoint is gathered from both
        after_2 = [ref for ref in checkpoint_refs(there) if ref.step == 2]
        assert run_pretended(there, document, attempt=2, resume_from=after_2) == [0, 0]
        assert_same(weights(there, attempt=2), weights(here))


def served(mode: str) -> dict[str, Any]:
    """Return a job with two workers on GPUs and a server."""
    sync = {"kind": "parameter_server", "mode": mode, "server_resources": {"cpus": 1}}
    resources = {"num_workers": 3, "gpus_per_worker": 1}
    return job(RESNET, {"sync": sync, "resources": resources}, optimizer={"name": "sgd"})


@SOAK
@pytest.mark.parametrize("mode", ["synchronous", soak("asynchronous")])
def test_workers_on_gpus_learn_from_servers_without_one_what_they_learn_on_a_cpu(
    mode: str, tmp_path: Path
) -> None:
    document = served(mode)
    here, there = tmp_path / "cpu", tmp_path / "pretend"
    assert run_ranks(here, document, world_size=3) == [0] * 3
    train = functools.partial(run_ranks, there, document, world_size=3, device=pretend_gpu.NAME)
    assert train(before=pretend_gpu.install) == [0] * 3
    if mode == "synchronous":
        # Pulls can be counted in the step that they follow, or in the next one.
        _assert_learnt_the_same(there, here, but="sync/sent_bytes")
        after_2 = [ref for ref in checkpoint_refs(there) if ref.step == 2]
        again = train(attempt=2, resume_from=after_2, before=pretend_gpu.install)
        assert again == [0] * 3
        assert_same(weights(there, attempt=2), weights(here))


def run_pretended(
    home: Path,
    document: dict[str, Any],
    before: Callable[[RankTask], None] = pretend_nccl.install,
    **more: Any,
) -> list[int | None]:
    return run_ranks(home, document, world_size=2, device=pretend_gpu.NAME, before=before, **more)


@pytest.mark.parametrize("name", ["shard", soak("tensor"), soak("pipeline"), soak("context")])
def test_a_rank_that_is_lost_ends_the_group_and_leaves_nothing_that_was_not_computed(
    name: str, tmp_path: Path, sources: dict[str, str]
) -> None:
    """NCCL reports nothing: the device of the other rank is blocked until NCCL's watchdog aborts
    it."""
    document = with_data(SHARED[name], sources)
    document["checkpoint"] = document.get("checkpoint", {}) | {"in_memory": "off"}
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    assert run_pretended(undisturbed, document) == [0, 0]
    codes = run_pretended(disturbed, document, before=lose_rank_1)
    assert codes == [-signal.SIGABRT, -signal.SIGKILL]
    ended = [RankExit.of(rank, code) for rank, code in enumerate(codes)]
    assert judge(ended, {}, under_nccl=True).cause is Cause.WORKER_LOST
    refs = checkpoint_refs(disturbed)
    assert [ref.step for ref in refs] == [2]
    told, right = series(disturbed, "train/loss"), series(undisturbed, "train/loss")
    assert told == {step: right[step] for step in told}
    assert run_pretended(disturbed, document, attempt=2, resume_from=refs) == [0, 0]
    assert_same(weights(disturbed, attempt=2), weights(undisturbed))


def lose_rank_1(task: RankTask) -> None:
    """Both ranks write the checkpoint of step 2, so wait for it first."""
    pretend_nccl.install()
    arm(FaultPoint.STEP_BEGINS, lambda: wait_for_checkpoint(replace(task, rank=0), 2), at_step=3)
    if task.rank == 1:
        arm(FaultPoint.STEP_BEGINS, lambda: os.kill(os.getpid(), signal.SIGKILL), at_step=3)


def test_the_pretended_gpu_is_as_strict_as_a_real_one() -> None:
    run_in_group(_device_rules, 1)


def _device_rules(rank: int) -> None:
    pretend_gpu.install()
    device = torch.device(pretend_gpu.NAME)
    ours, others = torch.ones(3, device=device), torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        ours + others
    with pytest.raises(RuntimeError, match="same device"):
        torch.stack([ours.sum(), others.sum()])
    assert (ours * torch.tensor(2.0)).tolist() == [2.0, 2.0, 2.0]

    beside = torch.pretend.Stream(device)  # type: ignore[attr-defined]
    with torch.pretend.stream(beside):  # type: ignore[attr-defined]
        others.copy_(ours.add_(1), non_blocking=True)
        behind = torch.pretend.Event()  # type: ignore[attr-defined]
        behind.record(beside)
    ours.add_(1)  # without keeping it until it has been copied
    assert others.tolist() == [1.0, 1.0, 1.0]
    behind.synchronize()
    assert others.tolist() == [3.0, 3.0, 3.0]


def test_the_process_group_keeps_the_rules_of_nccl() -> None:
    run_in_group(_nccl_rules, 2)


def _nccl_rules(rank: int) -> None:
    pretend_nccl.install()
    group = dist.new_group(backend=pretend_nccl.NAME)
    tensor = torch.full((3,), rank + 1.0, device=pretend_gpu.NAME)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [3.0, 3.0, 3.0]
    with pytest.raises(RuntimeError, match="recvAnysource"):
        dist.recv(tensor, group=group)
    with pytest.raises(RuntimeError, match="device type cpu"):
        dist.all_reduce(torch.ones(3), group=group)
    if rank == 0:  # the other rank never joins
        waiting = threading.Thread(target=dist.all_reduce, args=(tensor,), kwargs={"group": group})
        waiting.start()
        group.abort()
        waiting.join(60.0)
        assert not waiting.is_alive()
    else:
        group.abort()
    for operation in (dist.all_reduce, _all_reduce_functional):
        with pytest.raises(dist.DistBackendError):
            operation(tensor, group=group)


def _all_reduce_functional(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange tensors in the same way as DTensors."""
    return funcol.all_reduce(tensor, "sum", group)
