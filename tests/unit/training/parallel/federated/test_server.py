"""The server's state comes back from a checkpoint, and what may go wrong in a round is borne."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.unit.training.jobs import assert_same
from tests.unit.training.parallel.federated.in_process import Server

Weights = dict[str, torch.Tensor]
PRIVACY = {"noise_multiplier": 0.9, "epsilon": 1e5, "delta": 1e-3, "adaptive": {}}


def server(**federated: Any) -> Server:
    """Of 40 clients."""
    return Server(
        {
            "recipe": "tabular_classification",
            "data": {"source": "sklearn://wine"},
            "train": {"optimizer": {"name": "sgd", "lr": 0.1}, "ema": {"decay": 0.5}},
            "federated": {"clients": 40, "clients_per_round": 10, "rounds": 5, **federated},
        }
    )


@pytest.mark.parametrize(
    "federated",
    [
        {"server": {"momentum": 0.9}},
        {"algorithm": "fedadam", "server": {"lr": 0.01}},
        {"algorithm": "fedyogi", "server": {"lr": 0.01}},
        {"algorithm": "scaffold"},
        {"privacy": PRIVACY},
    ],
    ids=["momentum", "fedadam", "fedyogi", "scaffold", "privacy"],
)
def test_a_server_goes_on_from_its_state(federated: dict[str, Any]) -> None:
    if "privacy" in federated:
        pytest.importorskip("opacus.accountants")
    one = server(**federated)
    one.play(1)
    one.play(2)
    before, state = one.weights(), copy.deepcopy(one.strategy.state())
    one.play(3)
    other = server(**federated)
    other.strategy.load(state)
    assert_same(other.weights(), before)
    other.play(3)
    assert_same(other.strategy.state(), one.strategy.state())


def test_a_round_that_breaks_off_leaves_no_trace() -> None:
    undisturbed, other = server(algorithm="scaffold"), server(algorithm="scaffold")
    for number in (1, 2):
        undisturbed.play(number)
    other.play(1)
    other.train(2)
    other.strategy.leave_group()
    other.strategy.join_group(0, 1)
    other.strategy.prepare(other.feed, 1)
    other.play(2)
    assert_same(other.strategy.state(), undisturbed.strategy.state())


def test_a_round_without_its_quorum_leaves_everything_as_it_was() -> None:
    few = server(dropout_rate=0.6, quorum=8, algorithm="fedadam", server={"lr": 0.1})
    before = few.weights()
    assert few.play(1)["federated/updates"] == 0
    assert_same(few.weights(), before)


def test_a_median_bears_clients_that_send_no_numbers_and_those_that_make_some_up() -> None:
    attacked = {"clients_per_round": 40, "aggregator": {"name": "median"}}
    refused = server(**attacked, attack={"rate": 0.25, "kind": "nan"}).play(1)
    assert (refused["federated/refused"], refused["federated/updates"]) == (10, 30)
    undisturbed = server()
    begun, wanted = undisturbed.weights(), server(clients_per_round=40)
    wanted.play(1)
    for name, is_borne in (("median", True), ("krum", True), ("mean", False)):
        options: dict[str, Any] = {"name": name}
        if name == "krum":
            options |= {"malicious": 10, "keep": 20}
        lied_to = server(
            clients_per_round=40,
            aggregator=options,
            attack={"rate": 0.25, "kind": "sign_flip", "scale": 20.0},
        )
        lied_to.play(1)
        assert (_alignment(begun, wanted.weights(), lied_to.weights()) > 0.5) is is_borne, name


def _alignment(begun: Weights, one: Weights, other: Weights) -> float:
    """The cosine of the angle between two changes."""
    names = [name for name, tensor in begun.items() if tensor.is_floating_point()]
    steps = [torch.cat([(w[n] - begun[n]).flatten() for n in names]) for w in (one, other)]
    return float(torch.cosine_similarity(*steps, dim=0))
