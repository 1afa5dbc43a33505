"""Clients of a federated job on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dray import Client
from ray_workers.shared.contracts import FrameKind
from ray_workers.shared.round_files import round_name
from tests.unit.api.serving import LiveServer
from tests.unit.cli.running import Cli
from tests.unit.service.helpers import frame
from tests.wire import round_report

EXAMPLE = Path(__file__).parents[3] / "examples" / "federated" / "outside.yaml"


def test_clients_are_invited_listed_and_revoked(
    server: LiveServer, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = server.submit(**yaml.safe_load(EXAMPLE.read_text()))
    lines = cli("federate", "invite", "outside", "--clients", "2").splitlines()
    tokens = [line.split()[1] for line in lines]
    assert [line.split()[0] for line in lines] == ["0", "1"]
    assert all(token.startswith("dray-join-") for token in tokens)
    assert "CLIENT" in cli("federate", "clients", "outside")
    assert [one["client"] for one in cli.json("federate", "clients", job_id)["items"]] == [0, 1]
    cli("federate", "invite", job_id, exits=3)
    assert "2 clients have already been invited" in cli.err
    assert cli("federate", "revoke", job_id, "1") == f"client 1 of {job_id} revoked\n"
    cli("federate", "revoke", job_id, "1", exits=3)
    monkeypatch.setenv("DRAY_TOKEN", tokens[1])
    cli("federate", "join", job_id, "--data", str(EXAMPLE), exits=3)
    assert "the token does not belong to a client of this job" in cli.err
    monkeypatch.setenv("DRAY_TOKEN", tokens[0])
    cli("federate", "join", job_id, "--data", "none.csv", exits=2)
    assert cli.err == "error: none.csv: no such file or folder\n", "the job has not begun"
    cli("ls", exits=3)
    assert "is valid only for the rounds of this job" in cli.err


def test_the_clients_that_have_not_answered_are_named(server: LiveServer, cli: Cli) -> None:
    job_id = server.submit(**yaml.safe_load(EXAMPLE.read_text()))
    assert server.hands.claim(job_id) is not None
    body = round_report(round_name(1, "0" * 64)).body()
    server.hands.report(job_id, 1, [frame(FrameKind.ROUND, body)])
    assert "no update yet, after the deadline: 0, 1" in cli("federate", "clients", job_id)
    assert "round 1 waits for clients 0, 1, and has" in " ".join(cli("explain", job_id).split())
    assert cli.json("explain", job_id)["round"]["missing"] == ["0", "1"]


def test_a_client_that_lacks_a_package_is_told_which(
    server: LiveServer, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: object, **__: object) -> None:
        raise ImportError("a federated client needs the package torch: pip install 'dray[client]'")

    monkeypatch.setattr(Client, "join", lacking)
    cli("federate", "join", "job-1", "--data", "x.csv", exits=2)
    assert cli.err == (
        "error: a federated client needs the package torch: pip install 'dray[client]'\n"
    )


def test_a_client_of_a_job_that_is_over_ends(
    server: LiveServer, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = server.submit(**yaml.safe_load(EXAMPLE.read_text()))
    (line,) = cli("federate", "invite", job_id).splitlines()
    cli("cancel", job_id)
    monkeypatch.setenv("DRAY_TOKEN", line.split()[1])
    said = cli("federate", "join", job_id, "--data", str(EXAMPLE), exits=1)
    assert said == f"{job_id} is CANCELLED\n"
