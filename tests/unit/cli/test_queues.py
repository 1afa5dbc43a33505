"""Commands for queues and the queue positions of jobs: their output, and their errors."""

from __future__ import annotations

import json

import pytest

from tests.unit.api.serving import LiveServer
from tests.unit.cli.running import Cli


def test_a_queue_is_set_listed_shown_and_deleted(cli: Cli) -> None:
    shown = cli(
        *("queue", "set", "cli-night", "--weight", "2", "--quota", "GPU=4", "--limit", "GPU=8"),
        *("--user-weight", "ann=2.5", "--user-weight", "bob=0.5"),
        *("--limit", "memory=64GiB", "--max-running-per-user", "2", "--max-queued", "20"),
        *("--max-priority", "60"),
    )
    assert shown.splitlines() == [
        "name       cli-night",
        "weight     2",
        "weights    ann 2.5, bob 0.5; other users 1",
        "quota      4 GPU",
        "limit      8 GPU, 64.0 GiB of memory, 20 waiting",
        "each user  2 running",
        "priority   up to 60",
        "waiting    0",
        "running    0",
        "holds      -",
    ]
    assert cli("queue", "show", "cli-night") == shown
    changed = cli("queue", "set", "cli-night", "--limit", "memory=none", "--max-queued", "none")
    assert "limit      8 GPU\n" in changed
    assert "weight     2\n" in changed
    changed = cli("queue", "set", "cli-night", "--user-weight", "ann=none")
    assert "weights    bob 0.5; other users 1\n" in changed
    assert "weights " not in cli("queue", "set", "cli-night", "--user-weight", "bob=none")
    head, *lines = cli("queue", "ls").splitlines()
    assert head.split() == ["NAME", "WAITING", "RUNNING", "HOLDS", "LIMIT", "QUOTA", "WEIGHT"]
    (line,) = [line for line in lines if line.startswith("cli-night")]
    assert line.split() == ["cli-night", "0", "0", "-", "8", "GPU", "4", "GPU", "2"]
    assert cli.json("queue", "show", "cli-night")["limit"] == {"GPU": 8.0}
    cli("queue", "set", "cli-night", "--max-running", "0")
    (line,) = [one for one in cli("queue", "ls").splitlines() if one.startswith("cli-night")]
    assert "8 GPU, 0 running" in line, "a list that hides why nothing starts misleads"
    assert "cli-night" in [queue["name"] for queue in cli.json("queue", "ls")]
    assert cli("queue", "delete", "cli-night") == "cli-night deleted\n"
    cli("queue", "show", "cli-night", exits=3)
    assert "there is no queue 'cli-night'" in cli.err


def test_the_jobs_of_a_queue_are_shown_by_user(cli: Cli, server: LiveServer) -> None:
    server.queue("cli-users", user_weights={"default": 4})
    server.trains(3, queue="cli-users")
    held = server.submit(queue="cli-users")
    cli("hold", held)
    shown = cli("queue", "show", "cli-users")
    assert "waiting    1 (1 held)\nrunning    1\nholds      3 CPU\n" in shown
    head, line = shown.splitlines()[-2:]
    assert head.split() == ["USER", "WEIGHT", "WAITING", "RUNNING", "HOLDS"]
    assert line.split() == ["default", "4", "1", "1", "3", "CPU"]
    cli("queue", "delete", "cli-users", exits=3)
    assert "2 jobs in the queue 'cli-users' have not ended" in cli.err
    assert "hint: move or cancel these jobs first" in cli.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("queue", "set", "x", "--limit", "GPU"), "write 'GPU' as RESOURCE=AMOUNT"),
        (("queue", "set", "x", "--limit", "GPU=many"), "'many' is neither a number nor 'none'"),
        (
            ("queue", "set", "x", "--limit", "memory=64", "--weight", "nan"),
            "'nan' is neither a number",
        ),
        (("queue", "set", "x", "--limit", "CPU=inf"), "'inf' is neither a number"),
        (("queue", "set", "x", "--max-queued", "1.5"), "'1.5' is neither a whole number"),
        (("queue", "set", "x", "--limit", "gpu=1"), "'gpu' is not a resource"),
        (("queue", "set", "x", "--user-weight", "ann"), "write 'ann' as USER=WEIGHT"),
        (("queue", "set", "x", "--user-weight", "ann=nan"), "'nan' is neither a number"),
        (("queue", "set", "x", "--user-weight", "ann=-1"), "(at /user_weights/ann)"),
        (("queue", "set", "x", "--weight", "0"), "must be greater than 0 (at /weight)"),
        (
            ("queue", "set", "x", "--quota", "GPU=2", "--limit", "GPU=1"),
            "is 1 GPU, which is less than the quota of 2 GPU (at /limit/GPU)",
        ),
        (("move", "@last"), "specify a destination: --queue QUEUE, --first, or both"),
        (("priority", "@last", "101"), "less than or equal to 100"),
        (("move", "@last", "--queue", "defalt"), "there is no queue 'defalt'; the queues are"),
    ],
)
def test_a_mistake_is_a_sentence(
    cli: Cli, server: LiveServer, arguments: tuple[str, ...], said: str
) -> None:
    server.submit()
    cli(*arguments, exits=2)
    assert said in cli.err
    cli("queue", "show", "x", exits=3)


