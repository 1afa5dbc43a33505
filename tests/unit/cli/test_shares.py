"""The shares of queues and users on the command line, and who sees whom."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from service.domain.scheduling.outlook.situation import Situation
from service.domain.scheduling.policy import Snapshot
from service.domain.scheduling.rules.shares import Account
from tests.unit.api.serving import LiveServer, serving
from tests.unit.cli.running import Cli
from tests.unit.service.domain.scheduling import snapshots

HOUR = 3600.0
TOKENS = {"ann": "a" * 20, "bob": "b" * 20, "root": "r" * 20}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("shares")
    lines = [
        f"{name}:{hashlib.sha256(token.encode()).hexdigest()}{':admin' if name == 'root' else ''}"
        for name, token in TOKENS.items()
    ]
    (folder / "tokens").write_text("\n".join(lines))
    with serving(folder / "home", tokens_file=folder / "tokens") as server:
        yield server


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of these tests alone, because a stored forecast changes other answers."""
    with serving(tmp_path_factory.mktemp("alone")) as server:
        yield server


@pytest.fixture
def cli(alone: LiveServer, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(alone.url, capsys)


def seen(server: LiveServer, used_s: Mapping[Account, float], *active: Account) -> None:
    """Store a forecast's situation in which each active account has one running job."""
    there = [
        snapshots.running(f"{queue}-{owner}", {"n": 1}, queue=queue, owner=owner)
        for queue, owner in active
    ]
    situation = Situation(snapshots.snapshot([], there, {"n": 8.0}, used_s=used_s))
    server.sees(situation)


def rows(told: str) -> list[list[str]]:
    return [line.split() for line in told.splitlines()]


def test_each_user_sees_where_they_stand_and_only_admins_see_the_others(
    guarded: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = Cli(guarded.url, capsys)
    used = {("default", "ann"): 30 * HOUR, ("default", "eve"): HOUR}
    seen(guarded, used, ("default", "ann"), ("default", "bob"))
    monkeypatch.setenv("DRAY_TOKEN", TOKENS["root"])
    head, queue, ann, bob, eve, unit = rows(cli("shares"))
    assert head[:4] == ["QUEUE", "USER", "WEIGHT", "SHARE"]
    assert queue[1:] == [
        *("-", "1", "100.0%", "31.00", "31.00", "0.00", "1.00", "not", "ahead", "-"),
    ]
    assert ann[1:-2] == ["ann", "1", "50.0%", "15.00", "30.00", "15.00", "4.00", "ahead"]
    assert bob[1:-2] == ["bob", "1", "50.0%", "15.00", "0.00", "-15.00", "4.00", "behind"]
    assert eve[1:] == ["eve", "1", "-", "-", "1.00", "-", "-", "-", "-"]
    assert "8 GPU for 1 hour" in " ".join(unit)
    assert len(rows(cli("shares", "--user", "bob", "--queue", "default"))) == 4
    monkeypatch.setenv("DRAY_TOKEN", TOKENS["bob"])
    report = cli.json("shares")
    assert [user["owner"] for user in report["queues"][0]["users"]] == ["bob"]
    cli("shares", "--user", "ann", exits=3)
    assert "only an admin may see the shares of other users" in cli.err
    cli("shares", "--queue", "night", exits=3)
    assert "there is no queue 'night'" in cli.err


def test_without_a_current_forecast_or_nodes_the_report_is_a_warning(
    alone: LiveServer, cli: Cli
) -> None:
    job_id = alone.submit()
    alone.sees(Situation(snapshots.snapshot([])), for_s=-600)
    assert cli("shares") == ""
    assert "no readable forecast from the last 2 minutes" in cli.err
    told = cli("explain", job_id, "--factors")
    assert told.startswith("QUEUED: this process has no readable forecast from the last 2 minutes")
    alone.sees(Situation(Snapshot((), (), connected=False)))
    assert cli("shares") == ""
    assert "the cluster is not connected or has no usable node" in cli.err
    cli("cancel", job_id)


def test_the_factors_of_a_position_are_told_in_the_order_in_which_they_count(
    alone: LiveServer, cli: Cli
) -> None:
    alone.queue("factors")
    first = alone.submit(queue="factors", priority=60, name="urgent")
    second = alone.submit(queue="factors", name="later")
    alone.sees(Situation(snapshots.snapshot([], (), {"n": 8.0})))
    position, head, *factors = cli("explain", second, "--factors").splitlines()
    assert position.startswith("position ")
    assert head.split() == ["FACTOR", "VALUE", "MEANING"]
    names = [line.split()[0] for line in factors]
    assert names[:8] == [
        *("tier", "priority", "standing", "usage", "overdue", "work", "submission", "front")
    ]
    assert f"  {first} urgent: priority: priority 60 > 50" in factors
    cli("priority", second, "70")
    assert "urgent" not in cli("explain", second, "--factors")
    cli("hold", second)
    held = cli("explain", second, "--factors")
    assert held == f"QUEUED: is held by anonymous; `dray release {second}` releases it (held)\n"
    cli("cancel", first, second)
    told = cli("explain", first, "--factors")
    assert told == "CANCELLED: only waiting jobs have a position in the queue (not_waiting)\n"
    assert cli.json("explain", first, "--factors")["reason"]["code"] == "not_waiting"
