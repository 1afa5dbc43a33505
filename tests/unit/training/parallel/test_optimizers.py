from __future__ import annotations

import torch
from torch import nn

from dray import spec
from ray_workers.training.parallel.optim.optimizers import build_optimizer, parameter_groups, set_lr


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4, 2))


def test_only_matrices_and_filters_decay() -> None:
    decaying, others = parameter_groups(model(), 0.1)
    assert decaying["weight_decay"] == 0.1
    assert [tuple(p.shape) for p in decaying["params"]] == [(4, 1, 3, 3), (2, 4)]
    assert others["weight_decay"] == 0.0
    assert all(p.ndim == 1 for p in others["params"])
    assert len(decaying["params"]) + len(others["params"]) == len(list(model().parameters()))


def test_frozen_parameters_are_left_out() -> None:
    net = nn.Linear(2, 2)
    net.bias.requires_grad_(False)
    groups = parameter_groups(net, 0.1)
    assert [len(group["params"]) for group in groups] == [1]


def test_decay_pulls_weights_and_leaves_biases_alone() -> None:
    net = nn.Linear(3, 3)
    before = net.weight.detach().clone(), net.bias.detach().clone()
    options = spec.Optimizer(name="sgd", lr=0.5, weight_decay=0.2)
    optimizer = build_optimizer(net, options)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(net.weight.detach(), before[0] * (1 - 0.5 * 0.2))
    assert torch.equal(net.bias.detach(), before[1])


def test_the_documents_options_reach_the_optimizer() -> None:
    adamw = build_optimizer(model(), spec.Optimizer(betas=(0.8, 0.95), eps=1e-6, lr=0.01))
    assert isinstance(adamw, torch.optim.AdamW)
    assert adamw.defaults["betas"] == (0.8, 0.95)
    assert adamw.defaults["eps"] == 1e-6
    sgd = build_optimizer(model(), spec.Optimizer(name="sgd", momentum=0.9, nesterov=True))
    assert isinstance(sgd, torch.optim.SGD)
    assert all(group["momentum"] == 0.9 and group["nesterov"] for group in sgd.param_groups)


def test_the_rate_is_set_for_every_group() -> None:
    optimizer = build_optimizer(model(), spec.Optimizer())
    set_lr(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


def test_adafactor_decays_like_the_others_and_lowers_a_loss() -> None:
    net = nn.Linear(3, 1)
    optimizer = build_optimizer(net, spec.Optimizer(name="adafactor", lr=0.05, weight_decay=0.1))
    assert isinstance(optimizer, torch.optim.Adafactor)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    inputs = torch.eye(3)
    losses = []
    for _ in range(300):
        loss = (net(inputs) - 1.0).square().mean()
        net.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
