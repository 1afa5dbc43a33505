"""Accounting over HTTP, with the clients and with the command: who sees which rows, formats, sums,
and refusals."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from dray import Client
from tests.unit.api.matrix import TOKEN, check
from tests.unit.api.routes.scheduling.conftest import as_, hashed
from tests.unit.api.routes.scheduling.test_queues import submit
from tests.unit.api.serving import LiveServer, serving
from tests.unit.cli.running import Cli
from tests.unit.service.helpers import spent

HOUR = 3600.0
EVIL = '=HYPERLINK("http://x")'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server on which ann and bob each have a job that has run for an hour on one CPU."""
    folder = tmp_path_factory.mktemp("accounting")
    names = f"root:{hashed('root')}:admin\nann:{hashed(TOKEN)}\nbob:{hashed('bob')}\n"
    (folder / "tokens").write_text(names)
    prices = {"currency": "EUR", "prices": [{"resource": "CPU", "per_hour": 2}]}
    (folder / "prices").write_text(json.dumps(prices))
    files = {"tokens_file": folder / "tokens", "prices_file": folder / "prices"}
    with serving(folder / "home", **files) as live:
        hands = live.hands
        hands.advance(-HOUR)
        for name in (TOKEN, "bob"):
            with live.client(headers=as_(name)) as client:
                job_id = submit(client, name=EVIL, labels={"team": "x"})
            assert hands.claim(job_id) is not None
            hands.report(job_id, 1)
            hands.advance(HOUR)
            hands.report(job_id, 1, [spent(at=hands.now, useful=HOUR)])
            hands.end(job_id, 1)
            hands.advance(-HOUR)
        hands.advance(HOUR)
        yield live


@pytest.fixture
def cli(
    server: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Cli:
    monkeypatch.setenv("DRAY_TOKEN", "root")
    return Cli(server.url, capsys)


def ask(server: LiveServer, token: str, **query: str) -> httpx.Response:
    query = {"since": (server.hands.now - timedelta(hours=2)).isoformat(), **query}
    with server.client(headers=as_(token)) as client:
        return client.get("/v1/accounting", params=query)


def owners(server: LiveServer, token: str, **query: str) -> list[str]:
    return [item["owner"] for item in ask(server, token, **query).json()["items"]]


def test_admins_see_all_rows_and_others_their_own(server: LiveServer) -> None:
    assert owners(server, "root") == ["ann", "bob"]
    assert owners(server, "root", owner="bob") == ["bob"]
    assert owners(server, "root", owner="@me") == []
    for owner in ({}, {"owner": "ann"}, {"owner": "@me"}):
        assert owners(server, TOKEN, **owner) == ["ann"]
    check(server, ask(server, TOKEN, owner="bob"), 403, "forbidden")
    assert server.ask("GET", "/v1/accounting").status_code == 401


def test_the_caller_of_a_cursor_decides_what_the_next_page_shows(server: LiveServer) -> None:
    cursor = ask(server, "root", limit="1").json()["next_cursor"]
    assert owners(server, "root", limit="1", cursor=cursor) == ["bob"]
    check(server, ask(server, TOKEN, limit="1", cursor=cursor), 400, "bad_cursor")


@pytest.mark.parametrize(
    "query",
    [
        {"since": "yesterday"},
        {"since": "2026-01-01"},
        {"since": "2026-01-02T00:00:00Z", "until": "2026-01-01T00:00:00Z"},
        {"per": "day"},
        {"state": "BUSY"},
        {"limit": "0"},
        {"array": "x"},
        {"where": "val/loss > 1"},
    ],
)
def test_a_query_that_makes_no_sense_is_refused(server: LiveServer, query: dict[str, str]) -> None:
    check(server, ask(server, TOKEN, **query), 422, "invalid_parameter")


def test_far_away_times_are_no_error(server: LiveServer) -> None:
    far = {"since": "0001-01-01T00:00:00Z", "until": "9999-12-31T23:59:59Z"}
    assert owners(server, "root", **far) == ["ann", "bob"]


def test_the_client_fetches_all_pages(server: LiveServer) -> None:
    since = server.hands.now - timedelta(hours=2)
    with Client(server.url, token="root") as client:
        found = list(client.accounting(since=since, page_size=1, label={"team": "x"}))
        jobs = list(client.accounting(since=since, per="job", state="SUCCEEDED"))
    assert [row.owner for row in found] == ["ann", "bob"]
    assert [row.job_id for row in jobs] == [row.job_id for row in found]


def test_csv_can_be_opened_and_json_has_one_row_per_line(cli: Cli) -> None:
    rows = list(csv.DictReader(io.StringIO(cli("accounting", "--since", "2h", "--csv"))))
    assert [row["name"] for row in rows] == [f"'{EVIL}"] * 2
    assert [(row["slot_seconds"], row["cost"], row["currency"]) for row in rows] == [
        ("3600.0", "2.0", "EUR")
    ] * 2
    assert json.loads(rows[0]["labels"]) == {"team": "x"}
    lines = cli("accounting", "--since", "2h", "--json").splitlines()
    assert [json.loads(line)["name"] for line in lines] == [EVIL] * 2


def test_the_table_ends_with_the_sum(cli: Cli) -> None:
    head, ann, _, _, total = cli("accounting", "--since", "2h").splitlines()
    assert head.split()[:4] == ["JOB", "ATTEMPT", "NAME", "OWNER"]
    assert "ann" in ann
    assert "SUCCEEDED" in ann
    assert total.split() == ["total", "4", "EUR", "2.00", "2.00", "-", "2", "2"]
    assert "bob" not in cli("accounting", "--since", "2h", "-n", "1")
    assert "only 1 rows are shown" in cli.err


@pytest.mark.parametrize(("by", "names"), [("user", ["ann", "bob"]), ("queue", ["default"])])
def test_sums_by_user_and_queue(cli: Cli, by: str, names: list[str]) -> None:
    arguments = ("accounting", "--since", "2h", "--sum-by", by)
    found = [json.loads(line) for line in cli(*arguments, "--json").splitlines()]
    assert [each["name"] for each in found] == names
    assert sum(each["slot_seconds"] for each in found) == 2 * HOUR
    assert sum(each["cost"] for each in found) == 4.0
    assert sum(each["num_jobs"] for each in found) == 2
    rows = list(csv.reader(io.StringIO(cli(*arguments, "--csv"))))
    assert [row[0] for row in rows] == ["name", *names]
    assert cli(*arguments).splitlines()[1].split()[0] == names[0]


def test_sums_by_day_add_up(cli: Cli) -> None:
    began = datetime.now(UTC) - timedelta(hours=26)
    arguments = ("accounting", "--since", began.isoformat(), "--sum-by", "day", "--json")
    found = [json.loads(line) for line in cli(*arguments).splitlines()]
    assert sum(each["slot_seconds"] for each in found) == pytest.approx(2 * HOUR)
    assert [each["name"] for each in found] == sorted({each["name"] for each in found})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--json", "--csv"), "can't be combined"),
        (("--per-job", "--sum-by", "user"), "can't be combined"),
        (("--since", "2000-01-01", "--sum-by", "day"), "more than 400 days"),
        (("--since", "yesterday"), "'yesterday' is not a time"),
        (("--state", "busy"), "BUSY is not one of"),
        (("--sum-by", "job"), "job"),
    ],
)
def test_bad_options_are_refused(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    cli("accounting", *arguments, exits=2)
    assert message in cli.err
