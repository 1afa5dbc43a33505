"""LARS and LAMB compared with the algorithms in their papers, in a few lines of plain
arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dray import spec
from ray_workers.training.parallel.optim.optimizers import build_optimizer, set_lr

STEPS = 5
DECAY = 0.1
LR = 0.2
Step = Callable[[Tensor, Tensor, dict[str, Tensor], int, float], Tensor]
"""(weights, gradient, state, number of the step, decay) -> the new weights."""


def lars(w: Tensor, g: Tensor, state: dict[str, Tensor], step: int, decay: float) -> Tensor:
    rate = LR
    if w.ndim >= 2:
        rate *= float(0.01 * w.norm() / (g.norm() + decay * w.norm()))
    state["v"] = 0.9 * state.get("v", torch.zeros_like(w)) + rate * (g + decay * w)
    return w - state["v"]


def lamb(w: Tensor, g: Tensor, state: dict[str, Tensor], step: int, decay: float) -> Tensor:
    state["m"] = 0.8 * state.get("m", torch.zeros_like(w)) + 0.2 * g
    state["v"] = 0.95 * state.get("v", torch.zeros_like(w)) + 0.05 * g * g
    mean, square = state["m"] / (1 - 0.8**step), state["v"] / (1 - 0.95**step)
    update = mean / (square.sqrt() + 1e-6) + decay * w
    ratio = float(w.norm() / update.norm()) if w.ndim >= 2 else 1.0
    return w - LR * ratio * update


CASES: dict[str, tuple[spec.Optimizer, Step]] = {
    "lars": (
        spec.Optimizer(name="lars", lr=LR, momentum=0.9, trust=0.01, weight_decay=DECAY),
        lars,
    ),
    "lamb": (
        spec.Optimizer(name="lamb", lr=LR, betas=(0.8, 0.95), eps=1e-6, weight_decay=DECAY),
        lamb,
    ),
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(12, 4)).double()


def gradients(model: nn.Module, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in model.parameters()
    ]


@pytest.mark.parametrize("name", CASES)
def test_it_follows_the_paper(name: str) -> None:
    options, plain = CASES[name]
    model = layers()
    optimizer = build_optimizer(model, options)
    weights = [p.detach().clone() for p in model.parameters()]
    states: list[dict[str, Tensor]] = [{} for _ in weights]
    for step in range(1, STEPS + 1):
        for at, (parameter, grad) in enumerate(
            zip(model.parameters(), gradients(model, step), strict=True)
        ):
            parameter.grad = grad
            decay = DECAY if parameter.ndim >= 2 else 0.0
            weights[at] = plain(weights[at], grad, states[at], step, decay)
        optimizer.step()
    for parameter, expected in zip(model.parameters(), weights, strict=True):
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_it_goes_on_from_its_state_as_if_it_had_not_stopped(name: str) -> None:
    options, _ = CASES[name]
    whole, first, second = layers(), layers(), layers()
    one = build_optimizer(whole, options)
    before = build_optimizer(first, options)
    after = build_optimizer(second, options)
    for step in range(1, STEPS + 1):
        if step == 3:
            second.load_state_dict(first.state_dict())
            after.load_state_dict(before.state_dict())
        pairs = [(whole, one), (first, before) if step < 3 else (second, after)]
        for model, optimizer in pairs:
            for parameter, grad in zip(model.parameters(), gradients(model, step), strict=True):
                parameter.grad = grad
            optimizer.step()
    for parameter, expected in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(parameter, expected)


@pytest.mark.parametrize("name", CASES)
def test_layers_of_zeros_and_gradients_of_zeros_are_no_division_by_zero(name: str) -> None:
    model = layers()
    optimizer = build_optimizer(model, CASES[name][0])
    set_lr(optimizer, 0.1)
    with torch.no_grad():
        model[0].weight.zero_()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_parameter_without_a_gradient_stays() -> None:
    model = layers()
    optimizer = build_optimizer(model, CASES["lamb"][0])
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
