"""Preemption, drills, hangs and goodput on the command line."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from dray.cli.display import output
from dray.cli.exits import Exit
from ray_workers.shared.contracts import Frame
from tests.unit.api.serving import LiveServer, wait_until
from tests.unit.cli.running import Cli
from tests.unit.service.helpers import drilled, hang, regrouped, regrouping, spent


def when_asked(
    server: LiveServer, job_id: str, frames: Callable[[str], list[Frame]]
) -> threading.Thread:
    """Report these frames for the job's first drill once a call is waiting for it."""

    def work() -> None:
        wait_until(lambda: server.num_waiting(job_id), "the command to wait")
        (drill,) = server.ask("GET", f"/v1/jobs/{job_id}/drills").json()["items"]
        server.hands.report(job_id, 1, frames(drill["id"]))

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_drill_waits_and_says_how_it_went(cli: Cli, server: LiveServer) -> None:
    job_id = server.trains()

    def passes(drill_id: str) -> list[Frame]:
        over = drilled(drill_id, "passed", step=50, recovery_s=0.414, steps_lost=0)
        return [drilled(drill_id, "struck", step=50), regrouping(1), regrouped(1), over]

    thread = when_asked(server, job_id, passes)
    said = cli("drill", job_id, "--kill", "--rank", "1", "--at-step", "50")
    thread.join()
    assert said == "recovered in 0.41 s, 0 steps lost\n"
    (drill,) = server.ask("GET", f"/v1/jobs/{job_id}/drills").json()["items"]
    assert (drill["kind"], drill["rank"], drill["at_step"]) == ("kill", 1, 50)


@pytest.mark.parametrize("as_json", [True, False])
def test_a_drill_that_failed_is_an_exit_code(cli: Cli, server: LiveServer, as_json: bool) -> None:
    job_id = server.trains()
    thread = when_asked(
        server, job_id, lambda drill_id: [drilled(drill_id, "failed", message="no such process")]
    )
    more = ["--json"] if as_json else []
    said = cli("drill", job_id, "--stall", *more, exits=Exit.JOB_ENDED_BADLY)
    thread.join()
    assert '"state": "failed"' in said if as_json else said == "failed: no such process\n"


def test_a_drill_that_is_only_asked_for_is_named(cli: Cli, server: LiveServer) -> None:
    job_id = server.trains()
    key = ("--idempotency-key", "once")
    made = cli.json("drill", job_id, "--preempt", "--no-wait", *key)
    said = cli("drill", job_id, "--preempt", "--no-wait", *key)
    assert said == f"{made['id']} waiting: to be injected at once\n"


def test_a_drill_that_can_not_be_says_why(cli: Cli, server: LiveServer) -> None:
    job_id = server.trains()
    cli("drill", job_id, "--kill", "--rank", "2", exits=Exit.USAGE)
    assert "there is no rank 2: the job has ranks 0 to 1 (at /rank)" in cli.err
    waiting = server.submit()
    cli("drill", waiting, "--kill", exits=Exit.REFUSED)
    assert "is QUEUED" in cli.err
    cli("drill", "job-none", "--kill", exits=Exit.REFUSED)
    assert "there is no job job-none" in cli.err


def test_jobs_are_asked_to_leave_and_what_fails_is_told(cli: Cli, server: LiveServer) -> None:
    first, waiting, last = server.trains(), server.submit(), server.trains()
    said = cli("preempt", first, waiting, last, "--grace", "5", exits=Exit.REFUSED)
    assert said.splitlines() == [
        f"{first} (RUNNING) was asked to release its slots",
        f"{last} (RUNNING) was asked to release its slots",
    ]
    assert "it holds no slots" in cli.err
    events = server.ask("GET", f"/v1/jobs/{last}/events").json()["items"]
    assert events[-1]["data"] == {"grace_s": 5.0}
    assert cli.json("preempt", first)["id"] == first
    said = cli("preempt", last, "--hold")
    assert said == f"{last} (RUNNING) was asked to release its slots, and will be held\n"
    events = server.ask("GET", f"/v1/jobs/{last}/events").json()["items"]
    assert events[-1]["code"] == "hold_asked"


