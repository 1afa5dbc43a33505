"""Compressed gradients: the equations in the papers, the data sent, and the result of training."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from dray import spec
from ray_workers.training.parallel.data_parallel.compression import TopK, compress
from tests.marks import ONE_SET, SOAK, soak
from tests.unit.training.jobs import document, series, weights
from tests.unit.training.ranks import replaced, run_in_group, run_ranks

WORLD_SIZE = 2
STEPS = 6
MOMENTUM = 0.9


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * step + rank))


def gradients(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(inputs).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _rank(rank: int, folder: str, what: str) -> None:
    """Keep the gradients of each step as returned by DDP, and update the weights with them."""
    model = layers()
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    if what == "torch's powersgd":
        state = PowerSGDState(None, 2, start_powerSGD_iter=2, random_seed=7)  # type: ignore[no-untyped-call]
        ddp.register_comm_hook(state, powerSGD_hook)
    else:
        options = spec.Compression.model_validate(OPTIONS[what])
        compress(ddp, options, momentum=MOMENTUM, seed=7)
    found = []
    for step in range(STEPS):
        ddp.zero_grad()
        ddp(batch(rank, step)).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad  # type: ignore[operator]
    torch.save(found, f"{folder}/{rank}.pt")


OPTIONS: dict[str, dict[str, Any]] = {
    "fp16": {"name": "fp16"},
    "bf16": {"name": "bf16"},
    "powersgd": {"name": "powersgd", "rank": 2, "start_step": 2},
    "topk": {"name": "topk", "ratio": 0.05},
}


def exchanged(folder: Path, what: str) -> list[list[Tensor]]:
    """Return the gradients of each step, which are the same on both ranks."""
    folder.mkdir(exist_ok=True)
    run_in_group(_rank, WORLD_SIZE, str(folder), what)
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(WORLD_SIZE)]
    for one, other in zip(*ranks, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    found: list[list[Tensor]] = ranks[0]
    return found


@pytest.mark.parametrize(("what", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_halves_are_the_mean_of_halves(tmp_path: Path, what: str, dtype: torch.dtype) -> None:
    model = layers()
    for step, found in enumerate(exchanged(tmp_path, what)):
        ours = [gradients(model, batch(rank, step)) for rank in range(WORLD_SIZE)]
        for at, gradient in enumerate(found):
            mean = sum((grads[at].to(dtype) / WORLD_SIZE for grads in ours), torch.zeros(()))
            torch.testing.assert_close(gradient, mean.to(dtype).float(), rtol=1e-2, atol=1e-4)
        step_by(model, found)


def test_powersgd_is_torchs_own(tmp_path: Path) -> None:
    ours = exchanged(tmp_path / "ours", "powersgd")
    theirs = exchanged(tmp_path / "theirs", "torch's powersgd")
    for mine, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    ranks = [torch.linalg.matrix_rank(step[0]) for step in ours]
    assert ranks[0] > 2, "the first steps are exact"
    assert all(rank <= 2 for rank in ranks[2:])


def test_powersgd_is_a_power_iteration_with_what_was_left_out(tmp_path: Path) -> None:
    """PowerSGD, algorithms 1 and 2 in https://arxiv.org/abs/1905.13727, in plain tensor code.

    It starts randomly, so the first compressed step is only checked to be a projection of the mean;
    each later step starts with the row space of the previous one (warm start).
    """
    model = layers()
    matrices = [at for at, p in enumerate(model.parameters()) if p.dim() == 2]
    rests = [{at: torch.zeros(()) for at in matrices} for _ in range(WORLD_SIZE)]
    before: list[Tensor] = []
    for step, found in enumerate(exchanged(tmp_path, "powersgd")):
        ranks = [gradients(model, batch(rank, step)) for rank in range(WORLD_SIZE)]
        for at, gradient in enumerate(found):
            mean = sum((grads[at] for grads in ranks), torch.zeros(())) / WORLD_SIZE
            if at in matrices and step >= 2:
                wanted = [grads[at] + rest[at] for grads, rest in zip(ranks, rests, strict=True)]
                summed = sum(wanted, torch.zeros(())) / WORLD_SIZE
                rows = torch.linalg.svd(before[at]).Vh[:2] if step > 2 else None
                columns = gradient if rows is None else summed @ rows.T
                basis = torch.linalg.svd(columns).U[:, :2]
                mean = basis @ (basis.T @ summed)
                for rest, one in zip(rests, wanted, strict=True):
                    rest[at] = one - gradient
            torch.testing.assert_close(gradient, mean, rtol=1e-3, atol=1e-4)
        before = found
        step_by(model, found)


def test_topk_sends_the_largest_and_keeps_the_rest_with_its_momentum(tmp_path: Path) -> None:
    """Deep Gradient Compression in plain tensor code, one rank after the other."""
    model = layers()
    shapes = [p.shape for p in model.parameters()]
    velocities = [[torch.zeros(s).flatten() for s in shapes] for _ in range(WORLD_SIZE)]
    rests = [[torch.zeros(s).flatten() for s in shapes] for _ in range(WORLD_SIZE)]
    for step, found in enumerate(exchanged(tmp_path, "topk")):
        expected = [torch.zeros(s).flatten() for s in shapes]
        for rank in range(WORLD_SIZE):
            for at, gradient in enumerate(gradients(model, batch(rank, step))):
                velocity, rest = velocities[rank][at], rests[rank][at]
                velocity.copy_(MOMENTUM * velocity + gradient.flatten())
                rest += velocity
                largest = rest.abs().argsort(descending=True)[: max(1, int(rest.numel() * 0.05))]
                expected[at][largest] += rest[largest] / WORLD_SIZE
                rest[largest] = 0.0
                velocity[largest] = 0.0
        for gradient, plain in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient.flatten(), plain, rtol=1e-5, atol=1e-6)
        step_by(model, found)


def test_a_rank_alone_keeps_its_momentum(tmp_path: Path) -> None:
    """A single rank, as in a shrunk elastic group, sends everything."""
    sgd = {"name": "sgd", "lr": 0.05, "momentum": MOMENTUM}
    plain = document(1, optimizer=sgd)
    compressed = plain | {"sync": {"compression": {"name": "topk"}}}
    for home, job in ((tmp_path / "plain", plain), (tmp_path / "compressed", compressed)):
        assert run_ranks(home, job, world_size=1) == [0]
    found, expected = (series(tmp_path / home, "train/loss") for home in ("compressed", "plain"))
    assert found == pytest.approx(expected, rel=1e-4)


def test_topk_begins_with_a_quarter_and_less_in_each_step() -> None:
    """The share decreases by a constant factor, as in the authors' schedule."""
    state = TopK(0.001, 0.0, warmup_steps=4)
    sent = []
    for _ in range(6):
        state.step()
        sent.append(state.count(1_000_000))
    factor = (0.001 / 0.25) ** (1 / 4)
    expected = [250_000 * factor, 250_000 * factor**2, 250_000 * factor**3, 1000, 1000, 1000]
    assert sent == pytest.approx(expected, abs=1)
    assert TopK(0.5, 0.0, warmup_steps=4).count(100) == 50, "never fewer than in the end"


