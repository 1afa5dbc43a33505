"""The usage over time over HTTP, with the clients and with the command: who sees whose usage,
formats, and refusals."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import httpx
import pytest

from dray import AsyncClient, Client
from dray.errors import InvalidParameter
from tests.unit.api.matrix import TOKEN, check
from tests.unit.api.routes.scheduling.conftest import as_, hashed
from tests.unit.api.routes.scheduling.test_queues import submit
from tests.unit.api.serving import LiveServer, serving
from tests.unit.cli.running import Cli
from tests.unit.service.helpers import spent
from tests.unit.service.jobs.test_usage import on_gpus, sampled

HOUR = 3600.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server on which ann's job has run for an hour, and bob's for two hours."""
    folder = tmp_path_factory.mktemp("usage")
    names = f"root:{hashed('root')}:admin\nann:{hashed(TOKEN)}\nbob:{hashed('bob')}\n"
    (folder / "tokens").write_text(names)
    prices = {"currency": "EUR", "prices": [{"resource": "CPU", "per_hour": 2}]}
    (folder / "prices").write_text(json.dumps(prices))
    files = {"tokens_file": folder / "tokens", "prices_file": folder / "prices"}
    with serving(folder / "home", **files) as live:
        hands = live.hands
        hands.advance(-3 * HOUR)
        for name, hours in ((TOKEN, 1), ("bob", 2)):
            with live.client(headers=as_(name)) as client:
                job_id = submit(client)
            assert hands.claim(job_id) is not None
            hands.report(job_id, 1)
            hands.advance(hours * HOUR)
            hands.report(job_id, 1, [spent(at=hands.now, useful=hours * HOUR)])
            hands.end(job_id, 1)
            hands.advance(-hours * HOUR)
        hands.advance(3 * HOUR)
        yield live


@pytest.fixture
def cli(
    server: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Cli:
    monkeypatch.setenv("DRAY_TOKEN", "root")
    return Cli(server.url, capsys)


def ask(server: LiveServer, token: str, **query: str) -> httpx.Response:
    query = {"since": (server.hands.now - timedelta(hours=4)).isoformat(), **query}
    with server.client(headers=as_(token)) as client:
        return client.get("/v1/usage", params=query)


def hours_of(server: LiveServer, token: str, **query: str) -> dict[str | None, float]:
    body = ask(server, token, **query).json()
    return {one["name"]: round(sum(one["slot_hours"]), 3) for one in body["series"]}


def test_admins_see_all_users_and_others_themselves_and_the_rest(server: LiveServer) -> None:
    assert hours_of(server, "root", by="user") == {"bob": 2.0, "ann": 1.0}
    assert hours_of(server, TOKEN, by="user") == {"ann": 1.0, None: 2.0}
    assert hours_of(server, "bob", by="user") == {"bob": 2.0, None: 1.0}
    for name in ("root", TOKEN):
        assert hours_of(server, name, by="queue") == {"default": 3.0}
        body = ask(server, name).json()
        assert body["series"] == []
        assert sum(body["total"]["slot_hours"]) == pytest.approx(3.0)
        (cost,) = body["total"]["costs"]
        assert (cost["currency"], sum(cost["amounts"])) == ("EUR", pytest.approx(6.0))
        assert sum(body["total"]["num_succeeded"]) == 2


def test_a_name_in_another_users_series_never_reaches_a_user(server: LiveServer) -> None:
    assert "bob" not in ask(server, TOKEN, by="user", per="hour").text


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ({"per": "week"}, "per"),
        ({"by": "project"}, "by"),
        ({"per": "hour", "since": "2020-01-01T00:00:00Z"}, "31 days"),
        ({"since": "2020-01-01T00:00:00Z"}, "366 days"),
        ({"since": "9999-12-31T23:59:59Z"}, "before the current time"),
        ({"since": "0001-01-01T00:00:00Z"}, "2000"),
        ({"since": "2026-01-01"}, "since"),
        ({"time_zone": "Mars/Olympus"}, "Mars/Olympus"),
        ({"time_zone": ""}, "time zone"),
        ({"from": "2026-01-01T00:00:00Z"}, "from"),
    ],
)
def test_bad_queries_are_refused(server: LiveServer, query: dict[str, str], named: str) -> None:
    response = ask(server, "root", **query)
    check(server, response, 422, "invalid_parameter")
    assert named in response.text


def test_both_clients_return_the_report(server: LiveServer) -> None:
    since = server.hands.now - timedelta(hours=4)
    wanted: dict[str, Any] = {"per": "hour", "by": "user", "since": since}

    async def asked() -> Any:
        async with AsyncClient(server.url, token="root") as client:
            return await client.usage(**wanted), await client.idle_gpus()

    with Client(server.url, token="root") as client:
        found = client.usage(**wanted)
        assert asyncio.run(asked()) == (found, client.idle_gpus())
        with pytest.raises(InvalidParameter):
            client.usage(time_zone="Mars/Olympus")
    assert [series.name for series in found.series] == ["bob", "ann"]


def test_the_command_shows_each_day(server: LiveServer, cli: Cli) -> None:
    told = cli("usage", "--since", "2d", "--by", "user")
    lines = [line.split() for line in told.splitlines()]
    assert lines[0][:2] == ["DAY", "USER"]
    assert {line[1] for line in lines[1:]} == {"ann", "bob"}
    assert "EUR" in told
    report = json.loads(cli("usage", "--since", "2d", "--json"))
    assert sum(report["total"]["slot_hours"]) == pytest.approx(3.0)
    rows = list(csv.DictReader(io.StringIO(cli("usage", "--since", "2d", "--csv"))))
    assert sum(float(row["slot_hours"]) for row in rows) == pytest.approx(3.0)
    assert sum(float(row["cost_EUR"]) for row in rows) == pytest.approx(6.0)
    told = cli("usage", "--per", "hour", "--time-zone", "Asia/Kathmandu", "--waits")
    assert told.splitlines()[1].split()[1].endswith(":00")
    cli("usage", "--time-zone", "Mars/Olympus", exits=2)
    assert "Europe/Berlin" in cli.err


def test_idle_gpus_are_seen_by_all_users(server: LiveServer, cli: Cli) -> None:
    hands = server.hands
    hands.advance(-1000)
    job_id = server.await_(on_gpus(hands, name="sleeper"))
    sampled(hands, job_id, *[0.0] * 100)
    try:
        with server.client(headers=as_("bob")) as client:
            body = client.get("/v1/usage/idle-gpus").json()
            assert client.get("/v1/usage/idle-gpus?min_idle_s=1").status_code == 422
        names = [(item["name"], item["owner"]) for item in body["items"]]
        assert names == [("sleeper", "ann")]
        assert "sleeper" in cli("usage", "--idle")
    finally:
        hands.end(job_id, 1)
