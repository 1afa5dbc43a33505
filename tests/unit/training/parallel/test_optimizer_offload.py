"""Optimizer state that is offloaded between steps remains the same."""

from __future__ import annotations

import copy
import math
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dray import spec
from ray_workers.shared.contracts import RankTask
from ray_workers.training.checkpoint import checkpoint_files
from ray_workers.training.core.faultpoints import FaultPoint, arm
from ray_workers.training.parallel.optim import optimizer_offload, optimizer_step
from ray_workers.training.parallel.optim.optimizer_offload import OffloadedState, rounded
from ray_workers.training.parallel.optim.optimizers import build_optimizer
from tests.marks import ONE_SET, SOAK, soak
from tests.unit.training.elastic.test_recovery import die
from tests.unit.training.jobs import assert_same, die_at_step_18, series, weights
from tests.unit.training.parallel.test_model_parallel import images, text
from tests.unit.training.ranks import checkpoint_refs, replaced, run_ranks

CPU = torch.device("cpu")
OPTIMIZERS = {
    "adamw": spec.Optimizer(name="adamw", lr=0.01, weight_decay=0.1),
    "sgd": spec.Optimizer(name="sgd", lr=0.01, momentum=0.9, weight_decay=0.1),
    "lars": spec.Optimizer(name="lars", lr=0.01, momentum=0.9, weight_decay=0.1),
    "lamb": spec.Optimizer(name="lamb", lr=0.01, weight_decay=0.1),
}


