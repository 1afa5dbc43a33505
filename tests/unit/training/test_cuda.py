"""The training loop on a GPU, if there is one.

Needs neither Ray nor a database: with only torch installed, it can be run with `pytest
--noconftest`.

Several ranks share one GPU here, which NCCL does not support, so gloo is used instead.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import statistics
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dray.train.prepared.copies import digest
from ray_workers.node.self_test import measures
from ray_workers.node.self_test.runner import SelfTests
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.self_tests import DeviceOutcome, NodeTest, TestPhase
from ray_workers.training.checkpoint.safetensors_layout import read_tensors, restore
from ray_workers.training.checkpoint.staging import Stager, hold_for
from ray_workers.training.core.device_faults import ASSERT, as_lost, has_fault
from ray_workers.training.core.faultpoints import FaultPoint, arm
from ray_workers.training.elastic import process_group
from tests.unit.training import test_pretend_gpu as jobs
from tests.unit.training.elastic import test_recovery
from tests.unit.training.elastic.test_recovery import Fault, small
from tests.unit.training.jobs import (
    assert_same,
    keep_nothing_in_memory,
    see_no_gpu,
    series,
    weights,
)
from tests.unit.training.prepared.programs import final_state
from tests.unit.training.ranks import (
    checkpoint_refs,
    frames,
    replaced,
    run_in_group,
    run_ranks,
)
from tests.unit.training.test_pretend_gpu import sources  # noqa: F401

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SPEC: dict[str, Any] = {
    "recipe": "image_classification",
    "train": {"epochs": 3, "global_batch_size": 64, "optimizer": {"lr": 3e-3}},
}


def test_every_step_is_reported_though_figures_are_read_a_step_late(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, SPEC, world_size=1, device="cuda") == [0]
    told = [m for m in frames(tmp_path, kind="metrics") if "train/loss" in m["values"]]
    assert [m["step"] for m in told] == list(range(1, 70))
    assert told[-1]["values"]["train/loss"] < told[0]["values"]["train/loss"] / 2


def test_a_step_is_told_to_take_as_long_as_the_gpu_takes(tmp_path: Path) -> None:
    """This includes the first step after an evaluation, which the GPU has not started when the step
    is launched. The CPU does not wait for the GPU before it requests the next batch."""
    assert run_ranks(tmp_path, SPEC, world_size=1, device="cuda", before=_keep_busy) == [0]
    told = [m["values"] for m in frames(tmp_path, kind="metrics") if "train/loss" in m["values"]]
    assert min(values["perf/step_time_s"] for values in told) > BUSY_S
    assert statistics.median(values["perf/data_wait_s"] for values in told) < BUSY_S / 2


BUSY_S = 0.05
CYCLES = 150_000_000
"""Number of cycles that take more than `BUSY_S` seconds, at up to 3 GHz."""


def _keep_busy(task: RankTask) -> None:
    """Make the GPU wait for a while at the beginning of each step."""
    arm(FaultPoint.STEP_BEGINS, lambda: torch.cuda._sleep(CYCLES))


def test_a_snapshot_is_the_state_as_it_was_though_the_gpu_goes_on() -> None:
    weights = torch.zeros(50_000_000, device="cuda")
    buffer, on_host = torch.zeros(3, device="cuda"), torch.zeros(())
    camera = Stager()
    for number in range(3):
        state = {"w": weights, "b": buffer, "step": on_host}
        snapshot = camera.take(state, [buffer])
        buffer += 1
        hold_for(snapshot)
        weights += 1
        on_host += 1
        snapshot.wait()
        tensors = read_tensors(bytes(snapshot.data[: snapshot.num_bytes]))
        found = restore(json.loads(json.dumps(snapshot.tree)), tensors)
        assert all(torch.all(tensor == number) for tensor in found.values())


def test_a_snapshot_outlives_what_it_was_taken_of() -> None:
    """The memory of a state that was created only for the snapshot is reused for the next
    computation."""
    camera, size = Stager(), 50_000_000
    for number in range(3):
        snapshot = camera.take({"w": torch.full((size,), float(number), device="cuda")})
        others = [torch.full((size,), -1.0, device="cuda") for _ in range(4)]
        snapshot.wait()
        tensors = read_tensors(bytes(snapshot.data[: snapshot.num_bytes]))
        found = restore(json.loads(json.dumps(snapshot.tree)), tensors)
        assert torch.all(found["w"] == number)
        assert all(other[0] == -1.0 for other in others)


def test_offloaded_optimizer_state_frees_memory_and_changes_nothing(tmp_path: Path) -> None:
    model = {"name": "mlp", "width": 4096, "num_layers": 4}
    peaks = {}
    for offload in (False, True):
        home = tmp_path / str(offload)
        optimizer = {"name": "adamw", "lr": 1e-3, "offload": offload}
        train = {**SPEC["train"], "epochs": 1, "optimizer": optimizer}
        job = {**SPEC, "model": model, "train": train, "resources": {"gpus_per_worker": 1}}
        report = functools.partial(_report_memory, str(home))
        assert run_ranks(home, job, world_size=1, device="cuda", before=report) == [0]
        peaks[offload] = int((home / "held").read_text())
    assert_same(weights(tmp_path / "False"), weights(tmp_path / "True"))
    state_bytes = 2 * 4 * sum(tensor.numel() for tensor in weights(tmp_path / "True").values())
    assert peaks[False] - peaks[True] > 0.8 * state_bytes


def _report_memory(home: str, task: RankTask) -> None:
    """Record the allocated GPU memory between two steps."""
    path = Path(home, "held")
    arm(
        FaultPoint.STEP_BEGINS,
        lambda: path.write_text(str(torch.cuda.memory_allocated())),
    )


ROUNDED = {"fp32": 0.01, "fp16": 0.03, "bf16": 0.05}
"""Tolerance for a loss by the precision of the job, because a GPU adds in a different order, and
its convolutions round their inputs to TF32."""


@pytest.mark.parametrize("name", jobs.JOBS)
def test_a_job_learns_on_a_gpu_what_it_learns_on_a_cpu(
    name: str,
    tmp_path: Path,
    sources: dict[str, str],  # noqa: F811
) -> None:
    document = jobs.with_data(jobs.JOBS[name], sources)
    here, there = tmp_path / "cpu", tmp_path / "gpu"
    assert run_ranks(here, document, world_size=1, before=see_no_gpu) == [0]
    before = keep_nothing_in_memory if name == "streamed" else None
    train = functools.partial(
        run_ranks, there, document, world_size=1, device="cuda", before=before
    )
    assert train() == [0]
    _assert_learnt_the_same(there, here, document)
    after_2 = [ref for ref in checkpoint_refs(there) if ref.step == 2]
    assert train(attempt=2, resume_from=after_2) == [0]
    assert min(series(there, "train/loss", attempt=2)) == 3


BY_GLOO = (
    *("replicated", "exact", "zero 1", "topk", "powersgd", "half", "balanced"),
    *("scaled", "one sample", "masks"),
)
"""Jobs that only use operations that gloo supports for GPU tensors: reduce, gather, and broadcast.
It can't send them, or average them without a copy."""


