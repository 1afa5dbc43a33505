"""Clipping, noise, and spent privacy, compared with the formulas in the papers and the library's
accountant."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch

from dray.spec import Federated
from ray_workers.training.core.errors import RoundsError
from ray_workers.training.parallel.federated.aggregation.privacy import (
    Accountant,
    ClippingNorm,
    rounds_of,
)


def federated(**privacy: Any) -> Federated:
    options = {"noise_multiplier": 1.1, "epsilon": 3.0, "delta": 1e-4, **privacy}
    sizes = {"clients": 1000, "clients_per_round": 50, "rounds": 10_000}
    return Federated.model_validate({**sizes, "privacy": options})


def accountant(options: Federated) -> Accountant:
    assert options.privacy is not None
    return Accountant(options, options.privacy)


def clipping(options: Federated) -> ClippingNorm:
    assert options.privacy is not None
    return ClippingNorm(options, options.privacy, seed=0)


@pytest.mark.parametrize("num_rounds", [1, 10, 137])
def test_epsilon_is_the_librarys(num_rounds: int) -> None:
    accountants = pytest.importorskip("opacus.accountants")
    library = accountants.RDPAccountant()
    for _ in range(num_rounds):
        library.step(noise_multiplier=1.1, sample_rate=0.05)
    epsilon = accountant(federated()).epsilon(num_rounds)
    assert epsilon == pytest.approx(library.get_epsilon(delta=1e-4), rel=1e-12)


def test_a_job_has_as_many_rounds_as_its_epsilon_allows() -> None:
    pytest.importorskip("opacus.accountants")
    options = federated()
    most = rounds_of(options)
    assert 1 < most < options.rounds
    spent = accountant(options)
    assert spent.epsilon(most) <= 3.0 < spent.epsilon(most + 1)
    assert rounds_of(federated(epsilon=1e5)) == options.rounds
    with pytest.raises(RoundsError, match="one round spends"):
        rounds_of(federated(epsilon=0.01))


def test_a_node_without_the_library_says_where_to_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.raises(RoundsError, match=r"opacus .* environment\.python_packages"):
        rounds_of(federated())


def test_updates_are_clipped_to_the_norm_and_smaller_ones_are_left_alone() -> None:
    norm = clipping(federated(clip_norm=2.0))
    large, small = torch.tensor([3.0, 4.0]), torch.tensor([0.3, 0.4])
    norm.clip(large, 5.0)
    norm.clip(small, 0.5)
    torch.testing.assert_close(large, torch.tensor([1.2, 1.6]))
    assert small.tolist() == torch.tensor([0.3, 0.4]).tolist()


def test_noise_is_as_large_as_the_document_says_and_the_same_when_it_is_drawn_again() -> None:
    norm = clipping(federated(clip_norm=2.0))
    noise = norm.noise(3, 100_000)
    assert float(noise.std()) == pytest.approx(2.2, rel=0.02)
    assert torch.equal(noise, norm.noise(3, 100_000))
    assert not torch.equal(noise, norm.noise(4, 100_000))


def test_the_norm_follows_the_quantile_that_was_asked_for() -> None:
    norm = clipping(federated(clip_norm=1.0, adaptive={"quantile": 0.5, "lr": 0.2}))
    # The norms of the updates are 0.1, 0.2, ..., 5.0; half of them are below 2.5.
    for number in range(1, 200):
        within = sum(0.1 * one <= norm.value for one in range(1, 51))
        norm.value = norm.after(number, within, 50)
    assert norm.value == pytest.approx(2.5, rel=0.15)


def test_one_client_more_moves_the_count_by_a_half_whether_it_is_clipped_or_not() -> None:
    """The accountant's share of the noise corresponds to a count that a single client changes by
    one half."""
    norm = clipping(federated(adaptive={"lr": 1.0}))
    counts = [-50 * math.log(norm.after(1, *came)) for came in ((20, 50), (20, 51), (21, 51))]
    assert counts[1] - counts[0] == pytest.approx(-0.5)
    assert counts[2] - counts[0] == pytest.approx(0.5)


def test_a_high_quantile_is_found_where_half_of_the_clients_drop_out() -> None:
    sizes = {"clients": 1000, "clients_per_round": 100, "rounds": 10, "dropout_rate": 0.5}
    noise = {"noise_multiplier": 1.0, "epsilon": 3.0, "delta": 1e-4}
    privacy = {**noise, "adaptive": {"quantile": 0.9}}
    norm = clipping(Federated.model_validate({**sizes, "privacy": privacy}))
    for number in range(1, 300):
        within = sum(0.1 * one <= norm.value for one in range(1, 51))
        norm.value = norm.after(number, within, 50)
    assert norm.value == pytest.approx(4.5, rel=0.2)


def test_a_norm_that_adapts_does_not_pass_that_of_updates_that_are_refused() -> None:
    norm = clipping(federated(adaptive={"quantile": 0.99, "lr": 10.0}))
    for number in range(1, 5):
        norm.value = norm.after(number, 0, 0)
    assert norm.value == 1000.0


def test_a_noise_that_is_almost_none_has_no_overflow() -> None:
    norm = clipping(federated(noise_multiplier=1e-200, adaptive={}))
    assert float(norm.noise(1, 10).abs().max()) < 1e-190


def test_counting_what_is_clipped_takes_its_part_of_the_noise() -> None:
    norm = clipping(federated(clip_norm=1.0, adaptive={}))
    deviation = float(norm.noise(1, 200_000).std())
    expected = 1 / math.sqrt(1.1**-2 - (2 * 50 / 20) ** -2)
    assert deviation == pytest.approx(expected, rel=0.01)
    assert expected > 1.1
