"""Rounds with clients outside the cluster, from their data to the weights on the server."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dray._sync import federation
from dray.views import JobState
from ray_workers.shared import round_files
from ray_workers.shared.contracts import Cause
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.training.clients.outside_client import LocalUpdate, MaskedAnswer, OutsideClient
from ray_workers.training.core.errors import Preempted
from ray_workers.training.parallel.federated.outside import masked_collector, update_collector
from ray_workers.training.parallel.federated.outside.strategy import OutsideEngine
from ray_workers.training.parallel.federated.outside.update_collector import UpdateCollector
from tests.marks import soak
from tests.unit.api.federated_rounds import DOCUMENT, Clients, FederatedRun, RankKilled
from tests.unit.api.serving import LiveServer


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(update_collector, "LOOK_S", 0.01)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(
    server: LiveServer,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    document: dict[str, Any] = DOCUMENT,
) -> dict[str, torch.Tensor]:
    """Return the weights of a job without any failures of its rank or clients."""
    home.mkdir()
    job = FederatedRun(server, home, document)
    rounds = document["federated"]["rounds"]
    clients = Clients(job, home)
    clients.join(0, 1, 2)
    job.train(monkeypatch)
    job.end()
    clients.wait()
    assert clients.states == [JobState.SUCCEEDED] * 3
    assert server.hands.storage.names(round_files.rounds_prefix(job.job_id)) == []
    assert [len(said) for said in clients.said] == [2 * rounds] * 3
    assert [one["federated/updates"] for one in job.metrics.values()] == [3] * rounds
    assert job.metrics[rounds]["federated/val_loss"] < job.metrics[1]["federated/val_loss"]
    return job.weights()


POINTS = {
    "published": (UpdateCollector, "_collect", 2),
    "collected": (OutsideEngine, "_update_of", 5),
    "aggregated": (OutsideEngine, "commit", 2),
}
"""Where the rank is killed: in which call of which method."""


def kill_at(monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    kind, name, count = POINTS[point]
    whole, calls = getattr(kind, name), iter(range(1, 1000))

    def dying(self: Any, *given: Any, **named: Any) -> Any:
        if next(calls) == count:
            raise RankKilled(point)
        return whole(self, *given, **named)

    monkeypatch.setattr(kind, name, dying)


@pytest.mark.parametrize("points", [["collected"], soak([*POINTS])])
def test_a_rank_that_is_killed_anywhere_counts_each_update_once(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, points: list[str]
) -> None:
    """The next attempt continues the round with the updates that exist: the weights are identical
    to the last bit, and no client whose update was received has to train a round again."""
    expected = trained(server, tmp_path / "whole", monkeypatch)
    for point in points:
        (home := tmp_path / point).mkdir()
        job = FederatedRun(server, home)
        clients = Clients(job, home)
        clients.join(0, 1, 2)
        with monkeypatch.context() as armed:
            kill_at(armed, point)
            with pytest.raises(RankKilled):
                job.train(armed)
        job.end(Cause.NODE_LOST)
        job.train(monkeypatch)
        job.end()
        clients.wait()
        assert clients.states == [JobState.SUCCEEDED] * 3
        assert [len(said) for said in clients.said] == [2 * 3] * 3, (point, clients.said)
        for name, tensor in job.weights().items():
            assert torch.equal(tensor, expected[name]), (point, name)


def test_a_client_with_nonsense_is_named_and_the_others_go_on(
    server: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = OutsideClient.train

    def poisoned(self: OutsideClient, number: int) -> LocalUpdate:
        found = whole(self, number)
        factor = {1: math.nan, 2: 1e9}.get(self._client, 1.0)
        sent = torch.frombuffer(bytearray(found.path.read_bytes()), dtype=torch.float32)
        return found._replace(sha256=self._write((sent * factor).numpy().data))

    monkeypatch.setattr(OutsideClient, "train", poisoned)
    document = {**DOCUMENT, "federated": {**DOCUMENT["federated"], "quorum": 1, "rounds": 1}}
    job = FederatedRun(server, tmp_path, document)
    clients = Clients(job, tmp_path)
    clients.join(0, 1, 2)
    job.train(monkeypatch)
    job.end()
    clients.wait()
    log = capsys.readouterr().out
    assert (
        "the update of client 1 is refused: the update contains values that are not finite" in log
    )
    assert "the update of client 2 is refused: the update's norm of" in log
    assert job.metrics[1]["federated/updates"] == 1
    assert job.metrics[1]["federated/refused"] == 2


def test_a_quorum_ends_a_round_at_its_deadline(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that never sends an update doesn't delay others beyond the deadline. A client
    that returns continues."""
    monkeypatch.setattr(update_collector, "time", Clock())
    job = FederatedRun(server, tmp_path)
    clients = Clients(job, tmp_path)
    clients.join(0, 2)
    job.train(monkeypatch)
    job.end()
    clients.join(1)
    clients.wait()
    assert [job.metrics[step]["federated/updates"] for step in (1, 2, 3)] == [2, 2, 2]
    assert job.metrics[1]["federated/dropped_out"] == 1
    assert clients.said[1] == []


