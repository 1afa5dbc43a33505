from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from dray import Client
from dray.cli.display.output import duration, number, show_job, size
from dray.cli.display.watch import _bar, ending, status, watch
from dray.views import Job, JobState, Links, MemoryCopies, Progress, Reason
from service.cluster.port import ClusterSnapshot
from service.nodes import node_table
from tests.unit.api.serving import LiveServer, serving, wait_until
from tests.unit.service.helpers import metrics
from tests.wire import cluster_node

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def job(state: JobState, **more: Any) -> Job:
    links = Links(self="", metrics="", logs="", events="", artifacts="")
    fields = {
        "id": "job-x",
        "name": "x",
        "owner": "ann",
        "project": "p",
        "labels": {},
        "state": state,
        "reason": Reason(code="because", message="that is so"),
        "queue": "default",
        "priority": 50,
        "spec": {},
        "attempt": 1,
        "world_size": 2,
        "summary": {},
        "created_at": BEGAN,
        "links": links,
    }
    return Job.model_validate({**fields, **more})


def ends(earliest_s: float, latest_s: float) -> dict[str, Any]:
    """Return the fields for an expected end in this many seconds."""
    now = datetime.now(UTC)
    times = [now + timedelta(seconds=seconds) for seconds in (earliest_s, latest_s)]
    return dict(zip(("earliest_end_at", "latest_end_at"), times, strict=True))


PROGRESS = Progress(step=5, total_steps=20, epoch=0, samples_per_s=1234.5)


def test_a_waiting_job_says_why() -> None:
    assert status(job(JobState.QUEUED)) == "QUEUED: that is so"


def test_a_running_job_says_how_far_how_good_how_fast_and_how_long() -> None:
    progress = PROGRESS.model_copy(update=ends(3715, 7315))
    running = job(JobState.RUNNING, progress=progress, summary={"train/loss": 0.123456})
    assert status(running) == "step 5/20, loss 0.1235, 1,234 samples/s, ETA 1h01m-2h01m"


def test_a_loss_that_is_no_number_and_a_length_nobody_knows_are_said_so() -> None:
    progress = Progress(step=5)
    running = job(JobState.RUNNING, progress=progress, summary={"train/loss": "NaN"})
    assert status(running) == "step 5/?, loss NaN"


def test_a_job_that_was_stopped_in_training_says_why_and_not_how_fast() -> None:
    assert status(job(JobState.RECOVERING, progress=PROGRESS)) == "RECOVERING: that is so"


def test_the_end_has_the_state_the_time_and_the_figures() -> None:
    done = job(
        JobState.SUCCEEDED,
        progress=PROGRESS,
        summary={"val/accuracy": 0.975, "train/loss": 0.1},
        started_at=BEGAN + timedelta(seconds=60),
        finished_at=BEGAN + timedelta(seconds=72.5),
    )
    assert ending(done) == [
        "job-x SUCCEEDED after 12.5 s: that is so",
        "  step 5/20",
        "  train/loss 0.1, val/accuracy 0.975",
        "  get the results with: dray download job-x DEST",
    ]


def test_the_end_of_a_failed_job_says_where_to_look() -> None:
    failed = job(JobState.FAILED, finished_at=BEGAN + timedelta(seconds=3))
    assert ending(failed) == [
        "job-x FAILED after 3.0 s: that is so",
        "  see why with: dray logs job-x",
    ]


def test_a_job_that_failed_before_its_first_attempt_has_no_logs_to_look_at() -> None:
    failed = job(JobState.FAILED, attempt=0, finished_at=BEGAN + timedelta(seconds=3))
    assert ending(failed) == ["job-x FAILED after 3.0 s: that is so"]


def test_a_warning_is_said_at_the_end_and_with_the_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warned = job(JobState.SUCCEEDED, warnings=[Reason(code="diverges", message="the loss is NaN")])
    assert "  warning: the loss is NaN" in ending(warned)
    show_job(warned)
    assert "warning    the loss is NaN" in capsys.readouterr().out


