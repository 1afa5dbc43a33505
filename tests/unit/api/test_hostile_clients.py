"""Clients that lie can neither end a federated job nor corrupt what it reports."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dray import Client
from dray._sync import federation
from dray.secure_aggregation import client as masking
from dray.secure_aggregation.messages import MaskingSettings
from dray.views import JobState
from ray_workers.shared.contracts import Cause
from ray_workers.training.clients.outside_client import LocalUpdate, OutsideClient
from ray_workers.training.core.errors import RoundsError, cause_of
from ray_workers.training.parallel.federated.outside import masked_collector, update_collector
from tests.marks import ONE_SET, SOAK, soak
from tests.unit.api.federated_rounds import DOCUMENT, Clients, FederatedRun
from tests.unit.api.serving import LiveServer
from tests.unit.secure_aggregation.liars import Liar


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(update_collector, "LOOK_S", 0.01)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LIES: dict[str, dict[str, Any]] = {
    "loss": {"loss": 1e308},
    "negative loss": {"loss": -1e308},
    "loss of float32": {"loss": 3e38},
    "validation loss": {"val_loss": 1e308, "num_val_samples": 2**31},
    "validation of no samples": {"val_loss": 1.0, "num_val_samples": 0},
    "steps": {"num_steps": 2**31},
    "samples": {"num_samples": 2**31},
}


OF_ALL = ("loss", "validation of no samples")


@ONE_SET
@pytest.mark.parametrize(
    ("lie", "liars"),
    [
        *((lie, [2]) for lie in LIES),
        *((lie, [0, 1, 2]) if lie in OF_ALL else soak(lie, [0, 1, 2]) for lie in LIES),
    ],
)
def test_a_client_that_lies_does_not_end_the_job(
    server: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lie: str,
    liars: list[int],
) -> None:
    whole, honest = OutsideClient.train, dict[tuple[int, int], LocalUpdate]()

    def lying(self: OutsideClient, number: int) -> LocalUpdate:
        found = honest[number, self._client] = whole(self, number)
        return found._replace(**LIES[lie]) if self._client in liars else found

    monkeypatch.setattr(OutsideClient, "train", lying)
    federated = {**DOCUMENT["federated"], "rounds": 12, "http": {"max_samples": 100}}
    job = FederatedRun(server, tmp_path, {**DOCUMENT, "federated": federated})
    clients = Clients(job, tmp_path)
    clients.join(0, 1, 2)
    job.train(monkeypatch)
    job.end()
    clients.wait()
    assert clients.states == [JobState.SUCCEEDED] * 3
    for step, metrics in job.metrics.items():
        assert all(math.isfinite(value) for value in metrics.values()), (step, metrics)
        if len(liars) > 1:
            continue
        truth = [honest[step, client] for client in range(3)]
        for name, losses in {
            "train/loss": [one.loss for one in truth],
            "federated/val_loss": [one.val_loss or 0.0 for one in truth],
        }.items():
            assert min(losses) * 0.99 <= metrics[name] <= max(losses) * 1.01, (step, name)


def masked(num_clients: int, per_round: int, rounds: int = 3, **more: Any) -> dict[str, Any]:
    options = {"clients": num_clients, "clients_per_round": per_round, "rounds": rounds}
    secure = {"secure_aggregation": {}, "deadline_s": 20, "http": {"max_samples": 100}}
    return {**DOCUMENT, "federated": {**DOCUMENT["federated"], **options, **secure, **more}}


def lie_as(
    monkeypatch: pytest.MonkeyPatch, lies: dict[int, tuple[str, ...]], version: int | None = None
) -> None:
    """lies: what clients do, by number; all others follow the protocol. version: the protocol
    version of these."""
    honest, rng = masking.MaskingClient, random.Random(0)

    def make(name: str, settings: MaskingSettings, newest: int) -> masking.MaskingClient:
        if int(name) in lies:
            return Liar(name, settings, lies[int(name)], rng, 1.0, newest)
        return honest(name, settings, version or newest)

    monkeypatch.setattr(masking, "MaskingClient", make)
    monkeypatch.setattr(federation, "GIVEN_UP_S", 0.05)


def run(
    server: LiveServer, home: Path, monkeypatch: pytest.MonkeyPatch, document: dict[str, Any]
) -> tuple[FederatedRun, list[Any]]:
    """Run a job to its end. Returns the run and its events."""
    job = FederatedRun(server, home, document)
    clients = Clients(job, home)
    clients.join(*range(document["federated"]["clients"]))
    try:
        job.train(monkeypatch)
        job.end()
    except RoundsError as error:
        job.log.append(str(error))
        job.end(cause_of(error))
    clients.wait()
    with Client(server.url) as client:
        return job, list(client.events(job.job_id))


@ONE_SET
@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ("shares", "the client returned a share"),
        ("own seed", "the client's seed does not match its commitment"),
    ],
)
def test_clients_that_lie_about_shares_are_named_and_left_out_and_the_job_succeeds(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str, said: str
) -> None:
    lie_as(monkeypatch, {1: (lie,), 4: (lie,)})
    job, events = run(server, tmp_path, monkeypatch, masked(6, 6))
    assert [job.metrics[step]["federated/updates"] for step in (1, 2, 3)] == [6, 4, 4]
    (named,) = [event for event in events if event.type == "clients_left_out"]
    assert named.data == {"round": 1, "clients": [1, 4]}
    assert f"client 1: {said}" in named.message
    assert f"client 4: {said}" in named.message
    assert events[-1].to_state is JobState.SUCCEEDED


@SOAK
def test_a_client_whose_secret_is_lost_by_its_own_lie_is_left_out_of_the_repetition(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie_as(monkeypatch, {2: ("commitment", "unfitting")})
    job, events = run(server, tmp_path, monkeypatch, masked(5, 5, rounds=2))
    assert [job.metrics[step]["federated/updates"] for step in (1, 2)] == [4, 4]
    broken = [event for event in events if event.type == "round_broken"]
    (restart,) = broken
    assert "round 1 is restarted: the secret of client 2 " in restart.message
    named = [event.data for event in events if event.type == "clients_left_out"]
    assert named == [{"round": 1, "clients": [2]}]


def test_a_job_without_enough_clients_that_follow_the_protocol_fails_by_their_number(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie_as(monkeypatch, {2: ("shares",)})
    job, events = run(server, tmp_path, monkeypatch, masked(3, 3))
    (said,) = job.log
    assert said.startswith("1 of the 3 clients have lied in secure aggregation and are excluded")
    assert events[-1].to_state is JobState.FAILED


def test_a_round_that_is_broken_again_and_again_fails_the_job(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that doesn't mask its update corrupts the sum, and it can't be determined which
    client it is."""
    monkeypatch.setattr(masked_collector, "MAX_BROKEN_ROUNDS", 3)
    whole = OutsideClient.answer

    def spoiling(self: OutsideClient, *given: Any) -> Any:
        found = whole(self, *given)
        if self._client == 1 and given[3] == "masked_input":
            content = random.Random(0).randbytes((self._folder / "update.bin").stat().st_size)
            return found._replace(content=self._write(content).encode())
        return found

    monkeypatch.setattr(OutsideClient, "answer", spoiling)
    job, events = run(server, tmp_path, monkeypatch, masked(3, 3))
    assert job.log == [
        "round 1 of secure aggregation failed 3 times in a row. Last failure: at least one client "
        "has masked an invalid update: the sum is impossible for updates within "
        "federated.max_update_norm and weights within http.max_samples"
    ]
    assert len([event for event in events if event.type == "round_broken"]) == 3
    assert events[-1].to_state is JobState.FAILED
    assert not [event for event in events if event.type == "clients_left_out"]


