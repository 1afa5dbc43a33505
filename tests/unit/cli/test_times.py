"""Begin times, deadlines, singletons and the running times of queues on the command line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dray import Client
from dray.errors import RuntimeTooLong, SpecError, Unprocessable, Unsatisfiable
from tests.unit.api.serving import LiveServer
from tests.unit.cli.running import Cli

DOCUMENT = "recipe: image_classification\n"


@pytest.fixture
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def job_yaml(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(DOCUMENT)
    return str(path)


@pytest.mark.usefixtures("in_berlin")
def test_local_times_of_the_machine_are_sent_with_their_offsets(cli: Cli, job_yaml: str) -> None:
    job = cli.json("submit", job_yaml, "--begin", "2030-07-01 08:00", "--deadline", "2030-12-01")
    assert job["spec"]["begin_at"] == "2030-07-01T08:00:00+02:00"
    assert job["spec"]["deadline"] == "2030-12-01T00:00:00+01:00"
    assert (job["begin_at"], job["deadline"]) == ("2030-07-01T06:00:00Z", "2030-11-30T23:00:00Z")
    shown = cli("get", job["id"])
    assert "begins     2030-07-01 06:00:00Z\n" in shown
    again = cli.json("submit", "--like", job["id"], "--name", "again")
    assert (again["begin_at"], again["deadline"]) == (None, None)


@pytest.mark.usefixtures("in_berlin")
@pytest.mark.parametrize(
    ("option", "text", "told"),
    [
        ("--begin", "later", "write a time such as"),
        ("--begin", "2030-03-31 02:30", "does not exist in this time zone"),
        ("--deadline", "2029-10-28 02:30", "occurs twice in this time zone"),
        ("--deadline", "now+999999999weeks", "is too far in the future"),
    ],
)
def test_bad_times_are_refused_before_anything_is_sent(
    cli: Cli, job_yaml: str, option: str, text: str, told: str
) -> None:
    cli("submit", job_yaml, option, text, exits=2)
    assert told in " ".join(cli.err.replace("│", " ").split())
    assert option in cli.err


def test_a_singleton_is_submitted_and_told_from_an_array(cli: Cli, job_yaml: str) -> None:
    job = cli.json("submit", job_yaml, "--singleton", "--name", "one")
    assert job["spec"]["singleton"] is True
    cli("submit", job_yaml, "--singleton", "--array", "2", exits=2)
    assert "set array.max_running to 1 instead" in cli.err


def test_a_dry_run_checks_the_deadline(cli: Cli, job_yaml: str) -> None:
    cli("submit", job_yaml, "--deadline", "2020-01-01", "--dry-run", exits=2)
    assert "its deadline" in cli.err
    cli("submit", job_yaml, "--begin", "now+1h", "--dry-run")


def test_a_queue_limits_running_times(cli: Cli, job_yaml: str, server: LiveServer) -> None:
    shown = cli("queue", "set", "cli-short", "--max-runtime", "1d", "--default-max-runtime", "2h")
    assert "run time   2h00m by default, at most 1d00h\n" in shown
    job = cli.json("submit", job_yaml, "--set", "queue=cli-short")
    assert (job["max_runtime_s"], job["max_runtime_from"]) == (7200, "queue")
    assert "run time   at most 2h00m, the default of its queue\n" in cli("get", job["id"])
    own = cli.json("submit", job_yaml, "--set", "max_runtime_s=2d")
    assert (own["max_runtime_s"], own["max_runtime_from"]) == (172800, "job")
    cli("move", own["id"], "--queue", "cli-short", exits=2)
    assert "is 172800 s, but the maximum of the queue 'cli-short' is 86400 s" in cli.err
    cli("queue", "set", "cli-short", "--default-max-runtime", "2d", exits=2)
    assert "(at /default_max_runtime_s)" in cli.err
    cli("queue", "set", "cli-short", "--max-runtime", "parsec", exits=2)
    without = ("--max-runtime", "none", "--default-max-runtime", "none")
    assert "run time" not in cli("queue", "set", "cli-short", *without)
    cli("cancel", job["id"], own["id"])
    cli("queue", "delete", "cli-short")


def test_the_sdk_sends_datetimes(server: LiveServer) -> None:
    with Client(server.url) as client:
        begin_at = datetime.now(UTC) + timedelta(hours=1)
        document = {"recipe": "image_classification", "begin_at": begin_at}
        job = client.submit(document)
        assert job.begin_at == begin_at
        with pytest.raises(Unsatisfiable) as told:
            client.submit(
                {**document, "begin_at": None, "deadline": begin_at, "max_runtime_s": "2h"}
            )
        assert told.value.pointer == "/deadline"
        with pytest.raises(Unprocessable, match="has no offset from UTC"):
            client.submit({**document, "begin_at": begin_at.replace(tzinfo=None)})
        with pytest.raises(SpecError, match="set is not a JSON type"):
            client.submit({**document, "name": {1}})
        client.set_queue("sdk-short", max_runtime_s="1h")
        with pytest.raises(RuntimeTooLong):
            client.submit(
                {"recipe": "image_classification", "queue": "sdk-short", "max_runtime_s": "2h"}
            )
        client.delete_queue("sdk-short")