def test_the_newest_copy_in_memory_is_shown_with_the_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    copies = MemoryCopies(step=150, state_bytes=6 << 30, worker_bytes=3 << 29)
    show_job(job(JobState.RUNNING, memory_copies=copies))
    assert "in memory  step 150, 6.0 GiB\n" in capsys.readouterr().out
    show_job(job(JobState.RUNNING))
    assert "in memory" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0.0 s"), (59.94, "59.9 s"), (60, "1m00s"), (7440.9, "2h04m")]
)
def test_durations_read_easily(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")]
)
def test_sizes_read_easily(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_numbers_have_four_figures() -> None:
    assert [number(value) for value in (0.123456, 17970.3, -12345678.0, 1.2345e9, "NaN", None)] == [
        "0.1235",
        "17,970",
        "-12,350,000",
        "1.234e+09",
        "NaN",
        "-",
    ]


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[LiveServer]:
    """A server whose cluster is reachable: rates are only shown in this case."""
    with serving(tmp_path / "home") as server:
        node = cluster_node("node-a", {"CPU": 64.0})
        seen = ClusterSnapshot("session-1", "ray://x", "", False, (node,))
        hands = server.hands
        hands.database.write_sync(lambda session: node_table.store(session, seen, None, hands.now))
        yield server


def test_a_terminal_shows_a_bar_that_fills_and_the_end_below_it(
    own_server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server = own_server
    job_id = server.submit()

    def train() -> None:
        wait_until(lambda: server.num_waiting(job_id), "the watcher")
        server.train(job_id, metrics(5, {"train/loss": 0.5}, total_steps=20, samples_per_s=1000.0))
        wait_until(lambda: "5/20" in screen.getvalue(), "the bar to move")
        server.succeed(job_id, metrics(20, {"train/loss": 0.25}, total_steps=20))

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    thread = threading.Thread(target=train)
    thread.start()
    with Client(server.url) as client:
        done = watch(client, job_id, console=console)
    thread.join()
    assert done.state is JobState.SUCCEEDED
    assert "QUEUED" in screen.getvalue()
    assert "25%" in screen.getvalue()
    assert "1,000 samples/s" in screen.getvalue()
    assert "100%" in screen.getvalue()
    assert f"{job_id} SUCCEEDED after" in capsys.readouterr().out


def test_without_a_terminal_each_state_is_a_line(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = server.submit()

    def train() -> None:
        wait_until(lambda: server.num_waiting(job_id), "the watcher")
        server.train(job_id, metrics(5, {"train/loss": 0.5}, total_steps=20))
        server.succeed(job_id)

    thread = threading.Thread(target=train)
    thread.start()
    with Client(server.url) as client:
        watch(client, job_id)
    thread.join()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{job_id} QUEUED: ")
    assert any(line.startswith(f"{job_id} SUCCEEDED after") for line in lines)
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_bar_gives_way_to_the_figures_and_the_eta(width: int) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    progress = Progress(step=1200, total_steps=10000, samples_per_s=12345.6, **ends(4375, 4495))
    running = job(JobState.RUNNING, progress=progress, summary={"train/loss": 0.123456})
    with _bar(console) as shown:
        shown.show(running)
    frame = screen.getvalue().split("\r")[-1].strip()
    text = Text.from_ansi(frame).plain.splitlines()[0]
    assert len(text) <= width
    assert "step 1200/10000, loss 0.1235, 12,346 samples/s, ETA 1h12m-1h14m" in text


def test_a_reason_that_would_steer_the_terminal_does_not() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    reason = Reason(code="x", message="two\nlines [bold]\x1b]0;title\x07\x1b[2J")
    with _bar(console) as shown:
        shown.show(job(JobState.QUEUED, reason=reason))
    assert "two lines [bold]" in screen.getvalue()
    assert "\x1b]0" not in screen.getvalue()
    assert "\x1b[2J" not in screen.getvalue()