@pytest.mark.parametrize("name", BY_GLOO)
def test_two_ranks_on_a_gpu_learn_what_they_learn_on_a_cpu(
    name: str,
    tmp_path: Path,
    sources: dict[str, str],  # noqa: F811
) -> None:
    document = jobs.with_data(jobs.SHARED[name], sources)
    here, there = tmp_path / "cpu", tmp_path / "gpu"
    assert run_ranks(here, document, world_size=2, before=see_no_gpu) == [0, 0]
    codes = run_ranks(there, document, world_size=2, device="cuda", before=_meet_by_gloo)
    assert codes == [0, 0]
    _assert_learnt_the_same(there, here, document)


def test_workers_of_a_parameter_server_learn_on_a_gpu_what_they_learn_on_a_cpu(
    tmp_path: Path,
) -> None:
    document = jobs.served("synchronous")
    here, there = tmp_path / "cpu", tmp_path / "gpu"
    assert run_ranks(here, document, world_size=3, before=see_no_gpu) == [0] * 3
    assert run_ranks(there, document, world_size=3, device="cuda") == [0] * 3
    _assert_learnt_the_same(there, here, document)


ACTOR_AND_CRITIC = """
    import os
    import torch
    from torch import nn
    from dray import train

    def die(*point):
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and point in {kills!r}:
            os.kill(os.getpid(), 9)

    train.init(seed=1, checkpoint_every_s=None)
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    actor = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 2)).cuda()
    critic = nn.Sequential(nn.Linear(2, 32), nn.Dropout(0.1), nn.Linear(32, 1)).cuda()
    own = torch.optim.AdamW(actor.parameters(), lr=1e-2, fused={fused})
    judges = torch.optim.SGD(critic.parameters(), lr=1e-2, momentum=0.9)
    data = torch.utils.data.TensorDataset(torch.randn(50, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=10, shuffle=True, pin_memory=True)
    _, _, loader = train.prepare([actor, critic], [own, judges], loader)
    for epoch in train.epochs(2):
        for (seen,) in loader:
            at = (rank, train.progress().epoch, train.progress().batch)
            seen = seen.cuda(non_blocking=True)
            acted = actor(seen)
            judges.zero_grad()
            (critic(acted.detach()) - seen.sum(1, keepdim=True)).square().mean().backward()
            judges.step()
            die(*at)
            own.zero_grad()
            (-critic(acted).mean() + acted.square().mean()).backward()
            own.step()
    state = [part.state_dict() for part in (actor, critic, own, judges)]
    torch.save(state, {out!r} + f"/state-{{rank}}.pt")
"""


