"""Features for scripts: several jobs at once, filters, CSV, offline checks, and exit codes."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import dray
from dray.cli.exits import Exit
from ray_workers.shared.contracts import Cause
from tests.marks import ONE_SET, soak
from tests.unit.api.serving import LiveServer
from tests.unit.cli.running import Cli, as_process
from tests.unit.service.helpers import log, metrics


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text("recipe: image_classification\nmodel: {name: cnn}\n")
    return str(path)


def test_a_dry_run_checks_here_and_sends_nothing(cli: Cli, document: str, tmp_path: Path) -> None:
    nobody = ("--url", "http://127.0.0.1:9", "submit", document, "--dry-run")
    said = cli(*nobody)
    assert (
        said
        == f"{document} describes a job: image_classification on 1 worker. Nothing was submitted.\n"
    )
    full = cli.json(*nobody, "--set", "train.epochs=3", "--set", "resources.num_workers=2")
    assert (full["train"]["epochs"], full["resources"]["num_workers"]) == (3, 2)
    assert full["priority"] == 50  # the default
    again = tmp_path / "again.json"
    again.write_text(json.dumps(full))
    assert dray.validate(again) == dray.validate(full)


def test_a_dry_run_says_what_the_server_would(cli: Cli, document: str) -> None:
    for more in ((), ("--dry-run",)):
        assert cli("submit", document, "--set", "model.widht=3", *more, exits=2) == ""
        assert cli.err == (
            "error: there is no field 'widht' (at /model/widht)\nhint: did you mean 'width'?\n"
        )


def test_a_document_is_read_from_standard_input(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("recipe: image_classification\nname: piped\n"))
    assert cli.json("submit", "-")["name"] == "piped"
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    cli("submit", "-", exits=2)
    assert "standard input is not a job document" in cli.err


def test_several_jobs_are_cancelled_and_deleted_and_failures_told(
    cli: Cli, server: LiveServer, finished: str
) -> None:
    first, second = server.submit(), server.submit()
    out = cli("cancel", first, "job-none", second, exits=3)
    assert [line.split()[:2] for line in out.splitlines()] == [
        [first, "CANCELLED:"],
        [second, "CANCELLED:"],
    ]
    assert cli.err.count("there is no job job-none") == 1
    assert cli("delete", "-y", first, second).splitlines() == [
        f"{first} deleted",
        f"{second} deleted",
    ]
    out = cli("cancel", finished, server.submit(), "--json", exits=3)
    assert [json.loads(line)["state"] for line in out.splitlines()] == ["CANCELLED"]


def test_a_server_that_is_away_is_told_once_for_several_jobs(cli: Cli) -> None:
    assert cli("--url", "http://127.0.0.1:9", "cancel", "job-a", "job-b", exits=4) == ""
    assert cli.err.count("error:") == 1


def test_waiting_tells_how_jobs_ended(cli: Cli, server: LiveServer, finished: str) -> None:
    assert cli("wait", finished).split()[1] == "SUCCEEDED:"
    failed = server.submit()
    server.train(failed)
    server.hands.end(failed, 1, Cause.BAD_DATA, "the end")
    lines = cli("wait", finished, failed, "--json", exits=Exit.JOB_ENDED_BADLY).splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["SUCCEEDED", "FAILED"]


def test_waiting_for_too_long_has_an_exit_code_of_its_own(cli: Cli, server: LiveServer) -> None:
    job_id = server.submit()
    assert cli("wait", job_id, "--timeout", "0.2", exits=Exit.TIME_WAS_UP) == ""
    assert "still QUEUED" in cli.err
    assert cli("wait", job_id, "--state", "queued").split()[1] == "QUEUED:"
    cli("wait", job_id, "--state", "done", exits=2)
    assert "QUEUED, STARTING" in cli.err


def test_jobs_are_listed_by_time(cli: Cli, server: LiveServer) -> None:
    job_id = server.submit(labels={"test": "since"})

    def found(*options: str) -> list[str]:
        return [job["id"] for job in cli.json("ls", "--label", "test=since", *options)]

    soon = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    assert found("--since", "1h") == found("--until", soon) == [job_id]
    assert found("--since", soon) == found("--until", "1h") == []
    assert found("--since", "2020-01-31") == [job_id]
    assert found("--owner", "nobody") == found("--project", "none") == []
    for wrong in ("yesterday", "2026-13-01", "5x", "-1h"):
        cli("ls", f"--since={wrong}", exits=2)
        assert "is not a time" in cli.err


def test_a_list_that_was_cut_says_so_and_all_are_listed_on_demand(
    cli: Cli, server: LiveServer
) -> None:
    for _ in range(3):
        server.submit(labels={"test": "all"})
    listed = cli("ls", "--label", "test=all", "-n", "2").splitlines()
    assert len(listed) == 3
    assert cli.err == "only 2 jobs are listed; use --all to list all jobs\n"
    assert len(cli("ls", "--label", "test=all", "-n", "3").splitlines()) == 4
    assert cli.err == ""
    assert len(cli.json("ls", "--label", "test=all", "--all", "-n", "1")) == 3


def test_points_are_printed_as_csv(cli: Cli, server: LiveServer) -> None:
    job_id = server.submit()
    server.train(job_id, metrics(1, {"loss": 0.1, "a,b": 2.0}), metrics(2, {"loss": float("nan")}))
    rows = list(csv.reader(io.StringIO(cli("metrics", job_id, "--csv"))))
    assert rows == [
        *(["key", "step", "value"], ["a,b", "1", "2.0"]),
        *(["loss", "1", "0.1"], ["loss", "2", "NaN"]),
    ]
    server.succeed(job_id)
    followed = list(csv.reader(io.StringIO(cli("metrics", job_id, "-f", "--csv", "-k", "loss"))))
    assert followed == [["key", "step", "value"], ["loss", "1", "0.1"], ["loss", "2", "NaN"]]
    assert cli("metrics", job_id, "-f", "-k", "loss").splitlines() == [
        "step 1  loss 0.1",
        "step 2  loss NaN",
    ]
    lines = cli("metrics", job_id, "-f", "--json", "-k", "a,b").splitlines()
    (point,) = [json.loads(line) for line in lines]
    assert (point["key"], point["step"], point["value"]) == ("a,b", 1, 2.0)


def test_series_are_drawn(cli: Cli, finished: str, server: LiveServer) -> None:
    shown = cli("metrics", finished, "--plot")
    assert shown.count("step 10") == 2
    assert "train/loss  last 0.5" in shown
    assert cli("metrics", finished, "--together", "--log").count("step 10") == 1
    assert cli("metrics", server.submit(), "--plot") == "no points yet\n"
    cli("metrics", finished, "--plot", "--csv", exits=2)
    cli("metrics", finished, "--plot", "-f", exits=2)


def test_a_checkpoint_is_downloaded(cli: Cli, finished: str, tmp_path: Path) -> None:
    dest = tmp_path / "ten"
    paths = cli("checkpoints", finished, "--download", "10", str(dest)).split()
    assert paths == [str(dest / "state.pt"), str(dest / "manifest.json")]
    assert all(Path(path).is_file() for path in paths)
    again = cli.json("checkpoints", finished, str(dest), "--download", "10")
    assert again == {"paths": paths}
    cli("checkpoints", finished, "--download", "11", str(dest), exits=3)


@ONE_SET
@pytest.mark.parametrize(
    "command",
    [
        *("ls", "logs JOB", "metrics JOB --plot", "watch JOB", "explain JOB"),
        *map(soak, ("get JOB", "events JOB", "attempts JOB", "artifacts JOB", "cluster")),
        *map(soak, ("metrics JOB", "metrics JOB --together", "checkpoints JOB")),
        *map(soak, ("wait JOB", "download JOB DEST")),
    ],
)
def test_a_pipe_gets_no_escape_sequence(
    server: LiveServer, finished: str, tmp_path: Path, command: str
) -> None:
    words = command.replace("JOB", finished).replace("DEST", str(tmp_path)).split()
    run = as_process("--url", server.url, *words, FORCE_COLOR="", COLUMNS="80")
    assert run.returncode == 0, run.stderr
    assert "\x1b" not in run.stdout + run.stderr
    assert run.stdout


@ONE_SET
@pytest.mark.parametrize("command", ["logs {}", "metrics {} --csv", "events {}", "logs -f {}"])
def test_a_closed_pipe_is_no_error(server: LiveServer, command: str) -> None:
    import subprocess
    import sys

    job_id = server.submit()
    points = [metrics(n, {f"k{k}": 1.0 for k in range(20)}) for n in range(300)]
    server.train(job_id, *(log(n, "x" * 1000) for n in range(500)), *points)
    server.succeed(job_id)
    line = f"{sys.executable} -m dray.cli --url {server.url} {command.format(job_id)} | head -n 1"
    run = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert len(run.stdout.splitlines()) == 1