def test_hangs_are_shown_with_the_culprit_first(cli: Cli, server: LiveServer) -> None:
    job_id = server.trains()
    assert cli("hangs", job_id) == "no hangs\n"
    stack = "File a.py, line 1\n\x1b[31mFile b.py, line 2"
    server.hands.report(job_id, 1, [hang(1, stack=stack), hang()])
    server.succeed(job_id)
    first, second = cli("hangs", job_id).split("\n\n")
    lines = first.splitlines()
    assert lines[0].startswith("hang 1, attempt 1, ")
    assert lines[1] == ("rank 1 hung in data_wait at step 50 for 12.3 s (the limit was 4.0 s)")
    assert lines[2] == "  rank 1, the culprit; forward; step 50; collective 7; for 9.5 s"
    assert lines[3] == "    File a.py, line 1"
    assert "\x1b" not in first
    assert lines[5].startswith("  rank 0; forward")
    assert "an unknown rank hung" in second
    assert [found["culprits"] for found in cli.json("hangs", job_id)] == [[1], []]


SCRIPT_STACK = """\
Stack (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3 in all_reduce
  File "/v/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/jobs/job-1/train.py", line 7 in step
  File "/jobs/job-1/train.py", line 9 in <module>
  File "<frozen runpy>", line 88 in _run_code
  File "<frozen runpy>", line 291 in run_path
  File "/dray/ray_workers/training/scripts/script.py", line 44 in run_script
  File "/dray/ray_workers/training/process/rank_main.py", line 77 in main
  File "/dray/ray_workers/node/forkserver/forked_child.py", line 71 in run

Thread 0x0001 [loader] (most recent call first):
  File "/v/lib/python3.11/threading.py", line 1 in wait"""


def test_a_stack_of_a_script_begins_with_the_users_line_and_ends_with_the_program(
    cli: Cli, server: LiveServer
) -> None:
    job_id = server.trains()
    ranks = [
        {"rank": 1, "step": 0, "phase": "compute", "collective": "all_reduce", "since_s": 9.5}
        | {"stack": SCRIPT_STACK}
    ]
    server.hands.report(job_id, 1, [hang(1, ranks=ranks)])
    server.succeed(job_id)
    lines = cli("hangs", job_id).splitlines()
    assert lines[2] == "  rank 1, the culprit; in all_reduce; step 0; for 9.5 s"
    assert lines[3] == "    at /jobs/job-1/train.py, line 7 in step"
    shown = [line.strip() for line in lines[4:]]
    main = SCRIPT_STACK.splitlines()
    assert shown == [line.strip() for line in (*main[:5], *main[-3:])]
    whole = [line.strip() for line in cli("hangs", job_id, "--all").splitlines()[4:]]
    assert whole == [line.strip() for line in main]


def test_a_stack_within_dray_is_shown_as_it_is() -> None:
    own = "\n".join(SCRIPT_STACK.splitlines()[7:])
    assert output.of_the_program(own) == own
    assert output.innermost_of_user(own) is None


def test_goodput_is_a_line_of_the_job(cli: Cli, server: LiveServer) -> None:
    job_id = server.trains()

    def line() -> str:
        (found,) = [x for x in cli("get", job_id).splitlines() if x.startswith("goodput")]
        return found

    assert line().split() == ["goodput", "-"]
    server.hands.report(job_id, 1, [regrouping(1), regrouped(1)])
    assert line() == "goodput    recovered once"
    server.hands.report(job_id, 1, [spent(useful=9.0, data_wait=0.6, idle=0.4)])
    assert line() == (
        "goodput    90.0% of 10.0 slot-seconds useful: data wait 0.6, idle 0.4; recovered once"
    )
    again = [regrouping(1, generation=2), regrouped(1, generation=2)]
    server.hands.report(job_id, 1, again)
    assert line().endswith("; recovered 2 times")


def test_the_goodput_of_a_script_that_reports_no_step_is_said_to_be_unknown(
    cli: Cli, server: LiveServer
) -> None:
    job_id = server.trains()
    server.hands.report(job_id, 1, [spent(starting=0.4, unreported=92.3)])
    assert cli.json("get", job_id)["goodput"]["useful_share"] is None
    text = " ".join(cli("get", job_id).split())
    assert (
        "goodput unknown share (no steps were reported) of 92.7 slot-seconds useful: "
        "starting 0.4, unreported 92.3"
    ) in text
