"""Arrays, and jobs that depend on others, on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dray.cli.exits import Exit
from ray_workers.shared.contracts import Cause
from tests.unit.api.serving import LiveServer
from tests.unit.cli.running import Cli


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text("recipe: image_classification\n")
    return str(path)


def submitted(cli: Cli, *arguments: str) -> str:
    return cli("submit", *arguments).split()[0]


def test_an_array_is_submitted_and_is_one_line_of_the_list(cli: Cli, document: str) -> None:
    options = ("--array", "3", "--max-running", "2", "--name", "sweep-1")
    said = cli("submit", document, *options)
    array_id = said.split()[0]
    assert said == f"{array_id} 3 jobs: 3 QUEUED\n"
    (line,) = cli("ls", "--name", "sweep-1").splitlines()[1:]
    assert line.split()[:4] == [array_id, "sweep-1", "3", "QUEUED"]
    assert line.endswith("3 jobs, 2 at a time")
    assert len(cli("ls", "--name", "sweep-1", "--each").splitlines()) == 4
    for reference in (array_id, array_id[:20], "sweep-1"):
        assert len(cli("ls", "--array", reference).splitlines()) == 4
    assert len(cli("accounting", "--array", "sweep-1").splitlines()) == 2
    (alone,) = cli("submit", document, "--name", "alone").splitlines()
    cli("ls", "--array", "alone", exits=Exit.USAGE)
    assert "'alone' is not an array" in cli.err
    cli("cancel", alone.split()[0])
    found = cli.json("ls", "--name", "sweep-1")
    assert [job["array_index"] for job in found] == [2, 1, 0]
    assert f"array      {array_id}, index 2" in cli("get", f"{array_id}/2").splitlines()
    for reference in (array_id, array_id[:16], "sweep-1"):
        assert "states     3 QUEUED" in cli("get", reference).splitlines()
    cli("get", f"{array_id}/3", exits=Exit.REFUSED)
    cli("events", array_id, exits=Exit.REFUSED)
    assert f"this is the id of an array; its first job is {array_id}/0" in cli.err
    for command in (("events",), ("submit", "--dry-run", "--like")):
        cli(*command, "sweep-1", exits=Exit.USAGE)
        assert (
            "matches 3 jobs: to select one job of an array or sweep, give sweep-1/INDEX, such as"
            in cli.err
        )
    assert cli("events", "sweep-1/2")


def test_an_array_is_waited_for_cancelled_and_deleted(
    cli: Cli, server: LiveServer, document: str
) -> None:
    array_id = submitted(cli, document, "--array", "2", "--name", "sweep-2")
    assert cli("wait", array_id, "--timeout", "0.1", exits=Exit.TIME_WAS_UP) == ""
    assert f"array {array_id} is still 2 QUEUED after 0.1 s" in cli.err
    assert cli("wait", array_id, "--state", "queued").split()[0] == array_id
    cli("delete", array_id, "-y", exits=Exit.REFUSED)
    first = cli.json("get", f"{array_id}/0")["id"]
    server.train(first)
    server.succeed(first)
    said = f"{array_id} 2 jobs: 1 SUCCEEDED, 1 CANCELLED\n"
    assert cli("cancel", "sweep-2") == said
    assert cli("wait", "sweep-2", exits=Exit.JOB_ENDED_BADLY) == said
    assert cli("delete", array_id, "-y") == f"{array_id} deleted\n"
    cli("get", array_id, exits=Exit.REFUSED)


def test_two_arrays_of_a_name_are_told_apart(cli: Cli, document: str) -> None:
    made = [submitted(cli, document, "--array", "2", "--name", "twice") for _ in range(2)]
    cli("cancel", "twice", exits=Exit.USAGE)
    assert [line.split()[0] for line in cli.err.splitlines()[1:]] == made[::-1]


def test_jobs_are_started_after_others(cli: Cli, server: LiveServer, document: str) -> None:
    first = submitted(cli, document, "--name", "the first of a chain")
    options = ("--after", "the first of a chain", "--after-any", submitted(cli, document))
    second = submitted(cli, document, *options)
    after = cli.json("get", second)["spec"]["after"]
    assert [(entry["job"] == first, entry["on"]) for entry in after] == [
        (True, "success"),
        (False, "end"),
    ]
    server.train(first)
    server.hands.end(first, 1, Cause.BAD_DATA)
    assert f"on the success of {first}, which failed" in cli("get", second)
    cli("submit", document, "--after", first, exits=Exit.USAGE)
    assert "hint: use `on: end` to start the job after the other job has ended" in cli.err
    cli("submit", document, "--after", "nothing of this name", exits=Exit.REFUSED)


def test_an_array_is_not_watched(cli: Cli, document: str) -> None:
    cli("submit", document, "--array", "2", "--watch", exits=Exit.USAGE)
    assert "use dray wait ARRAY" in cli.err


def test_a_dry_run_says_how_many_jobs_it_would_be(cli: Cli, document: str) -> None:
    assert "describes an array of 7: " in cli("submit", document, "--array", "7", "--dry-run")


def test_a_job_of_an_array_is_found_by_the_name_and_its_index(cli: Cli, document: str) -> None:
    older, newer = (submitted(cli, document, "--array", "2", "--name", "by-name") for _ in range(2))
    assert cli.json("get", f"{newer}/1")["id"] == cli.json("get", "by-name/1")["id"]
    assert (
        f"2 jobs are named by-name: using the newest, {cli.json('get', f'{newer}/1')['id']}"
        in (
            cli("get", "by-name/1"),
            cli.err,
        )[1]
    )
    first = cli.json("get", f"{older}/0")["id"]
    for command in ("explain", "metrics", "logs", "events", "attempts", "checkpoints", "artifacts"):
        cli(command, "by-name/0")
        assert "using the newest" in cli.err
    cli("cancel", "by-name/0", exits=Exit.USAGE)
    assert "'by-name/0' matches 2 jobs" in cli.err
    assert first in cli.err
    assert cli.json("get", first)["state"] == "QUEUED"
    cli("delete", older, "-y", exits=Exit.REFUSED)
    cli("cancel", older)
    cli("delete", older, "-y")
    assert cli("cancel", "by-name/0").split()[0] == cli.json("get", f"{newer}/0")["id"]
    cli("get", "by-name/2", exits=Exit.REFUSED)
    assert "there is no job by-name/2" in cli.err


def test_commands_that_only_read_take_the_newest_of_a_name(cli: Cli, server: LiveServer) -> None:
    older, newer = (server.submit(name="same") for _ in range(2))
    for command in ("get", "explain", "events", "metrics"):
        cli(command, "same")
        assert f"2 jobs are named same: using the newest, {newer}, created 20" in cli.err
    for command in (("cancel",), ("hold",), ("annotate", "--tag", "x"), ("delete", "-y")):
        cli(command[0], "same", *command[1:], exits=Exit.USAGE)
        assert older in cli.err
        assert newer in cli.err
    assert cli.json("annotate", newer)["tags"] == []
    assert cli.json("wait", "same", "--state", "QUEUED")["id"] == newer
    cli("get", newer[:8], exits=Exit.USAGE)  # a prefix of several ids
    assert f"'{newer[:8]}' matches" in cli.err


def test_the_list_takes_a_pattern_of_names(cli: Cli, server: LiveServer) -> None:
    made = [server.submit(name=f"glob-{number}") for number in range(3)]
    assert [job["id"] for job in cli.json("ls", "--name", "glob-?")] == made[::-1]
    assert [job["id"] for job in cli.json("ls", "--name", "*lob-1")] == [made[1]]
    assert cli.json("ls", "--name", "glob") == []


def test_an_array_is_held_moved_and_limited_as_a_whole(
    cli: Cli, server: LiveServer, document: str
) -> None:
    server.queue("cli-arrays")
    array_id = submitted(cli, document, "--array", "3", "--name", "whole")
    server.train(cli.json("get", f"{array_id}/0")["id"])
    cli("cancel", f"{array_id}/2")
    skipped = "2 skipped (1 job_finished, 1 job_not_waiting)"
    assert cli("hold", "whole") == f"{array_id}: 1 job changed, {skipped}\n"
    assert cli("hold", array_id) == (
        f"{array_id}: 0 jobs changed, 1 already as requested, {skipped}\n"
    )
    assert cli.json("get", f"{array_id}/1")["held_by"] == "anonymous"
    assert cli.json("release", "whole")["changed"] == 1
    assert cli("move", array_id, "--queue", "cli-arrays").startswith(f"{array_id}: 1 job changed")
    assert (
        cli("priority", array_id, "61")
        == f"{array_id}: 2 jobs changed, 1 skipped (1 job_finished)\n"
    )
    assert cli("max-running", "whole", "1").startswith(f"{array_id}: 2 jobs changed")
    assert cli.json("get", array_id)["max_running"] == 1
    cli("max-running", array_id, "none")
    assert cli.json("get", array_id)["max_running"] is None
    cli("max-running", array_id, "0", exits=Exit.USAGE)
    cli("max-running", array_id, "few", exits=Exit.USAGE)
    skipped = "2 skipped (1 job_finished, 1 job_not_running)"
    assert cli("preempt", array_id, "--grace", "9") == f"{array_id}: 1 job changed, {skipped}\n"
    cli("hold", "array-missing", exits=Exit.REFUSED)


def test_lists_of_indices_are_accepted_by_commands(cli: Cli, document: str) -> None:
    array_id = submitted(cli, document, "--array", "12", "--name", "listed")
    ids = {job["array_index"]: job["id"] for job in cli.json("ls", "--array", array_id)}

    def held() -> set[int]:
        return {job["array_index"] for job in cli.json("ls", "--array", array_id) if job["held_by"]}

    lines = cli("hold", "listed/1,3,5-7").splitlines()
    assert [line.split()[0] for line in lines] == [ids[index] for index in (1, 3, 5, 6, 7)]
    cli("release", f"{array_id[:20]}/1,5-6", f"{array_id}/3")
    assert held() == {7}
    for wrong in (f"{array_id}/7-12", "listed/0-40:20", f"{array_id}/0-999999999999999999"):
        cli("hold", f"{array_id}/8", wrong, exits=Exit.REFUSED)
        assert "has no job with the index " in cli.err
        assert held() == {7}, "nothing is changed"
    cli("cancel", "listed/5-3", exits=Exit.REFUSED)
    assert "'5-3' in listed/5-3 contains no index" in cli.err
    cli("events", "listed/1,3", exits=Exit.REFUSED)
    assert "hint: specify a single index, such as ARRAY/3" in cli.err
    assert len(cli("cancel", "listed/0-10:2").splitlines()) == 6
    assert len(cli("wait", "listed/0-4:2", exits=Exit.JOB_ENDED_BADLY).splitlines()) == 3
    assert len(cli("delete", "-y", "listed/0,2").splitlines()) == 2
    cli("get", "listed/2", exits=Exit.REFUSED)
    cli("delete", "-y", "listed/0,4", exits=Exit.REFUSED)
    assert "has no job with the index 0" in cli.err
    literal = submitted(cli, document, "--name", "listed/1-3")
    assert cli("hold", "listed/1-3").split()[0] == literal