def test_jobs_are_held_released_moved_and_raised(cli: Cli, server: LiveServer) -> None:
    server.queue("cli-day")
    one, two = server.submit(name="cli-one"), server.submit(name="cli-two")
    held = cli("hold", "cli-one", "cli-two", "cli-nobody", exits=3).splitlines()
    assert held == [
        f"{job} QUEUED in default, priority 50: "
        f"is held by anonymous; `dray release {job}` releases it"
        for job in (one, two)
    ]
    assert "there is no job cli-nobody" in cli.err
    assert f"reason     is held by anonymous; `dray release {one}`" in cli("get", one)
    released = cli("release", one)
    assert released.startswith(f"{one} QUEUED in default, priority 50: waits for")
    moved = cli("move", two, one, "--queue", "cli-day", "--first").splitlines()
    assert [line.partition(",")[0] for line in moved] == [
        f"{one} QUEUED in cli-day",
        f"{two} QUEUED in cli-day",
    ]
    assert [job["id"] for job in cli.json("ls", "--queue", "cli-day")] == [two, one]
    assert "in cli-day, priority 90: " in cli("priority", one, "90")
    events = [json.loads(line) for line in cli("events", two, "--json").splitlines()]
    assert [event["code"] for event in events[1:]] == ["held", "moved", "moved_first"]
    assert "queue: is held until it is released, by anonymous (held)" in cli("events", one)


def test_each_answer_is_also_json(cli: Cli, server: LiveServer) -> None:
    job_id = server.submit()
    for command in (("hold",), ("release",), ("move", "--first"), ("priority", "60")):
        name, *rest = command
        told = json.loads(cli(name, job_id, *rest, "--json"))
        assert told["id"] == job_id
    assert told["priority"] == 60
    cli("queue", "set", "cli-json")
    assert json.loads(cli("queue", "delete", "cli-json", "--json")) == {"deleted": "cli-json"}


def test_a_job_that_runs_is_not_held(cli: Cli, server: LiveServer) -> None:
    job_id = server.trains()
    cli("hold", job_id, exits=3)
    assert "only a waiting job can be held" in cli.err
    assert f"hint: `dray preempt {job_id}`" in cli.err


def test_a_tree_of_queues_is_set_listed_and_shown(cli: Cli) -> None:
    cli("queue", "set", "cli-lab", "--limit", "GPU=8")
    cli("queue", "set", "cli-a", "--parent", "cli-lab")
    shown = cli(
        *("queue", "set", "cli-b", "--parent", "cli-lab", "--quota", "GPU=4"),
        *("--borrowing-limit", "GPU=6", "--lending-limit", "GPU=2"),
    )
    assert "parent     cli-lab\n" in shown
    assert "borrows    at most 6 GPU\nlends      at most 2 GPU\n" in shown
    assert "allowed    8 GPU more, according to the limit of cli-lab (8 GPU)\n" in shown
    assert "children   cli-a, cli-b\n" in cli("queue", "show", "cli-lab")
    names = [line.split("  WAITING")[0] for line in cli("queue", "ls", "--tree").splitlines()]
    at = next(number for number, line in enumerate(names) if line.startswith("cli-lab"))
    assert names[at + 1].startswith("  cli-a ")
    assert names[at + 2].startswith("  cli-b ")
    cli("queue", "set", "cli-lab", "--parent", "cli-a", exits=2)
    assert "forms a cycle" in cli.err
    cli("queue", "delete", "cli-lab", exits=3)
    assert "--parent none" in cli.err
    cli("queue", "set", "cli-a", "--parent", "none")
    assert cli.json("queue", "show", "cli-a")["parent"] is None
    for name in ("cli-a", "cli-b", "cli-lab"):
        cli("queue", "delete", name)