def step_by(model: nn.Module, grads: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), grads, strict=True):
            parameter -= 1e-3 * gradient


def job(world_size: int = 2, **compression: Any) -> dict[str, Any]:
    """Return a perceptron with about 300,000 weights, so that messages are larger than their
    headers."""
    sync = {"compression": compression} if compression else {}
    return document(world_size, epochs=6) | {
        "model": {"name": "mlp", "width": 512, "num_layers": 2},
        "sync": sync,
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("plain")
    assert run_ranks(home, job(), world_size=2) == [0, 0]
    return home


def last(home: Path, key: str) -> float:
    return list(series(home, key).values())[-1]


def test_what_goes_over_the_wire_is_told_as_the_kernel_counts_it(plain: Path) -> None:
    elements = sum(tensor.numel() for tensor in weights(plain).values())
    # Over all steps, because the kernel can send the last bytes of a step during the next one.
    told = series(plain, "perf/sent_bytes").values()
    sent = sum(told) / len(told)
    assert 4 * elements <= sent <= 4 * elements * 1.05, "half of it to reduce, half to gather"
    ratios = series(plain, "perf/compression").values()
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, rel=0.05)
    assert set(series(plain, "perf/sent_bytes")) == set(series(plain, "train/loss"))
    by_all = series(plain, "sync/sent_bytes")
    assert by_all.keys() == series(plain, "val/loss").keys()
    assert last(plain, "sync/sent_bytes") == pytest.approx(2 * sent, rel=0.05), "of two ranks"


def test_each_rank_tells_how_long_it_computed_before_it_had_to_do_with_others(plain: Path) -> None:
    for rank in (0, 1):
        computed = series(plain, "perf/compute_time_s", rank=rank)
        step_times = series(plain, "perf/step_time_s", rank=rank)
        assert computed.keys() == step_times.keys()
        assert all(0.0 < computed[step] < step_times[step] for step in computed)


@ONE_SET
@pytest.mark.parametrize(
    ("options", "least"),
    [
        soak({"name": "fp16"}, 1.9),
        soak({"name": "bf16"}, 1.9),
        ({"name": "powersgd", "rank": 2, "start_step": 4}, 20.0),
        ({"name": "topk", "ratio": 0.05}, 8.0),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else None,
)
def test_less_goes_over_the_wire_and_as_much_is_learned(
    plain: Path, tmp_path: Path, options: dict[str, Any], least: float
) -> None:
    spec_ = job(**options)
    assert run_ranks(tmp_path, spec_, world_size=2) == [0, 0]
    # Some bytes of a step may be counted in the next one.
    late = list(series(tmp_path, "perf/compression").values())[-20:]
    assert statistics.median(late) > least
    # After only a few steps, values that top-k has not sent yet still have an effect.
    behind = 0.1 if options["name"] == "topk" else 0.03
    assert last(tmp_path, "val/accuracy") > last(plain, "val/accuracy") - behind
    told, expected = series(tmp_path, "train/loss"), series(plain, "train/loss")
    assert told[1] == pytest.approx(expected[1], rel=1e-6), "the loss itself is not compressed"


@SOAK
def test_a_compressed_group_recovers_and_goes_on(tmp_path: Path) -> None:
    from tests.unit.training.elastic.test_recovery import Fault

    spec_ = job(name="topk", ratio=0.01)
    fault = Fault(1, "in the backward pass", 9)
    assert run_ranks(tmp_path, spec_, world_size=2, before=fault, recovers=True) == [0, 0]
    assert replaced(tmp_path) == [1]
    assert last(tmp_path, "val/accuracy") > 0.8
