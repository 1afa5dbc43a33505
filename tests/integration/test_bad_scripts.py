"""Badly behaved programs, on a real Ray: each job ends with a clear reason, and leaves nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dray import Client
from dray.views import Job, JobState
from tests.integration.harness import (
    Service,
    assert_nothing_left,
    assert_promises,
    eventually,
    training_pids,
)
from tests.marks import SOAK

pytestmark = pytest.mark.ray

NUM_LINES = 10_000_000
LINE_BYTES = 200 << 20


def submitted(client: Client, folder: Path, program: str, **changes: Any) -> Job:
    """A job with an uploaded program, of one rank unless the changes set more."""
    (folder / "train.py").write_text(program)
    script = {"entrypoint": "train.py", "code": client.upload_code(folder).id}
    script |= changes.pop("script", {})
    return client.submit({"script": script, "max_retries": 0, **changes})


def ended(client: Client, folder: Path, program: str, **changes: Any) -> Job:
    return client.wait(submitted(client, folder, program, **changes).id, timeout_s=240)


def texts(client: Client, job: Job, rank: int = 0) -> list[str]:
    return [line.text for line in client.logs(job.id, rank)]


def test_a_rank_that_ends_with_0_while_the_others_go_on_is_named(
    embedded: Service, client: Client, tmp_path: Path
) -> None:
    program = (
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1:\n"
        "    sys.exit(0)\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    job = ended(client, tmp_path, program, resources={"num_workers": 2})
    assert job.state is JobState.FAILED
    assert "rank 1" in job.reason.message
    assert_promises(embedded, client, job.id)


def test_ranks_that_never_meet_end_as_they_please(
    embedded: Service, client: Client, tmp_path: Path
) -> None:
    program = "import os\nprint('alone', os.environ['RANK'])\n"
    job = ended(client, tmp_path, program, resources={"num_workers": 2})
    assert job.state is JobState.SUCCEEDED, job.reason
    assert [texts(client, job, rank) for rank in (0, 1)] == [["alone 0"], ["alone 1"]]
    assert_promises(embedded, client, job.id)


def test_binary_output_and_a_closed_stdout_harm_neither_the_log_nor_the_end(
    embedded: Service, client: Client, tmp_path: Path
) -> None:
    program = (
        "import os, sys\n"
        "from dray import train\n"
        "os.write(1, bytes(range(256)) + b'\\n')\n"
        "print('last words', flush=True)\n"
        "sys.stdout.close()\n"
        "os.close(1)\n"
        "train.report(1, {'train/loss': 0.5})\n"
        "os.write(2, b'on stderr\\n')\n"
    )
    job = ended(client, tmp_path, program)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert texts(client, job)[-2:] == ["last words", "on stderr"]
    assert client.metrics(job.id).series["train/loss"].values == [0.5]
    assert_promises(embedded, client, job.id)


def test_children_in_sessions_of_their_own_that_write_on_end_with_the_job(
    embedded: Service, client: Client, tmp_path: Path
) -> None:
    program = (
        "import subprocess\n"
        "for _ in range(3):\n"
        "    subprocess.Popen(['yes', 'still here'], start_new_session=True)\n"
        "print('the program ends', flush=True)\n"
    )
    job = ended(client, tmp_path, program)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert_nothing_left(embedded, job.id)
    assert_promises(embedded, client, job.id)


def test_a_program_that_ignores_sigterm_is_cancelled_all_the_same(
    embedded: Service, client: Client, tmp_path: Path
) -> None:
    program = (
        "import signal, threading\n"
        "from dray import train\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "train.report(1, {'train/loss': 0.5})\n"
        "threading.Event().wait()\n"
    )
    job = submitted(client, tmp_path, program)
    eventually(lambda: client.metrics(job.id).series)
    assert training_pids(job.id)
    client.cancel(job.id)
    assert client.wait(job.id, timeout_s=60).state is JobState.CANCELLED
    assert_nothing_left(embedded, job.id)
    assert_promises(embedded, client, job.id)


def test_a_disk_that_takes_no_more_is_named_and_not_charged_to_the_program(
    embedded: Service, client: Client, tmp_path: Path
) -> None:
    # `/dev/full` fails as a full disk does; filling the real one would end the tests beside this.
    program = "with open('/dev/full', 'wb', buffering=0) as file:\n    file.write(bytes(4096))\n"
    job = submitted(client, tmp_path, program)
    reason = eventually(lambda: client.attempts(job.id) and client.attempts(job.id)[0].reason)
    assert reason
    assert reason.code == "infrastructure"
    assert "No space left on device" in reason.message
    client.cancel(job.id)
    client.wait(job.id, timeout_s=60)
    assert_promises(embedded, client, job.id)


@SOAK
def test_ranks_that_wait_for_each_other_are_found_by_the_users_limit(
    embedded: Service, client: Client, tmp_path: Path
) -> None:
    program = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "rank = dist.get_rank()\n"
        "dist.recv(torch.ones(1), src=1 - rank)\n"
    )
    limit = {"hang_limit_s": 10}
    job = ended(client, tmp_path, program, script=limit, resources={"num_workers": 2})
    assert job.state is JobState.FAILED
    assert "made no progress" in job.reason.message
    [hang] = client.hangs(job.id)
    assert [rank.collective for rank in hang.ranks] == ["recv", "recv"]
    assert f"dray hangs {job.id}" in client.explain(job.id).reason.message
    assert_promises(embedded, client, job.id)


@SOAK
def test_ten_million_lines_delay_no_report_and_the_last_line_is_kept(
    embedded: Service, client: Client, tmp_path: Path
) -> None:
    program = (
        "import os, sys\n"
        "from dray import train\n"
        "rank = int(os.environ['RANK'])\n"
        "if rank == 1:\n"
        "    print('a quiet rank', flush=True)\n"
        "    train.report(1, {'train/loss': 0.5})\n"
        "    sys.exit()\n"
        "block = b'line\\n' * 10_000\n"
        f"for number in range({NUM_LINES} // 10_000):\n"
        "    while block[(done := os.write(1, block)):]:\n"
        "        block = block[done:]\n"
        "    block = b'line\\n' * 10_000\n"
        "    train.report(number + 1, {'train/loss': 0.5})\n"
        "print('the end', flush=True)\n"
    )
    document = {"script": {"framework": "none"}, "resources": {"num_workers": 2}}
    job = submitted(client, tmp_path, program, **document)
    eventually(lambda: client.metrics(job.id).series, within_s=60)
    eventually(lambda: "a quiet rank" in texts(client, job, 1), within_s=60)
    assert not client.get(job.id).state.is_terminal, "the flood goes on"
    job = client.wait(job.id, timeout_s=600)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert texts(client, job)[-1] == "the end"
    assert client.metrics(job.id).series["train/loss"].steps[-1] == NUM_LINES // 10_000
    assert_promises(embedded, client, job.id)


@SOAK
def test_one_line_of_200_mb_is_split(embedded: Service, client: Client, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        f"for _ in range({LINE_BYTES >> 20}):\n"
        "    sys.stdout.write('x' * (1 << 20))\n"
        "print('\\nthe end', flush=True)\n"
    )
    job = client.wait(submitted(client, tmp_path, program).id, timeout_s=600)
    assert job.state is JobState.SUCCEEDED, job.reason
    lines = texts(client, job)
    assert lines[-1] == "the end"
    assert max(map(len, lines)) < 10_000
    assert_promises(embedded, client, job.id)