def trained(options: spec.Optimizer, **offloaded: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30), nn.Linear(30, 5))
    optimizer = build_optimizer(model, options)
    if offloaded:
        OffloadedState(optimizer, **offloaded)
    inputs = torch.randn(64, 20)
    for _ in range(10):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def without_count(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state without the step count, which torch's optimizer does not have."""
    (first, *others) = state["param_groups"]
    own = {name: value for name, value in first.items() if name != optimizer_offload.NUM_STEPS}
    assert own.keys() < first.keys()
    return {**state, "param_groups": [own, *others]}


@ONE_SET
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bucket_by_bucket_a_step_is_the_same_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(optimizer_offload, "BUCKET_BYTES", 200)
    plain, one = trained(OPTIMIZERS[name])
    apart, other = trained(OPTIMIZERS[name], storage_device=CPU)
    assert_same(dict(plain.state_dict()), dict(apart.state_dict()))
    assert_same(one.state_dict(), without_count(other.state_dict()))


def test_in_bf16_it_takes_half_and_learns_nearly_the_same() -> None:
    plain, one = trained(OPTIMIZERS["adamw"])
    small, other = trained(OPTIMIZERS["adamw"], as_bf16=True)
    moments = [state["exp_avg_sq"] for state in other.state.values()]
    assert {moment.dtype for moment in moments} == {torch.bfloat16}
    for state, its in zip(one.state.values(), other.state.values(), strict=True):
        torch.testing.assert_close(its["exp_avg"].float(), state["exp_avg"], rtol=0.1, atol=1e-4)
    for parameter, its in zip(plain.parameters(), small.parameters(), strict=True):
        torch.testing.assert_close(its, parameter, rtol=0.05, atol=5e-3)


def test_rounding_is_right_on_average_and_keeps_what_needs_none() -> None:
    values = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    errors = rounded(values, 3).float() / values - 1
    assert abs(float(errors.mean())) < 1e-5  # the nearest bf16 is up to 4e-3 away
    assert float(errors.abs().max()) < 2**-7
    exact = values.to(torch.bfloat16)
    assert torch.equal(rounded(exact.float(), 3), exact)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan])
    torch.testing.assert_close(rounded(special, 3).float(), special, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(rounded(values, 3), rounded(values, 3))
    assert not torch.equal(rounded(values, 3), rounded(values, 4))


def test_many_small_changes_add_up() -> None:
    """With rounding to nearest, all of these changes would be lost."""
    moments = torch.linspace(1.0, 1.5, 1000)
    now = moments.to(torch.bfloat16)
    for number in range(1000):
        now = rounded(now.float() * 0.999, number)
    expected = moments * 0.999**1000
    assert float((now.float() / expected).mean()) == pytest.approx(1.0, rel=0.01)
    nearest = moments.to(torch.bfloat16)
    for _ in range(1000):
        nearest = (nearest.float() * 0.999).to(torch.bfloat16)
    assert float((nearest.float() / expected).mean()) > 2


def test_no_two_moments_that_are_loaded_are_at_hand_at_once() -> None:
    """All of them together could exceed the memory of the device."""
    model, optimizer = trained(OPTIMIZERS["adamw"], storage_device=CPU)
    names = {parameter: name for name, parameter in model.named_parameters()}
    saved = copy.deepcopy(optimizer_step.named_state(optimizer, names))
    made: list[weakref.ref[Tensor]] = []

    def part(value: Any, parameter: Tensor) -> Any:
        assert all(each() is None for each in made)
        own = value.clone() + 1
        if own.ndim:
            made.append(weakref.ref(own))
        return own

    optimizer_step.load_named_state(optimizer, names, saved, optimizer_offload.made_later(part))
    assert len(made) == 2 * len(names)
    for parameter, name in names.items():
        for moment in ("exp_avg", "exp_avg_sq", "step"):
            expected = saved["state"][name][moment] + 1
            torch.testing.assert_close(optimizer.state[parameter][moment], expected)


SMALL_STATE: dict[str, Any] = {"optimizer": {"name": "adamw", "state_dtype": "bf16"}}


@SOAK
@pytest.mark.parametrize("parallel", [soak({}), {"shard": 2}], ids=["replicas", "sharded"])
def test_a_run_with_small_state_resumes_equal_to_the_bit(
    tmp_path: Path, parallel: dict[str, Any]
) -> None:
    job = images(2, parallel, **SMALL_STATE, max_steps=None)
    job["checkpoint"] = {"every_steps": 5, "keep": 2}
    left_alone, killed = tmp_path / "left-alone", tmp_path / "killed"
    assert run_ranks(left_alone, job, world_size=2) == [0, 0]
    codes = run_ranks(killed, job, world_size=2, before=die_at_step_18)
    assert codes == [-signal.SIGKILL] * 2
    refs = checkpoint_refs(killed)
    assert run_ranks(killed, job, world_size=2, attempt=2, resume_from=refs) == [0, 0]
    one = checkpoint_files.load(checkpoint_refs(left_alone)[0])
    other = checkpoint_files.load(checkpoint_refs(killed, attempt=2)[0])
    assert_same(one.state, other.state)
    moments = [each["exp_avg"] for each in one.state["optimizer"]["state"].values()]
    assert {moment.dtype for moment in moments} == {torch.bfloat16}


def test_offloaded_state_is_whole_in_a_checkpoint(tmp_path: Path) -> None:
    """The offloaded parts of a sharded model do not contain information about their division."""
    job = images(2, {"shard": 2}, optimizer={"name": "adamw"}, max_steps=None)
    job["checkpoint"] = {"every_steps": 5, "keep": 2}
    plain, apart = tmp_path / "plain", tmp_path / "apart"
    assert run_ranks(plain, job, world_size=2) == [0, 0]
    offloaded = with_offload(job)
    assert run_ranks(apart, offloaded, world_size=2) == [0, 0]
    one, other = (checkpoint_files.load(checkpoint_refs(home)[0]) for home in (plain, apart))
    optimizer = without_count(other.state["optimizer"])
    assert_same(one.state, {**other.state, "optimizer": optimizer})
    refs = checkpoint_refs(apart)
    codes = run_ranks(apart, offloaded, world_size=2, attempt=2, resume_from=refs[1:])
    assert codes == [0, 0]
    assert_same(weights(plain), weights(apart, attempt=2))


@SOAK
def test_a_twin_gives_offloaded_state_as_well(tmp_path: Path) -> None:
    job = images(4, {"shard": 2}, optimizer={"name": "adamw"}, max_steps=10)
    plain, recovered = tmp_path / "plain", tmp_path / "recovered"
    assert run_ranks(plain, job, world_size=4) == [0] * 4
    offloaded = with_offload(job)
    assert run_ranks(recovered, offloaded, world_size=4, before=_die, recovers=True) == [0] * 4
    assert replaced(recovered) == [1]
    assert_same(weights(plain), weights(recovered))


def _die(task: RankTask) -> None:
    if task.rank == 1 and task.incarnation == 0:
        arm(FaultPoint.DATA_LOADED, die, at_step=7)


def with_offload(job: dict[str, Any]) -> dict[str, Any]:
    """Return the job with offloading, and with resources as if the ranks, which have no GPU in
    these tests, had one."""
    optimizer = {**job["train"]["optimizer"], "offload": True}
    return job | {
        "train": {**job["train"], "optimizer": optimizer},
        "resources": {**job["resources"], "gpus_per_worker": 1},
    }


@SOAK
def test_what_is_sent_in_bf16_takes_half_and_learns_nearly_the_same(tmp_path: Path) -> None:
    sent, losses = {}, {}
    for name, dtypes in SENT_AS.items():
        home = tmp_path / name
        home.mkdir()
        job = text(home, 2, {"shard": 2, **dtypes}, precision="bf16", max_steps=6)
        job |= {"sync": {}, "model": {**job["model"], "width": 96}}
        assert run_ranks(home, job, world_size=2) == [0, 0]
        # Bytes that are in transit when a step is reported are counted in the next step.
        sent[name] = sum(list(series(home, "perf/sent_bytes").values())[2:])
        losses[name] = list(series(home, "train/loss").values())
        assert {tensor.dtype for tensor in weights(home).values()} == {torch.float32}
    assert sent["both"] == pytest.approx(0.5 * sent["neither"], rel=0.03)
    # One half is for two gathers, and the other for one sum, which gloo also sends to all ranks.
    assert sent["gathered"] == pytest.approx(0.75 * sent["neither"], rel=0.03)
    assert sent["added up"] == pytest.approx(0.75 * sent["neither"], rel=0.03)
    for name in SENT_AS:
        assert losses[name] == pytest.approx(losses["neither"], rel=0.02)


SENT_AS: dict[str, dict[str, Any]] = {
    "neither": {},
    "gathered": {"param_dtype": "bf16"},
    "added up": {"reduce_dtype": "bf16"},
    "both": {"param_dtype": "bf16", "reduce_dtype": "bf16"},
}
