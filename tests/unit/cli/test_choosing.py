"""How a command's jobs are selected: by id, id prefix, name, label and state."""

from __future__ import annotations

import json

import pytest

from dray.cli.exits import Exit
from tests.marks import ONE_SET
from tests.unit.api.serving import LiveServer
from tests.unit.cli.running import Cli, OnTerminal


def test_a_job_is_named_by_its_id_how_that_begins_its_name_or_as_the_last(
    cli: Cli, server: LiveServer
) -> None:
    job_id = server.submit(name="the only one of this name")
    beginning = next(
        job_id[:length]
        for length in range(5, 30)
        if len(server.ask("GET", f"/v1/jobs?id_prefix={job_id[:length]}").json()["items"]) == 1
    )
    for reference in (job_id, beginning, "the only one of this name", "@last"):
        for command in ("get", "explain"):
            assert cli(command, reference)
        assert cli.json("get", reference)["id"] == job_id
        assert cli("events", reference).splitlines()
    assert cli("cancel", beginning).split()[0] == job_id


@pytest.mark.parametrize("name", [".", "..", "a/0", "a/b", "%2F", "?x=1"])
def test_a_name_may_look_like_a_path(cli: Cli, server: LiveServer, name: str) -> None:
    job_id = server.submit(name=name)
    assert cli.json("get", name)["id"] == job_id


def test_a_name_of_several_jobs_means_none_of_them(cli: Cli, server: LiveServer) -> None:
    made = [server.submit(name="ambiguous") for _ in range(2)]
    assert cli("cancel", "ambiguous", exits=2) == ""
    assert "'ambiguous' matches 2 jobs" in cli.err
    lines = cli.err.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [[job, "QUEUED"] for job in made[::-1]]
    assert cli("get", "job-0", exits=2) == ""
    assert "matches more than 10 jobs" in cli.err or "jobs: specify a complete id" in cli.err


def test_jobs_are_stopped_and_deleted_by_label_and_state(cli: Cli, server: LiveServer) -> None:
    labels = {"sweep": "choose"}
    first, second = (server.submit(labels=labels) for _ in range(2))
    other = server.submit(labels={"sweep": "other"})
    by_label = ("--label", "sweep=choose")
    assert cli("cancel", *by_label, exits=2) == ""
    assert "Stop 2 jobs?" in cli.err
    stopped = cli("cancel", *by_label, "--yes").splitlines()
    assert {line.split()[0] for line in stopped} == {first, second}
    assert cli("cancel", *by_label) == ""
    assert cli.err == "no matching jobs\n"
    assert cli("delete", *by_label, "--state", "failed", "-y") == ""
    lines = cli("delete", *by_label, "--state", "cancelled", "-y", "--json").splitlines()
    assert {json.loads(line)["deleted"] for line in lines} == {first, second}
    assert cli.json("get", other)["state"] == "QUEUED"


def test_jobs_are_waited_for_by_label(cli: Cli, server: LiveServer) -> None:
    job_id = server.submit(labels={"sweep": "wait"})
    by_label = ("--label", "sweep=wait")
    assert cli("wait", *by_label, "--timeout", "0.2", exits=Exit.TIME_WAS_UP) == ""
    assert cli("wait", *by_label, "--state", "QUEUED").split()[:2] == [job_id, "QUEUED:"]
    server.train(job_id)
    server.succeed(job_id)
    assert cli("wait", *by_label).split()[:2] == [job_id, "SUCCEEDED:"]
    assert cli("wait", "--label", "sweep=none", exits=Exit.REFUSED) == ""
    assert cli.err == "no matching jobs\n"


def test_a_job_of_a_label_that_ended_badly_before_the_wait_is_not_missed(
    cli: Cli, server: LiveServer
) -> None:
    cancelled, job_id = (server.submit(labels={"sweep": "ended"}) for _ in range(2))
    cli("cancel", cancelled)
    server.train(job_id)
    server.succeed(job_id)
    lines = cli("wait", "--label", "sweep=ended", exits=Exit.JOB_ENDED_BADLY).splitlines()
    assert {line.split()[0] for line in lines} == {cancelled, job_id}


def test_jobs_that_are_waited_for_together_name_the_time_that_they_share(
    cli: Cli, server: LiveServer
) -> None:
    jobs = [server.submit() for _ in range(2)]
    assert cli("wait", *jobs, "--timeout", "0.2", exits=Exit.TIME_WAS_UP) == ""
    assert cli.err.count("is still QUEUED after 0.2 s") == 2


def test_whose_jobs_are_chosen_is_the_callers_unless_another_is_named(
    cli: Cli, server: LiveServer
) -> None:
    job_id = server.submit(labels={"sweep": "owner"})
    assert cli("cancel", "--label", "sweep=owner", "--owner", "ann", "-y") == ""
    assert cli("cancel", "--label", "sweep=owner", "--owner", "default", "-y").split()[0] == job_id


@pytest.mark.parametrize("command", ["cancel", "delete", "wait"])
@pytest.mark.parametrize("which", [(), ("job-x", "--all"), ("--label", "novalue")])
def test_a_command_line_must_say_which_jobs_in_one_way(
    cli: Cli, command: str, which: tuple[str, ...]
) -> None:
    assert cli(command, *which, exits=2) == ""


@ONE_SET
@pytest.mark.parametrize(("answer", "deleted"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_on_a_terminal_a_deletion_is_asked_for(
    server: LiveServer, answer: str, deleted: bool
) -> None:
    job_id = server.submit(name="asked")
    server.ask("POST", f"/v1/jobs/{job_id}/cancel")
    screen = OnTerminal("--url", server.url, "delete", job_id)
    screen.until(lambda shown: "[y/N]" in shown)
    screen.type(answer)
    assert screen.end() == (0 if deleted else Exit.INTERRUPTED)
    assert ("deleted" in screen.shown) == deleted
    assert ("nothing was changed" in screen.shown) != deleted
    assert server.ask("GET", f"/v1/jobs/{job_id}").status_code == (404 if deleted else 200)
