"""The costs of jobs, users and queues on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.unit.api.serving import LiveServer, serving
from tests.unit.cli.running import Cli
from tests.unit.service.helpers import spent

HOUR = 3600.0


@pytest.fixture(scope="module")
def priced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("costs")
    spot = {"resource": "CPU", "per_hour": 0.5, "labels": {"ray.io/market-type": "spot"}}
    rules = [spot, {"resource": "CPU", "per_hour": 2}, {"resource": "memory", "per_hour": 0.004}]
    (folder / "prices").write_text(json.dumps({"currency": "EUR", "prices": rules}))
    with serving(folder / "home", prices_file=folder / "prices") as server:
        yield server


@pytest.fixture
def cli(priced: LiveServer, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(priced.url, capsys)


@pytest.fixture(scope="module")
def job_id(priced: LiveServer) -> str:
    """A job that has trained for an hour on two workers."""
    priced.queue("cli-costs", monthly_budget=100)
    hands = priced.hands
    hands.advance(-HOUR)
    job_id = priced.trains(2, queue="cli-costs")
    hands.advance(HOUR)
    hands.report(job_id, 1, [spent(at=hands.now, useful=1.5 * HOUR, idle=0.5 * HOUR)])
    return job_id


def test_a_job_shows_what_it_cost(cli: Cli, job_id: str) -> None:
    assert "cost       4 EUR: useful 3.00, wasted 1.00\n" in cli("get", job_id)


def test_costs_are_reported_by_user_and_queue(cli: Cli, job_id: str) -> None:
    head, *table = cli("costs", "--since", "2h").splitlines()
    assert head.startswith("from 20")
    assert [line.split() for line in table] == [
        ["USER", "COST", "USEFUL", "WASTED", "UNREPORTED", "SLOT", "HOURS", "JOBS"],
        ["default", "4", "EUR", "3.00", "1.00", "-", "2.00", "1"],
    ]
    assert "cli-costs" in cli("costs", "--by", "queue", "--since", "2h")
    report = json.loads(cli("costs", "--since", "2h", "--json"))
    assert report["items"][0]["cost"]["total"] == 4.0
    cli("costs", "--since", "yesterday", exits=2)
    assert "'yesterday' is not a time" in cli.err


def test_prices_are_shown(cli: Cli) -> None:
    assert [line.split("  ")[0] for line in cli("costs", "--prices").splitlines()] == [
        *("RESOURCE", "CPU", "CPU", "memory (GiB)")
    ]
    assert "ray.io/market-type=spot" in cli("costs", "--prices")


def test_a_queue_shows_its_budget_and_what_is_spent(cli: Cli, job_id: str) -> None:
    shown = cli("queue", "set", "cli-costs", "--budget", "1000")
    assert "budget     1,000 EUR, 4 EUR spent\neach month 100 EUR, 4 EUR spent\n" in shown
    shown = cli("queue", "set", "cli-costs", "--budget", "none", "--monthly-budget", "0.5")
    assert "budget     none, 4 EUR spent\neach month 0.50 EUR, 4 EUR spent\n" in shown
    for bad in ("-1", "nan", "1e300"):
        cli("queue", "set", "cli-costs", "--budget", bad, exits=2)
        assert "budget" in cli.err or "JSON" in cli.err
