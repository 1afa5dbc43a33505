"""The output for answers that a test's server doesn't produce: a full cluster, a waiting job."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dray import Client
from dray.cli.app import run

JOB = "job-01kamq6v3c7y2m5w9r4t8e1x0z"


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command of one of these modules with a server that always gives the same
    answer."""

    def command(answer: dict[str, Any], *arguments: str) -> list[str]:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
        for module in ("cluster", "reports", "decisions"):
            monkeypatch.setattr(
                f"dray.cli.commands.{module}.connect",
                lambda: Client("http://localhost", transport=transport),
            )
        assert run(list(arguments)) == 0
        return capsys.readouterr().out.splitlines()

    return command


def node(name: str, **more: Any) -> dict[str, Any]:
    return {
        "node_id": name,
        "hostname": name,
        "alive": True,
        "resources": {"CPU": 8.0, "GPU": 2.0},
        "held": {"GPU": 1.0},
        "accepted": True,
        "jobs": [],
        **more,
    }


def test_each_node_has_its_state_its_slots_and_its_jobs(answered: Any) -> None:
    nodes = [
        node("one", jobs=["job-a", "job-b"]),
        node("two", accepted=False, reason="it has dray 0.2"),
        node("three", alive=False, resources={}, held={}),
        node("four", reason="its disk is full"),
    ]
    cluster = {"connected": True, "ray_dashboard": "http://x:8265", "nodes": nodes}
    lines = answered(cluster, "cluster")
    assert lines[:2] == ["connected", "dashboard: http://x:8265"]
    assert [line.split() for line in lines[3:]] == [
        ["one", "ready", "0/8", "1/2", "job-a,", "job-b", "-"],
        ["two", "refused:", "it", "has", "dray", "0.2", "0/8", "1/2", "-", "-"],
        ["three", "lost", "0/0", "0/0", "-", "-"],
        ["four", "ready,", "but", "its", "disk", "is", "full", "0/8", "1/2", "-", "-"],
    ]


def test_reservations_are_named_per_node_and_listed_once(answered: Any) -> None:
    times = {"begins_at": "2026-12-01T08:00:00Z", "ends_at": "2026-12-01T12:00:00Z"}
    whose = {"maintenance": False, "users": ["ann"], "queues": ["night"], "projects": ["p"]}
    course = {"name": "course", **times, **whose}
    disks = {**course, "name": "disks", "maintenance": True, "begins_at": "2026-11-30T08:00:00Z"}
    nodes = [node("one", reservations=[disks, course]), node("two", reservations=[course])]
    lines = answered({"connected": True, "nodes": [*nodes, node("three")]}, "cluster")
    assert [line.split()[-2:] for line in lines[1:5]] == [
        ["JOBS", "RESERVATIONS"],
        ["disks,", "course"],
        ["-", "course"],
        ["-", "-"],
    ]
    assert [line.split() for line in lines[6:]] == [
        ["RESERVATION", "BEGINS", "ENDS", "FOR"],
        *(
            [name, begins, "08:00:00Z", "2026-12-01", "12:00:00Z", *of]
            for name, begins, of in (
                ("disks", "2026-11-30", ["maintenance"]),
                ("course", "2026-12-01", ["ann,", "queue", "night,", "project", "p"]),
            )
        ),
    ]


def test_slots_in_quarantine_are_told_under_the_nodes(answered: Any) -> None:
    kept = {"slots": 2, "reason": "pid 7", "since": "2026-01-01T12:00:00Z", "job_id": "job-a"}
    cluster = {"connected": True, "nodes": [node("one", quarantined=[kept]), node("two")]}
    assert answered(cluster, "cluster")[-1] == "one: 2 slots of job-a are in quarantine: pid 7"


def test_a_storage_that_is_full_is_told_with_the_cluster(answered: Any) -> None:
    storage = {"problem": "the storage is full; delete finished jobs"}
    lines = answered({"connected": True, "nodes": [], "storage": storage}, "cluster")
    assert lines[1] == "storage: the storage is full; delete finished jobs"


