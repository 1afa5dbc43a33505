"""Schedules over HTTP, in both clients and on the command line, together with
docs/guides/schedules.md, whose code runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dray import AsyncClient, Client, errors
from service.loops.schedule_runner import ScheduleRunner
from service.loops.shared.fencing import LoopDatabase
from service.loops.shared.timings import LoopTimings
from tests.integration.tour import blocks_of, run_tour
from tests.unit.api.serving import LiveServer, serving, wait_until
from tests.unit.cli.running import Cli

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "schedules.md").read_text()
DOCUMENT = {"name": "night", "recipe": "image_classification"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that runs the loop of schedules."""
    with serving(tmp_path_factory.mktemp("schedules")) as server:
        runtime = server.context.runtime
        runner = ScheduleRunner(
            LoopDatabase(runtime.database),
            runtime.signals,
            runtime.jobs,
            runtime.settings,
            LoopTimings(),
        )
        running = asyncio.run_coroutine_threadsafe(runner.run(), server._loop)
        yield server
        running.cancel()
        wait_until(running.done, "the end of the loop")


@pytest.fixture
def job_yaml(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(DOCUMENT))
    return str(path)


def test_a_schedule_from_its_creation_to_its_end(cli: Cli, job_yaml: str) -> None:
    made = cli.json("schedule", "create", "tour", "30 2 * * MON", job_yaml, "--deadline", "1h")
    assert made["job"].items() >= {"version": 1, **DOCUMENT}.items()
    assert (made["overlap"], made["missed"], made["deadline_s"]) == ("skip", "last", 3600)
    assert all(time.endswith("T02:30:00Z") for time in made["next_times"])
    changed = cli.json(
        *("schedule", "change", "tour", "--cron", "@daily", "--time-zone", "Asia/Tokyo"),
        *("--set", "name=dawn", "--no-deadline", "--overlap", "queue"),
    )
    assert (changed["cron"], changed["deadline_s"], changed["overlap"]) == ("@daily", None, "queue")
    assert changed["job"]["name"] == "dawn"
    assert changed["next_times"][0].endswith("T00:00:00+09:00")
    assert "never: the schedule is paused" in cli("schedule", "pause", "tour")
    job = cli.json("schedule", "run-now", "tour")
    assert (job["name"], job["schedule_id"]) == ("dawn", made["id"])
    assert f"submitted by {made['id']} for " in cli("get", job["id"])
    listed = cli.json("ls", "--schedule", "tour")
    assert [one["id"] for one in listed] == [job["id"]]
    (run,) = cli.json("schedule", "runs", "tour")
    assert (run["outcome"], run["job_id"], run["job_state"]) == ("submitted", job["id"], "QUEUED")
    shown = cli("schedule", "show", "tour")
    assert "times     @daily in Asia/Tokyo" in shown
    assert job["id"] in shown
    assert "next      20" in cli("schedule", "resume", "tour")
    assert "tour" in cli("schedule", "ls")
    cli("schedule", "rm", "tour")
    cli("schedule", "show", "tour", exits=3)
    assert "there is no schedule tour" in cli.err
    assert [one["id"] for one in cli.json("ls", "--schedule", made["id"])] == [job["id"]]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("30 2 * *",), "has 4 fields, but a cron expression has 5 (at /cron)"),
        (("0 30 2 * * *",), "seconds can't be set"),
        (("0 0 30 2 *",), "bad day-of-month"),
        (("0 0 */31 * MON#3",), "no day in the next 10 years matches"),
        (("@daily", "--time-zone", "Europe/Berlim"), "did you mean 'Europe/Berlin'"),
        (("@daily", "--set", "queue=nowhere"), "the only queue is default (at /job/queue)"),
        (("@daily", "--set", "train.epochs=0"), "/job/train/epochs"),
        (("@daily", "--set", "deadline=2030-01-01T00:00:00Z"), "/job/deadline"),
        (("@daily", "--overlap", "both"), "must be skip, queue, replace"),
        (("@daily", "--deadline", "soon"), "must be a number of seconds, or a duration"),
    ],
)
def test_a_bad_schedule_is_refused_and_nothing_is_stored(
    cli: Cli, job_yaml: str, arguments: tuple[str, ...], told: str
) -> None:
    cron, *options = arguments
    cli("schedule", "create", "bad", cron, job_yaml, *options, exits=2)
    assert told in cli.err.replace("\n", " ")
    assert "bad" not in [one["name"] for one in cli.json("schedule", "ls")]


def test_a_program_is_scheduled_with_its_folder(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("print('training')\n")
    monkeypatch.chdir(tmp_path)
    program = ("program", "@hourly", "--json", "--", "train.py", "--lr", "0.1")
    made = json.loads(cli("schedule", "create", *program))
    assert made["job"]["script"]["args"] == ["--lr", "0.1"]
    assert made["job"]["script"]["code"].startswith("code-")
    assert cli.json("schedule", "run-now", "program")["spec"]["script"]["entrypoint"] == "train.py"
    cli("schedule", "create", *program, exits=3)
    assert "already has a schedule 'program'" in cli.err
    cli("schedule", "rm", "program")


async def test_both_clients_have_all_verbs(server: LiveServer) -> None:
    async with AsyncClient(server.url) as client:
        made = await client.create_schedule("sdk", "@hourly", DOCUMENT, missed="all", paused=True)
        assert made.paused
        assert not (await client.resume_schedule("sdk")).paused
        changed = await client.change_schedule(
            "sdk", deadline_s=60, spec={**DOCUMENT, "queue": "default"}
        )
        assert (changed.deadline_s, changed.missed) == (60, "all")
        one, same = [await client.run_schedule("sdk", idempotency_key="a") for _ in range(2)]
        assert one.id == same.id
        with pytest.raises(errors.RunUnfinished):
            await client.run_schedule("sdk")
        assert [run.job_id for run in await client.schedule_runs("sdk")] == [one.id]
        assert [job.id async for job in client.jobs(schedule="sdk")] == [one.id]
        assert made.id in [each.id async for each in client.schedules()]
    with Client(server.url) as blocking:
        assert blocking.schedule(made.id).last_run is not None
        assert blocking.pause_schedule("sdk").next_times == []
        blocking.delete_schedule("sdk")
        with pytest.raises(errors.ScheduleNotFound):
            blocking.schedule("sdk")


def test_the_page_works(server: LiveServer, tmp_path: Path) -> None:
    created, used, in_python = run_tour(server, tmp_path, blocks_of(PAGE), takes_s=200)
    assert "times     30 2 * * MON-FRI in Europe/Berlin" in created
    assert "02:30+0" in created
    assert "nightly deleted" in used
    assert "never: the schedule is paused" in used
    assert "T00:00:00+09:00" in in_python or "tzinfo" in in_python