class JumpingClock:
    """Replaces `time`: it only changes when it is set."""

    seconds = 0.0
    sleep = staticmethod(time.sleep)

    def monotonic(self) -> float:
        return self.seconds


class Clock:
    """Replaces `time`: it advances by two seconds each time it is read."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def monotonic(self) -> float:
        self._seconds += 2.0
        return self._seconds

    def sleep(self, seconds: float) -> None:
        time.sleep(0.02)


def test_a_rank_that_is_asked_to_leave_leaves_in_the_middle_of_a_round(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = FederatedRun(server, tmp_path)
    clients = Clients(job, tmp_path)
    clients.join(0, 1)
    with monkeypatch.context() as armed:
        armed.setattr(HeartbeatPage, "is_asked_to_leave", property(lambda _: True))
        with pytest.raises(Preempted):
            job.train(armed)
    job.end(Cause.PREEMPTED)
    clients.join(2)
    job.train(monkeypatch)
    job.end()
    clients.wait()
    assert clients.states == [JobState.SUCCEEDED] * 3


MASKED = {
    **DOCUMENT,
    "federated": {**DOCUMENT["federated"], "rounds": 2, "secure_aggregation": {}},
}


def test_masked_updates_come_to_the_same_weights_and_the_server_sees_none_of_them(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except for rounding to integers. If the rank is killed, its round is restarted."""
    document = {**DOCUMENT, "federated": {**DOCUMENT["federated"], "rounds": 2}}
    expected = trained(server, tmp_path / "plain", monkeypatch, document)
    (home := tmp_path / "masked").mkdir()
    job = FederatedRun(server, home, MASKED)
    clients = Clients(job, home)
    clients.join(0, 1, 2)
    kept: dict[int, list[bytes]] = {}
    read_parts = masked_collector.read_parts

    def keeping(folder: str, client: int, *given: Any) -> bytearray:
        found = read_parts(folder, client, *given)
        kept.setdefault(client, []).append(bytes(found))
        if len(kept[client]) == 2 and job.attempt == 1:
            raise RankKilled("in the second round")
        return found

    monkeypatch.setattr(masked_collector, "read_parts", keeping)
    with pytest.raises(RankKilled):
        job.train(monkeypatch)
    job.end(Cause.NODE_LOST)
    job.train(monkeypatch)
    job.end()
    clients.wait()
    assert clients.states == [JobState.SUCCEEDED] * 3
    for name, tensor in job.weights().items():
        assert torch.allclose(tensor, expected[name], atol=1e-6), name
    for content in kept[0]:  # masked: spread over the whole ring
        numbers = torch.frombuffer(bytearray(content), dtype=torch.int64).double()
        assert numbers.std() > 2**60


def test_a_client_that_vanishes_in_a_masked_round_is_lost_to_it_alone(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 3 shares its keys and then doesn't send anything: the others reveal its masks."""
    federated = {**MASKED["federated"], "clients": 4, "clients_per_round": 4, "rounds": 1}
    answer = OutsideClient.answer

    def vanishing(self: OutsideClient, *given: Any) -> MaskedAnswer:
        if self._client == 3 and given[3] == "masked_input":
            return MaskedAnswer(None, None, "has vanished")
        return answer(self, *given)

    clock, read_parts, came = JumpingClock(), masked_collector.read_parts, []

    def counting(*given: Any) -> bytearray:
        came.append(given)
        if len(came) == 3:
            clock.seconds = 1e6  # the deadline has passed when the others' updates arrive
        return read_parts(*given)

    monkeypatch.setattr(OutsideClient, "answer", vanishing)
    monkeypatch.setattr(federation, "GIVEN_UP_S", 0.05)
    monkeypatch.setattr(masked_collector, "read_parts", counting)
    monkeypatch.setattr(update_collector, "time", clock)
    job = FederatedRun(server, tmp_path, {**MASKED, "federated": federated})
    clients = Clients(job, tmp_path)
    clients.join(0, 1, 2, 3)
    job.train(monkeypatch)
    job.end()
    clients.wait()
    assert job.metrics[1]["federated/updates"] == 3
    assert job.metrics[1]["federated/dropped_out"] == 1
    assert clients.said[3] == ["round 1: client 3 has vanished"]
