"""Commands that change all jobs that a search matches."""

from __future__ import annotations

import json

import pytest

from dray.cli.exits import Exit
from tests.unit.api.serving import LiveServer
from tests.unit.cli.running import Cli, OnTerminal


def test_matching_jobs_are_held_and_cancelled(cli: Cli, server: LiveServer) -> None:
    server.submit(name="another")
    first, second = (server.submit(name="bulk-1") for _ in range(2))
    where = ("--where", 'name = "bulk-1"')
    listed = f"  {second}\n  {first}\n"
    assert cli("hold", *where, "--dry-run") == f"hold: 2 jobs would be changed\n{listed}"
    cli("hold", *where, exits=Exit.USAGE)
    assert "Hold 2 jobs? Without a terminal, confirm with --yes" in cli.err
    assert cli.json("get", first)["held_by"] is None
    cli("hold", *where, "--yes", "--expect", "3", exits=Exit.REFUSED)
    assert "2 jobs match, but --expect is 3" in cli.err
    cli("hold", first)
    assert cli("hold", *where, "--yes", "--expect", "2") == (
        f"hold: 1 job changed\n  {second}\n1 job already as requested\n"
    )
    assert cli.json("release", *where, "-y")["changed"] == 2
    assert cli.json("priority", *where, "-y", "33")["changed"] == 2
    assert {cli.json("get", job)["priority"] for job in (first, second)} == {33}
    server.queue("cli-bulk")
    assert cli.json("move", *where, "-y", "--queue", "cli-bulk")["changed"] == 2
    assert cli("annotate", *where, "-y", "--tag", "bad").startswith("tag: 2 jobs changed\n")
    assert cli.json("annotate", first)["tags"] == ["bad"]
    server.train(first)
    assert cli.json("preempt", *where, "-y", "--grace", "9")["changed"] == 1
    assert cli.json("cancel", *where, "-y", "--state", "QUEUED")["jobs"] == [second]
    cli("cancel", *where, "-y")
    server.succeed(first)
    assert cli.json("delete", *where, "-y")["changed"] == 2
    assert cli("cancel", *where, "-y") == "cancel: 0 jobs changed\n"


def test_a_refusal_is_printed_and_exits_with_3(cli: Cli, server: LiveServer) -> None:
    job_id = server.submit(name="bulk-2")
    where = ("--where", 'name = "bulk-2"', "-y")
    lines = cli("move", *where, "--queue", "no-queue", exits=Exit.REFUSED).splitlines()
    assert lines[0] == "move: 0 jobs changed"
    assert lines[1].startswith("1 job refused (unknown_queue): there is no queue 'no-queue'")
    assert cli.json("get", job_id)["queue"] == "default"


def test_a_search_that_matches_everything_needs_the_number(cli: Cli, server: LiveServer) -> None:
    for _ in range(2):
        server.submit(name="bulk-3")
    number = len(cli.json("ls", "--state", "QUEUED", "--all"))
    where = ("--where", "priority >= 0", "-y")
    cli("hold", *where, exits=Exit.REFUSED)
    assert f"the filter matches all jobs, so the number of jobs to change, {number}, " in cli.err
    assert "give their number as --expect" in cli.err
    cli("hold", "--where", "", "-y", exits=Exit.USAGE)
    assert cli.json("hold", *where, "--expect", str(number))["refused"] == 0
    cli("release", *where, "--expect", str(number))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hold",), "specify jobs, or select jobs with --where"),
        (("hold", "job-1", "--where", "priority > 0"), "specify jobs, or select jobs with --where"),
        (("cancel", "--all", "--where", "priority > 0"), "can't be combined with --where"),
        (("cancel", "job-1", "--dry-run"), "requires --where"),
        (("annotate", "--where", "priority > 0", "--notes", "x"), "--tag"),
        (("priority", "--where", "priority > 0"), "N"),
    ],
)
def test_wrong_usage_is_refused(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    cli(*arguments, exits=Exit.USAGE)
    assert message in cli.err


def test_on_a_terminal_the_number_is_shown_and_confirmed(server: LiveServer) -> None:
    job_id = server.submit(name="bulk-4")
    command = ("hold", "--where", 'name = "bulk-4"')
    for answer, code, is_held in (("n", Exit.INTERRUPTED, False), ("y", Exit.OK, True)):
        shown = OnTerminal("--url", server.url, *command)
        shown.until(lambda text: "Hold 1 job? [y/N]" in text)
        assert job_id in shown.shown
        shown.type(f"{answer}\n")
        assert shown.end() == code
        found = json.loads(server.ask("GET", f"/v1/jobs/{job_id}").content)
        assert (found["held_by"] is not None) is is_held