@pytest.mark.parametrize("fused", [False, True])
def test_a_prepared_script_that_loses_both_ranks_ends_with_the_same_bits(
    fused: bool, tmp_path: Path
) -> None:
    def end(name: str, *kills: tuple[int, ...]) -> list[Any]:
        home = tmp_path / name
        home.mkdir()
        text = textwrap.dedent(ACTOR_AND_CRITIC)
        (home / "program.py").write_text(text.format(kills=kills, fused=fused, out=str(home)))
        spec = {"script": {"entrypoint": str(home / "program.py")}}
        train = functools.partial(
            run_ranks, home, spec, world_size=2, device="cuda", before=_meet_by_gloo
        )
        assert train(recovers=True) == [0, 0]
        assert sorted(replaced(home)) == sorted(rank for rank, *_ in kills)
        return final_state(home, 2)

    assert_same(end("killed", (0, 0, 3), (1, 1, 1)), end("undisturbed"))


class ByGloo:
    """Lets two ranks meet on one GPU, and then prepares a fault."""

    def __init__(self, then: Callable[[RankTask], None] | None = None) -> None:
        self.then = then

    def __call__(self, task: RankTask) -> None:
        _meet_by_gloo(task)
        if self.then is not None:
            self.then(task)


@pytest.mark.parametrize("point", ["in the backward pass", "in the optimizer", "after the step"])
def test_a_lost_rank_on_a_gpu_is_replaced(point: str, tmp_path: Path) -> None:
    undisturbed, recovered = tmp_path / "undisturbed", tmp_path / "recovered"
    train = functools.partial(run_ranks, spec=small(2), world_size=2, device="cuda")
    assert train(undisturbed, before=ByGloo()) == [0, 0]
    codes = train(recovered, before=ByGloo(Fault(1, point)), recovers=True)
    assert (codes, replaced(recovered)) == ([0, 0], [1])
    test_recovery.assert_same(recovered, undisturbed)


