"""Costs over HTTP: who can see whose costs, time ranges, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from tests.unit.api.matrix import TOKEN, check
from tests.unit.api.routes.scheduling.conftest import as_, hashed
from tests.unit.api.routes.scheduling.test_queues import submit
from tests.unit.api.serving import LiveServer, Refused, serving
from tests.unit.service.helpers import spent

HOUR = 3600.0


@pytest.fixture(scope="module")
def priced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server on which a CPU costs 2 EUR per hour, with an admin, root, and two users, ann and
    bob."""
    folder = tmp_path_factory.mktemp("costs")
    names = f"root:{hashed('root')}:admin\nann:{hashed(TOKEN)}\nbob:{hashed('bob')}\n"
    (folder / "tokens").write_text(names)
    rules = [{"resource": "CPU", "per_hour": 2}]
    (folder / "prices").write_text(json.dumps({"currency": "EUR", "prices": rules}))
    files = {"tokens_file": folder / "tokens", "prices_file": folder / "prices"}
    with serving(folder / "home", **files) as server:
        yield server


@pytest.fixture(scope="module")
def jobs(priced: LiveServer) -> dict[str, str]:
    """By owner, a job that has been running for an hour and is still running."""
    found = {}
    hands = priced.hands
    hands.advance(-HOUR)
    for name in (TOKEN, "bob"):
        with priced.client(headers=as_(name)) as client:
            found[name] = submit(client)
        assert hands.claim(found[name]) is not None
        hands.report(found[name], 1)
    hands.advance(HOUR)
    for job_id in found.values():
        hands.report(job_id, 1, [spent(at=hands.now, useful=0.75 * HOUR, idle=0.25 * HOUR)])
    return {"ann": found[TOKEN], "bob": found["bob"]}


def asked(server: LiveServer, token: str, **query: str) -> httpx.Response:
    with server.client(headers=as_(token)) as client:
        return client.get("/v1/costs", params=query)


def test_a_job_and_its_attempt_show_their_cost(priced: LiveServer, jobs: dict[str, str]) -> None:
    with priced.client(headers=as_(TOKEN)) as client:
        job = client.get(f"/v1/jobs/{jobs['ann']}").json()
        (attempt,) = client.get(f"/v1/jobs/{jobs['ann']}/attempts").json()["items"]
        (listed,) = client.get("/v1/jobs?owner=ann").json()["items"]
    cost = {"currency": "EUR", "total": 2.0, "useful": 1.5, "wasted": 0.5, "unreported": 0.0}
    assert job["cost"] == attempt["cost"] == listed["cost"] == cost


def test_admins_see_all_and_others_their_own(priced: LiveServer, jobs: dict[str, str]) -> None:
    since = (priced.hands.now - timedelta(hours=2)).isoformat()
    for by, all_, own in (("user", {"ann", "bob"}, {"ann"}), ("queue", {"default"}, {"default"})):
        admins = asked(priced, "root", by=by, since=since).json()
        assert {item["name"] for item in admins["items"]} == all_
        assert sum(item["cost"]["total"] for item in admins["items"]) == 4.0
        mine = asked(priced, TOKEN, by=by, since=since).json()
        assert {item["name"] for item in mine["items"]} == own
        (item,) = mine["items"]
        assert (item["cost"]["total"], item["num_jobs"], item["slot_hours"]) == (2.0, 1, 1.0)
    assert admins["prices"] == [
        {"resource": "CPU", "per_hour": 2.0, "currency": "EUR", "labels": {}}
    ]
    half = (priced.hands.now - timedelta(minutes=30)).isoformat()
    (item,) = asked(priced, TOKEN, since=half).json()["items"]
    assert item["cost"]["total"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "query",
    [
        {"by": "job"},
        {"since": "yesterday"},
        {"since": "2026-01-01"},
        {"since": "1e300"},
        {"since": "9999-99-99T00:00:00Z"},
        {"since": "0001-01-01T00:00:00+14:00"},
        {"until": "9999-12-31T23:59:59-14:00"},
        {"owner": "bob"},
        {"since": "2026-01-02T00:00:00Z", "until": "2026-01-01T00:00:00Z"},
    ],
)
def test_a_query_that_makes_no_sense_is_refused(priced: LiveServer, query: dict[str, str]) -> None:
    check(priced, asked(priced, TOKEN, **query), 422, "invalid_parameter")


@pytest.mark.parametrize(
    ("since", "until"),
    [
        ("0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z"),
        ("2999-01-01T00:00:00Z", None),
        (None, "1970-01-01T00:00:00Z"),
    ],
)
def test_far_away_times_are_no_error(
    priced: LiveServer, since: str | None, until: str | None
) -> None:
    query = {name: time for name, time in (("since", since), ("until", until)) if time}
    assert asked(priced, "root", **query).status_code == 200


def test_a_caller_without_a_token_learns_nothing(priced: LiveServer) -> None:
    assert priced.ask("GET", "/v1/costs").status_code == 401


def test_without_prices_the_report_is_empty_and_says_why(http: httpx.Client) -> None:
    report = http.get("/v1/costs").json()
    assert (report["items"], report["prices"]) == ([], [])
    assert [warning["code"] for warning in report["warnings"]] == ["no_prices"]


def test_the_server_does_not_start_with_a_bad_file(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("currency: EUR\nprices: [{resource: GPU, per_hour: -1}]")
    said = refused(tmp_path, DRAY_PRICES_FILE=str(path))
    assert "prices/0/per_hour must be greater than or equal to 0" in said
