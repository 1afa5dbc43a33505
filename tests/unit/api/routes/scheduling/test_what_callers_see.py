"""What a user who is not an admin sees of another user's jobs and usage: docs/guides/access.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from service.cluster.port import ClusterSnapshot
from service.nodes import node_table
from service.outlook import decisions
from service.outlook.decisions import SeenRound
from tests.unit.api.matrix import TOKEN
from tests.unit.api.routes.scheduling.conftest import as_, hashed
from tests.unit.api.routes.scheduling.test_queues import submit
from tests.unit.api.serving import LiveServer, serving
from tests.unit.service.outlook.test_decisions import seen
from tests.wire import cluster_node


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("visible")
    names = f"root:{hashed('root')}:admin\nann:{hashed(TOKEN)}\nbob:{hashed('bob')}\n"
    (folder / "tokens").write_text(names)
    with serving(folder / "home", tokens_file=folder / "tokens") as live:
        yield live


@pytest.fixture(scope="module")
def job_id(server: LiveServer) -> str:
    """A job of ann's that has run."""
    with server.client(headers=as_(TOKEN)) as client:
        job_id = submit(client)
        hook = client.post("/v1/webhooks", json={"url": "https://93.184.216.34/hook"})
        assert hook.status_code == 201, hook.text
    assert server.hands.claim(job_id) is not None
    server.hands.report(job_id, 1)
    return job_id


def get(server: LiveServer, path: str, name: str = "bob") -> Any:
    with server.client(headers=as_(name)) as client:
        response = client.get(path)
    assert response.status_code == 200, response.text
    return response.json()


def test_jobs_are_visible_to_all_users(server: LiveServer, job_id: str) -> None:
    assert get(server, f"/v1/jobs/{job_id}")["owner"] == "ann"
    assert [job["id"] for job in get(server, "/v1/jobs")["items"]] == [job_id]
    for path in ("attempts", "events", "explain", "logs"):
        get(server, f"/v1/jobs/{job_id}/{path}")


def test_decisions_show_no_more_of_a_job_than_the_job_itself(
    server: LiveServer, job_id: str
) -> None:
    round_: SeenRound = seen(2)
    queue = tuple(replace(job, owner="ann") for job in round_.snapshot.queue)
    record = decisions.record(replace(round_, snapshot=replace(round_.snapshot, queue=queue)))
    server.hands.database.write_sync(lambda s: decisions.store(s, [record]))
    (item,) = get(server, "/v1/decisions")["items"]
    shown = get(server, f"/v1/decisions/{item['number']}")
    assert shown["decided"][0]["owner"] == "ann"
    job = get(server, f"/v1/jobs/{job_id}")
    assert {"owner", "queue", "priority", "progress"} <= job.keys()


def test_reports_of_usage_show_the_callers_own_rows(server: LiveServer, job_id: str) -> None:
    server.hands.advance(60)
    since = (server.hands.now - timedelta(days=1)).isoformat().replace("+", "%2B")
    path = f"/v1/accounting?since={since}"
    assert [row["job_id"] for row in get(server, path, "root")["items"]] == [job_id]
    assert get(server, path)["items"] == []
    assert get(server, "/v1/costs")["items"] == []
    for queue in get(server, "/v1/shares")["queues"]:
        assert {user["owner"] for user in queue["users"]} <= {"bob"}
    assert get(server, "/v1/webhooks")["items"] == []


def test_nodes_show_the_reservations_that_the_caller_can_list(server: LiveServer) -> None:
    node = cluster_node("node-a", {"CPU": 4.0})
    seen = ClusterSnapshot("session-1", "ray://x", None, False, (node,))
    server.hands.database.write_sync(
        lambda session: node_table.store(session, seen, None, server.hands.now)
    )
    with server.client(headers=as_("root")) as client:
        for name, whose in (("anns", {"users": ["ann"]}), ("disks", {"maintenance": True})):
            body = {"name": name, "duration_s": 60, "nodes": ["node-a"]}
            response = client.post("/v1/reservations", json={**body, **whose})
            assert response.status_code == 201, response.text
    both = {"anns", "disks"}
    for name, expected in (("root", both), (TOKEN, both), ("bob", {"disks"})):
        (shown,) = get(server, "/v1/cluster", name)["nodes"]
        assert {one["name"] for one in shown["reservations"]} == expected
        listed = get(server, "/v1/reservations", name)["items"]
        assert {one["name"] for one in listed} == expected
