"""The server's state is restored from a checkpoint, and failures in a round are tolerated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ray_workers.shared.contracts import Cause
from ray_workers.training.core.errors import RoundsError, cause_of
from ray_workers.training.parallel.federated.aggregation import algorithms
from ray_workers.training.parallel.federated.aggregation.privacy import check_statistics
from ray_workers.training.parallel.federated.client_batches import RoundShare
from ray_workers.training.parallel.federated.client_training import Flat
from ray_workers.training.parallel.federated.engine import FederatedEngine
from tests.unit.training.jobs import assert_same
from tests.unit.training.parallel.federated.in_process import Server

Weights = dict[str, torch.Tensor]
PRIVACY = {"noise_multiplier": 0.9, "epsilon": 1e5, "delta": 1e-3, "adaptive": {}}


def server(schedule: dict[str, Any] | None = None, **federated: Any) -> Server:
    """Return a server with 40 clients."""
    return Server(
        {
            "recipe": "tabular_classification",
            "data": {"source": "sklearn://wine"},
            "train": {
                "optimizer": {"name": "sgd", "lr": 0.1},
                "ema": {"decay": 0.5},
                "schedule": schedule or {},
            },
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
    """Return the cosine of the angle between two changes."""
    names = [name for name, tensor in begun.items() if tensor.is_floating_point()]
    steps = [torch.cat([(w[n] - begun[n]).flatten() for n in names]) for w in (one, other)]
    return float(torch.cosine_similarity(*steps, dim=0))


def test_a_client_with_many_steps_shows_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for its rank, which would appear to hang."""
    one = server(local_epochs=30, batch_size=1)
    moves: list[None] = []
    monkeypatch.setattr(one.page, "move", lambda: moves.append(None))
    one.play(1)
    (mine,) = one.feed.at(1).shares
    assert isinstance(mine, RoundShare)
    assert len(moves) == sum(client.num_steps for client in mine.plan.participants)


def test_a_rank_refuses_more_control_variates_than_its_node_can_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(algorithms, "memory_here", lambda: 1000)
    with pytest.raises(RoundsError, match=r"for each of 40 clients, .* reduce federated") as raised:
        server(algorithm="scaffold")
    assert cause_of(raised.value) is Cause.CANNOT_RUN
    server()


def test_a_rate_that_is_no_more_a_number_of_fp32_changes_no_control_variate() -> None:
    one = server(algorithm="scaffold", schedule={"name": "step", "every_steps": 1, "factor": 1e-60})
    one.play(1)
    begun = copy.deepcopy(one.strategy.state()["federated"]["controls"])
    assert one.play(2)["federated/refused"] == 0
    assert_same(one.strategy.state()["federated"]["controls"], begun)


def test_a_client_begins_with_the_counters_of_the_server() -> None:
    """Running means without momentum are divided by the number of batches so far."""
    one, other = nn.BatchNorm1d(3, momentum=None), nn.BatchNorm1d(3, momentum=None)
    other(torch.randn(4, 3))
    Flat(other, has_buffers=True).copy_from(Flat(one, has_buffers=True))
    assert_same(other.state_dict(), one.state_dict())


def test_noise_spoils_no_constants_of_a_model() -> None:
    """A model for tables stores the means and standard deviations of the columns in buffers."""
    pytest.importorskip("opacus.accountants")
    one = server(privacy=PRIVACY)
    begun = {name: buffer.clone() for name, buffer in one.strategy.model.named_buffers()}
    weights = one.weights()
    one.play(1)
    assert_same(dict(one.strategy.model.named_buffers()), begun)
    assert not torch.equal(one.weights()["head.weight"], weights["head.weight"])


def test_a_model_with_running_statistics_is_not_for_privacy() -> None:
    check_statistics(nn.Sequential(nn.Linear(2, 3), nn.GroupNorm(1, 3)))
    with pytest.raises(RoundsError, match=r"which 1 \(BatchNorm1d\) has: use a GroupNorm"):
        check_statistics(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))


def test_the_average_of_the_weights_has_the_buffers_of_the_same_round() -> None:
    one = server()
    one.train(1)
    engine = one.strategy.gradients
    assert isinstance(engine, FederatedEngine)
    assert engine._end is not None
    engine._end.buffers[0].add_(1.0)  # as if it were a running mean
    one.strategy.update.step(0.1)
    one.strategy.after_step(1)
    average = dict(one.strategy.update.weights.named_buffers())
    assert_same(average, dict(one.strategy.model.named_buffers()))