@SOAK
def test_a_client_that_vanishes_from_every_round_stops_no_job_that_has_others(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repeated round asks other clients. The client isn't reported as a liar, because it may
    have lost its connection."""
    monkeypatch.setattr(masked_collector, "ANSWER_S", 0.5)
    whole = OutsideClient.answer

    def vanishing(self: OutsideClient, *given: Any) -> Any:
        found = whole(self, *given)
        gone = self._client == 0 and given[3] == "unmask"
        return found._replace(content=None) if gone else found

    monkeypatch.setattr(OutsideClient, "answer", vanishing)
    monkeypatch.setattr(federation, "GIVEN_UP_S", 0.05)
    job, events = run(server, tmp_path, monkeypatch, masked(4, 3, rounds=4))
    assert [job.metrics[step]["federated/updates"] for step in range(1, 5)] == [3] * 4
    assert not [event for event in events if event.type == "clients_left_out"]


def test_clients_of_an_older_version_take_part_as_before(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie_as(monkeypatch, {}, version=1)
    job, _ = run(server, tmp_path, monkeypatch, masked(3, 3, rounds=2))
    assert [job.metrics[step]["federated/updates"] for step in (1, 2)] == [3, 3]


def test_liars_are_known_to_the_next_attempt_and_to_no_other_job(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie_as(monkeypatch, {3: ("shares",)})
    job = FederatedRun(server, tmp_path, masked(4, 4, rounds=3))
    clients = Clients(job, tmp_path)
    clients.join(0, 1, 2, 3)
    whole = masked_collector.MaskedCollector.at

    def dying(self: Any, step: int) -> Any:
        if step == 2:
            raise KeyboardInterrupt
        return whole(self, step)

    with monkeypatch.context() as armed:
        armed.setattr(masked_collector.MaskedCollector, "at", dying)
        with pytest.raises(KeyboardInterrupt):
            job.train(armed)
    job.end(Cause.NODE_LOST)
    job.train(monkeypatch)
    job.end()
    clients.wait()
    updates = [job.metrics[step]["federated/updates"] for step in (1, 2, 3)]
    assert updates == [4, 3, 3]