@pytest.fixture
def in_paris(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the reader's time zone."""
    monkeypatch.setenv("TZ", "Europe/Paris")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def other(job_id: str, name: str, state: str, **more: Any) -> dict[str, Any]:
    return {"id": job_id, "name": name, "state": state, "priority": 50, "world_size": 1, **more}


@pytest.mark.usefixtures("in_paris")
def test_a_job_that_waits_says_for_whom_and_until_when(answered: Any) -> None:
    explanation = {
        "state": "QUEUED",
        "reason": {"code": "waiting", "message": "waits for 2 GPUs"},
        "position": 3,
        "queue_length": 9,
        "blocked_by": ["job-a", "job-b"],
        "ahead": [other("job-q", "first", "QUEUED", priority=90)],
        "running": [other("job-a", "nightly", "RUNNING", world_size=2)],
        "expected_start_at": "2026-01-31T12:00:00Z",
        "start": {
            "at": "2026-01-31T12:00:00Z",
            "earliest_at": "2026-01-31T11:50:00Z",
            "latest_at": "2026-01-31T12:30:00Z",
            "num_assumed": 2,
            "made_at": "2026-01-31T11:00:00Z",
        },
        "forecast_error": {"count": 7, "median_s": 30.0, "p90_s": 300.0, "median_ahead_s": 900.0},
        "counterfactuals": [{"message": "starts now with 1 worker", "num_workers": 1}],
    }
    assert answered(explanation, "explain", JOB) == [
        "QUEUED: waits for 2 GPUs (waiting)",
        "position 3 of 9 in the queue",
        "ahead of it:",
        "  job-q first: QUEUED, 1 worker, priority 90",
        "  and 1 more",
        "hold slots:",
        "  job-a nightly: RUNNING, 2 workers, priority 50",
        "waits for: job-b",
        "expected start: 2026-01-31 12:50 CET to 2026-01-31 13:30 CET, assuming that 2 jobs of "
        ""
        "unknown length take as long as recent jobs",
        "error of recent forecasts: median 30.0 s, 90th percentile 5m00s (7 forecasts in 7 days)",
        "what would change this:",
        "  starts now with 1 worker",
    ]


@pytest.mark.usefixtures("in_paris")
def test_a_job_that_nobody_knows_the_start_of_says_why_and_until_when_not(answered: Any) -> None:
    start = {
        "not_before": "2026-01-31T12:00:00Z",
        "reason": {
            "code": "beyond_forecast",
            "message": "the forecast covers only the next 3 hours",
        },
        "made_at": "2026-01-31T09:00:00Z",
    }
    reason = {"code": "waiting", "message": "waits for 2 GPUs"}
    off = {"count": 7, "median_s": 9.9, "p90_s": 20.0, "median_ahead_s": 900.0}
    explanation = {"state": "QUEUED", "reason": reason, "start": start, "forecast_error": off}
    lines = answered(explanation, "explain", JOB)
    assert lines[-1] == (
        "expected start: unknown: the forecast covers only the next 3 hours; not before "
        "2026-01-31 13:00 CET"
    )


def test_a_round_that_is_decided_otherwise_now_shows_both(answered: Any) -> None:
    waits = {"job_id": "job-a", "decision": "wait", "reason": {"code": "x", "message": "full"}}
    starts = {"job_id": "job-a", "decision": "start", "num_workers": 2, "node_ids": ["n1"]}
    counts = {"num_changes": 1, "num_waiting": 1, "num_running": 0}
    told = {"number": 3, "made_at": "2026-01-31T12:00:00Z", **counts, "nodes": {}}
    shown = {**told, "is_same": False, "decided": [starts], "replayed": [waits]}
    lines = answered(shown, "queue", "decisions", "3")
    assert lines[0] == "round 3 at 2026-01-31 12:00:00Z: 1 job waited"
    assert "The current policy would decide differently:" in lines
    assert any("2 workers on n1" in line for line in lines)
    assert any("full" in line for line in lines)


def test_errors_of_forecasts_are_shown_by_kind(answered: Any) -> None:
    starts = {"count": 4, "median_s": 1.5, "p90_s": 90.0, "median_ahead_s": 600.0}
    lines = answered({"starts": starts, "ends": {"count": 0}}, "queue", "forecasts")
    assert lines[1].split() == ["starts", "4", "1.5", "s", "1m30s", "10m00s"]


def test_an_attempt_shows_where_it_went_on_what_it_passed_over_and_the_loss(answered: Any) -> None:
    attempt = {"state": "ended", "world_size": 2, "created_at": "2026-01-01T00:00:00Z"}
    receipt = {"url": "u", "loss_before": 0.31, "loss_after": "NaN"}
    damaged = [{"step": 60, "why": "torn"}, {"step": 50, "why": "bit flip"}]
    items = [
        {**attempt, "attempt": 1, "resume_step": 0},
        {**attempt, "attempt": 2, "resume_step": 40, "receipt": {"step": 40, **receipt}},
        {**attempt, "attempt": 3, "resume_step": 0}
        | {"receipt": {"step": 0, "url": "", "passed_over": damaged}},
    ]
    head, fresh, resumed, nothing_sound = answered({"items": items}, "attempts", JOB)
    assert head.split()[3:6] == ["FROM", "STEP", "LOSS"]
    assert "damaged" not in fresh
    assert "->" not in fresh
    assert "0.31 -> nan" in resumed
    assert "0 (not 60, 50: damaged)" in nothing_sound
    assert "->" not in nothing_sound
