"""A simulated job with secure aggregation computes the plain sum of the remaining clients'
updates."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dray.secure_aggregation.messages import MaskingPhase
from ray_workers.shared.contracts import RankTask
from ray_workers.training.core.errors import RoundsError
from ray_workers.training.core.faultpoints import FaultPoint, arm
from ray_workers.training.parallel.federated.simulation.secure_round import SecureRound
from ray_workers.training.parallel.gradients import Pass
from tests.marks import ONE_SET, SOAK
from tests.unit.training.jobs import weights
from tests.unit.training.parallel.federated.in_process import Server
from tests.unit.training.parallel.federated.simulation.test_simulation import ROUNDS, job
from tests.unit.training.ranks import replaced, run_ranks

SECURE = {"secure_aggregation": {}}


def both(**federated: Any) -> tuple[Server, Server]:
    """Return a job without secure aggregation, and the same job with it."""
    return Server(job(1, **federated)), Server(job(1, **federated, **SECURE))


def assert_near(server: Server, expected: dict[str, Tensor], atol: float = 1e-6) -> None:
    for name, found in server.weights().items():
        torch.testing.assert_close(found, expected[name], rtol=0, atol=atol)


@ONE_SET
@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "fedadam"])
def test_without_drop_outs_it_is_the_job_without_masks(algorithm: str) -> None:
    plain, secure = both(algorithm=algorithm, dropout_rate=0.0)
    for number in range(1, ROUNDS + 1):
        expected, found = plain.play(number), secure.play(number)
        assert expected.pop("federated/update_norm") > 0.0
        assert found == expected, "which has no norm of a single update"
        losses = [one.strategy.gradients.take_loss() for one in (plain, secure)]
        torch.testing.assert_close(*losses, rtol=0, atol=1e-6)
    assert_near(secure, plain.weights())


@SOAK
def test_with_privacy_it_is_the_job_without_masks() -> None:
    pytest.importorskip("opacus.accountants")
    options = {"noise_multiplier": 0.5, "clip_norm": 0.3, "epsilon": 1e5, "delta": 1e-3}
    privacy = {**options, "adaptive": {}}
    plain, secure = both(privacy=privacy, dropout_rate=0.0, clients_per_round=12)
    for number in range(1, ROUNDS + 1):
        expected, found = plain.play(number), secure.play(number)
        assert found["federated/clip_norm"] == pytest.approx(expected["federated/clip_norm"])
    assert found["federated/clip_norm"] != 0.3
    assert_near(secure, plain.weights())


class Sent:
    """Records the updates that clients pass to the protocol."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.updates: list[tuple[Tensor, int]] = []
        send = SecureRound.send

        def note(
            own: SecureRound, client: int, update: Tensor, weight: int, *more: Any, **facts: Any
        ) -> None:
            self.updates.append((update.double().clone(), weight))
            send(own, client, update, weight, *more, **facts)

        monkeypatch.setattr(SecureRound, "send", note)

    def take_mean(self) -> Tensor:
        total = sum(update * weight for update, weight in self.updates)
        mean = total / sum(weight for _, weight in self.updates)
        self.updates.clear()
        assert isinstance(mean, Tensor)
        return mean


def test_with_three_in_ten_gone_it_is_the_plain_mean_of_those_who_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent, phases = Sent(monkeypatch), set()
    server = Server(job(1, clients_per_round=20, dropout_rate=0.3, rounds=6, **SECURE))
    counted = 0
    for number in range(1, 7):
        plan = server.feed.at(number).shares[0].plan  # type: ignore[attr-defined]
        phases |= {*plan.lost.values(), *(one.lost_in for one in plan.participants)}
        server.train(number)
        parameters = server.strategy.model.parameters()
        gradients = [p.grad.reshape(-1) for p in parameters if p.grad is not None]
        found, mean = -torch.cat(gradients).double(), sent.take_mean()
        if server.strategy.gradients.step_metrics()["federated/updates"]:
            torch.testing.assert_close(found, mean[: len(found)], rtol=0, atol=1e-6)
            counted += 1
        server.strategy.update.step(0.1)
        server.strategy.after_step(number)
    assert counted >= 4
    assert phases == {None, *MaskingPhase} - {MaskingPhase.ENDED}


def test_a_round_that_loses_too_many_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(job(1, rounds=30, secure_aggregation={"threshold": 0.75}))
    outcomes: set[bool] = set()
    number = 0
    while len(outcomes) < 2:
        number += 1
        plan = server.feed.at(number).shares[0].plan  # type: ignore[attr-defined]
        num_kept = sum(one.lost_in is None for one in plan.participants)
        before = server.weights()
        metrics = server.play(number)
        counts = metrics["federated/updates"] > 0
        outcomes.add(counts)
        joined = sum(phase is not MaskingPhase.ADVERTISE_KEYS for phase in plan.lost.values())
        assert counts == (num_kept >= -(-3 * (len(plan.participants) + joined) // 4))
        if not counts:
            assert_near(server, before, atol=0)
            assert f"round {number} does not count: " in capsys.readouterr().out


def test_an_update_that_its_client_finds_too_large_is_not_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = Sent(monkeypatch)
    server = Server(job(1, dropout_rate=0.0, max_update_norm=0.31, **SECURE))
    metrics = server.play(1)
    assert 0 < metrics["federated/refused"] <= 3
    assert metrics["federated/updates"] == len(sent.updates) == 8 - metrics["federated/refused"]
    assert "is refused: the update's norm of" in capsys.readouterr().out


def test_bits_that_do_not_hold_the_updates_end_the_job_with_the_reason() -> None:
    server = Server(job(1, max_update_norm=100, secure_aggregation={"bits": 32}))
    share = server.feed.at(1).shares[0]
    share.feed._clients = [range(10**6)]  # type: ignore[attr-defined]
    with pytest.raises(RoundsError, match=r"federated\.secure_aggregation: 32 bits are too few"):
        server.strategy.gradients.backward(Pass([share]))


def test_a_node_without_the_package_says_where_to_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, SecureRound.__module__, None)
    with pytest.raises(RoundsError, match=r"cryptography .* environment\.python_packages"):
        Server(job(1, **SECURE))


@SOAK
def test_ranks_play_parts_of_the_server_and_one_that_dies_changes_nothing(tmp_path: Path) -> None:
    alone = Server(job(1, **SECURE))
    for number in range(1, ROUNDS + 1):
        alone.play(number)
    spec = job(3, **SECURE)
    codes = run_ranks(tmp_path, spec, world_size=3, before=die_in_round_3, recovers=True)
    assert codes == [0, 0, 0]
    assert replaced(tmp_path) == [1]
    assert_near(alone, weights(tmp_path), atol=0)


def die_in_round_3(task: RankTask) -> None:
    if task.rank == 1 and task.incarnation == 0:
        arm(FaultPoint.BACKWARD_DONE, lambda: os.kill(os.getpid(), signal.SIGKILL), at_step=3)
