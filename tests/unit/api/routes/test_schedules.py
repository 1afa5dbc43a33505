"""/v1/schedules: who can see and change schedules, and how bad input is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.unit.api.serving import LiveServer, serving

JOB = {"recipe": "image_classification"}
CLIENTS: dict[LiveServer, httpx.Client] = {}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server on which ann is an admin, but bob and eve are not. Users can have 5 schedules, and
    functions are refused."""
    home = tmp_path_factory.mktemp("schedules")
    hashes = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("ann", "bob", "eve")}
    lines = (f"{name}:{value}{':admin' * (name == 'ann')}\n" for name, value in hashes.items())
    (home / "tokens").write_text("".join(lines))
    settings: dict[str, Any] = {"max_schedules": 5, "takes_functions": False}
    with (
        serving(home / "home", tokens_file=home / "tokens", **settings) as server,
        server.client() as client,
    ):
        CLIENTS[server] = client
        yield server


@pytest.fixture(autouse=True)
def emptied(guarded: LiveServer) -> Iterator[None]:
    yield
    for one in ask(guarded, "ann", "GET").json()["items"]:
        assert ask(guarded, "ann", "DELETE", f"/{one['id']}").status_code == 204


def ask(
    server: LiveServer, name: str, method: str, path: str = "", **options: Any
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {name}"}
    return CLIENTS[server].request(method, f"/v1/schedules{path}", headers=headers, **options)


def made(server: LiveServer, owner: str = "bob", **fields: Any) -> dict[str, Any]:
    document = {"name": "night", "cron": "@daily", "job": JOB, **fields}
    response = ask(server, owner, "POST", json=document)
    assert response.status_code == 201, response.text
    schedule: dict[str, Any] = response.json()
    assert response.headers["location"] == f"/v1/schedules/{schedule['id']}"
    return schedule


def test_a_schedule_is_visible_to_its_owner_and_to_admins(guarded: LiveServer) -> None:
    schedule_id = made(guarded)["id"]
    changes = {"json": {"paused": True}}
    for method, path, body in (
        ("GET", "", {}),
        ("GET", "/runs", {}),
        ("PATCH", "", changes),
        ("POST", "/run", {}),
        ("DELETE", "", {}),
    ):
        for reference in (schedule_id, "night"):
            refused = ask(guarded, "eve", method, f"/{reference}{path}", **body)
            assert refused.status_code == 404, (method, path)
            assert refused.json()["code"] == "schedule_not_found"
    assert ask(guarded, "eve", "GET").json()["items"] == []
    assert ask(guarded, "ann", "GET", "/night").status_code == 404, "ann has none of this name"
    assert ask(guarded, "ann", "PATCH", f"/{schedule_id}", **changes).json()["paused"]
    job = ask(guarded, "ann", "POST", f"/{schedule_id}/run").json()
    assert (job["owner"], job["schedule_id"]) == ("bob", schedule_id)
    assert ask(guarded, "bob", "GET", "/night/runs").json()["items"][0]["job_id"] == job["id"]
    assert ask(guarded, "bob", "DELETE", "/night").status_code == 204
    assert ask(guarded, "bob", "DELETE", "/night").status_code == 404


def test_names_are_unique_for_each_owner(guarded: LiveServer) -> None:
    made(guarded)
    made(guarded, "eve")
    document = {"name": "night", "cron": "@hourly", "job": JOB}
    refused = ask(guarded, "bob", "POST", json=document)
    assert (refused.status_code, refused.json()["code"]) == (409, "schedule_exists")
    assert ask(guarded, "bob", "GET", "/night").json()["cron"] == "@daily"


def test_a_user_can_have_a_limited_number_of_schedules(guarded: LiveServer) -> None:
    ids = [made(guarded, name=f"night-{number}")["id"] for number in range(5)]
    document = {"name": "more", "cron": "@hourly", "job": JOB}
    refused = ask(guarded, "bob", "POST", json=document)
    assert (refused.status_code, refused.json()["code"]) == (409, "too_many_schedules")
    made(guarded, "eve")
    listed, query = [], "?limit=2"
    while query:
        page = ask(guarded, "bob", "GET", query).json()
        listed += [one["id"] for one in page["items"]]
        cursor = page["next_cursor"]
        query = f"?limit=2&cursor={cursor}" if cursor else ""
    assert listed == ids
    assert ask(guarded, "bob", "GET", "?cursor=abc").json()["code"] == "bad_cursor"


@pytest.mark.parametrize(
    ("fields", "code", "pointer"),
    [
        ({"name": "Nächtlich"}, "invalid_document", "/name"),
        ({"name": "a/b"}, "invalid_document", "/name"),
        ({"name": "n" * 64}, "invalid_document", "/name"),
        ({"name": "schedule-01kamq1c4e7g9j2m5p8r0t3v6x"}, "invalid_document", "/name"),
        ({"cron": ""}, "invalid_document", "/cron"),
        ({"cron": "* * * * * *"}, "invalid_document", "/cron"),
        ({"cron": "9" * 5000 + " * * * *"}, "invalid_document", "/cron"),
        ({"cron": "9" * 200 + " * * * *"}, "invalid_document", "/cron"),
        ({"cron": 5}, "invalid_document", "/cron"),
        ({"time_zone": "Mars/Olympus"}, "invalid_document", "/time_zone"),
        ({"time_zone": "localtime"}, "invalid_document", "/time_zone"),
        ({"time_zone": "/".join("a" * 500)}, "invalid_document", "/time_zone"),
        ({"time_zone": "../../etc/passwd"}, "invalid_document", "/time_zone"),
        ({"overlap": "both"}, "invalid_document", "/overlap"),
        ({"deadline_s": 0}, "invalid_document", "/deadline_s"),
        ({"deadline_s": 10**30}, "invalid_document", "/deadline_s"),
        ({"paused": 1}, "invalid_document", "/paused"),
        ({"jobs": {}}, "invalid_document", "/jobs"),
        ({"job": []}, "invalid_document", "/job"),
        ({"job": {}}, "invalid_document", "/job"),
        ({"job": {**JOB, "nam": "x"}}, "invalid_document", "/job/nam"),
        ({"job": {**JOB, "train": {"epochs": 0}}}, "invalid_document", "/job/train/epochs"),
        ({"job": {**JOB, "queue": "nowhere"}}, "unknown_queue", "/job/queue"),
        ({"job": {**JOB, "after": ["job-1"]}}, "invalid_document", "/job/after"),
        (
            {"job": {**JOB, "begin_at": "2030-01-01T00:00:00Z"}},
            "invalid_document",
            "/job/begin_at",
        ),
        (
            {"job": {"script": {"entrypoint": "dray_function.py", "code": "code-" + "0" * 32}}},
            "forbidden",
            "/job/script/entrypoint",
        ),
        (
            {"job": {**JOB, "array": {"size": 10**6}}},
            "array_too_large",
            "/job/array/size",
        ),
    ],
)
def test_bad_input_is_refused_with_the_field_and_stores_nothing(
    guarded: LiveServer, fields: dict[str, Any], code: str, pointer: str
) -> None:
    made(guarded, name="good")
    document = {"name": "night", "cron": "@daily", "job": JOB, **fields}
    answers = [ask(guarded, "bob", "POST", json=document)]
    if "name" not in fields:
        answers.append(ask(guarded, "bob", "PATCH", "/good", json=fields))
    for refused in answers:
        problem = refused.json()
        assert 400 <= refused.status_code < 500, problem
        assert (problem["code"], problem.get("pointer", "")) == (code, pointer), problem
    (good,) = ask(guarded, "bob", "GET").json()["items"]
    assert (good["name"], good["cron"], good["job"]["recipe"]) == ("good", "@daily", JOB["recipe"])


def test_null_removes_only_a_deadline(guarded: LiveServer) -> None:
    made(guarded, deadline_s="1h", time_zone="Europe/Berlin")
    changes = dict.fromkeys(("cron", "time_zone", "job", "overlap", "missed", "paused"))
    changed = ask(guarded, "bob", "PATCH", "/night", json={**changes, "deadline_s": None}).json()
    assert (changed["cron"], changed["time_zone"]) == ("@daily", "Europe/Berlin")
    assert (changed["deadline_s"], changed["paused"]) == (None, False)


def test_the_urls_of_silos_are_not_shown(guarded: LiveServer) -> None:
    silos = [
        {"name": name, "node_labels": {"silo": name}, "source": f"https://93.184.216.34/{name}"}
        for name in ("a", "b")
    ]
    job = {**JOB, "federated": {"silos": silos, "rounds": 3}, "resources": {"num_workers": 3}}
    response = ask(guarded, "bob", "POST", json={"name": "silos", "cron": "@daily", "job": job})
    assert response.status_code == 201, response.text
    assert "93.184" not in response.text
    assert "93.184" not in ask(guarded, "bob", "GET", "/silos").text


def test_strange_references_are_not_found(guarded: LiveServer) -> None:
    for reference in ("%F0%9F%98%80", "a" * 3000, "schedule-", "%ED%A0%80", "..%2Fjobs"):
        found = ask(guarded, "bob", "GET", f"/{reference}")
        assert found.status_code == 404, reference