def test_a_group_of_nccl_is_aborted_while_it_works_and_is_formed_again(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    run_in_group(_abort_and_form_again, 1, str(tmp_path))
    for name, seconds in json.loads((tmp_path / "seconds").read_text()).items():
        record_property(name, seconds)


def _abort_and_form_again(rank: int, folder: str) -> None:
    dist.destroy_process_group()
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    device = torch.device("cuda", 0)
    seconds: dict[str, list[float]] = {"form": [], "abort": []}
    for number in range(4):
        began = time.perf_counter()
        process_group.join(device, dist.HashStore(), 0, 1, timedelta(seconds=60))
        values = torch.ones(8, device=device)
        dist.all_reduce(values)
        process_group.wait_for_results(device)
        seconds["form"].append(time.perf_counter() - began)
        assert values.tolist() == [1.0] * 8
        if number == 3:  # the last group is left intact
            break
        torch.cuda._sleep(CYCLES)
        dist.all_reduce(values)
        began = time.perf_counter()
        aborting = threading.Thread(target=process_group.abort)
        aborting.start()
        with pytest.raises(dist.DistBackendError):
            _wait_for_abort(device)
        aborting.join()
        torch.cuda.synchronize()
        seconds["abort"].append(time.perf_counter() - began)
        process_group.abandon()
    (Path(folder) / "seconds").write_text(json.dumps(seconds))


def _wait_for_abort(device: torch.device) -> None:
    while True:
        process_group.wait_for_results(device)


def test_a_failed_assertion_in_a_kernel_is_told_apart_from_other_errors() -> None:
    run_in_group(_fail_an_assertion, 1)


def _fail_an_assertion(rank: int) -> None:
    values = torch.zeros(2, device="cuda")
    with pytest.raises(torch.AcceleratorError) as raised:
        values[torch.tensor([5], device="cuda")].tolist()
    assert has_fault(raised.value)
    assert as_lost(raised.value) is raised.value
    assert raised.value.error_code == ASSERT
    with pytest.raises(torch.AcceleratorError):  # it can't be used any longer
        torch.cuda.synchronize()


def test_a_digest_is_that_of_the_same_bits_on_a_cpu() -> None:
    for shape, dtype in (
        ((1000, 33), "float32"),
        ((7,), "bfloat16"),
        ((3, 5), "int64"),
        ((), "half"),
    ):
        held = torch.randn(shape).to(getattr(torch, dtype))
        assert digest([held]) == digest([held.cuda()])
        if held.numel() > 1:
            changed = held.cuda()
            changed.view(-1)[-1] += 1
            assert digest([changed]) != digest([held])


def _meet_by_gloo(task: RankTask) -> None:
    dist.Backend.default_device_backend_map["cuda"] = "gloo"


def _assert_learnt_the_same(there: Path, here: Path, document: dict[str, Any]) -> None:
    rel = ROUNDED[document["train"].get("precision", "fp32")]
    for key in ("train/loss", "val/loss"):
        assert series(there, key) == pytest.approx(series(here, key), rel=rel)


def test_the_gpus_of_this_node_pass_a_self_test() -> None:
    """In processes of their own, as the node's agent runs the test. GPUs that other programs use
    are not tested."""

    async def test() -> NodeTest:
        tests = SelfTests(list)
        while (found := await tests.check("a", 0)).phase is not TestPhase.DONE:
            await asyncio.sleep(0.1)
        return found

    found = asyncio.run(test())
    outcomes = {device.outcome for device in found.devices}
    assert not found.is_failed, found
    assert outcomes <= {DeviceOutcome.PASSED, DeviceOutcome.HELD}, found
    for device in found.devices:
        if device.outcome is DeviceOutcome.PASSED:
            assert {"product_s", "memory_bytes_per_s", "to_device_bytes_per_s"} <= set(
                device.values
            )


def test_a_wrong_word_in_the_memory_of_a_gpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = measures._fill

    def spoil(chunks: Any, pattern: int) -> None:
        fill(chunks, pattern)
        chunks[-1][12345] = pattern ^ 1

    monkeypatch.setattr(measures, "_fill", spoil)
    device = torch.device("cuda")
    sizes = measures.WorkSizes(chunk_bytes=measures.MEBIBYTE)
    with pytest.raises(measures.Mismatch, match="1 words"):
        measures.memory(device, 16 * measures.MEBIBYTE, sizes)
    assert measures.product(device, sizes)[0] == measures.product(device, sizes)[0]
