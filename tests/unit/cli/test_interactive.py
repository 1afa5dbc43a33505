"""On a terminal: progress bars, Ctrl-C and completion, and how little is imported for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dray.cli.exits import Exit
from tests.marks import ONE_SET
from tests.unit.api.serving import LiveServer, wait_until
from tests.unit.cli.running import OnTerminal, as_process
from tests.unit.service.helpers import log, metrics

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
HEAVY = {"httpx", "httpcore", "h11", "pydantic", "yaml", "rich", "asyncio", "ssl", "torch", "ray"}


@ONE_SET
@pytest.mark.parametrize(
    "command",
    ["watch {}", "logs -f {}", "events -f {}", "metrics -f {}", "get --wait {}", "wait {}"],
)
def test_ctrl_c_leaves_the_terminal_sane_and_says_that_the_job_goes_on(
    server: LiveServer, command: str
) -> None:
    job_id = server.submit()
    screen = OnTerminal("--url", server.url, *command.format(job_id).split())
    wait_until(lambda: server.num_waiting(job_id), "the command to wait")
    if command == "watch {}":
        screen.until(lambda shown: "QUEUED" in shown)
    screen.interrupt()
    assert screen.end() == Exit.INTERRUPTED
    assert "the job continues" in screen.shown or "the jobs continue" in screen.shown
    assert "Traceback" not in screen.shown
    assert screen.shown.rfind(SHOW) >= screen.shown.rfind(HIDE)


def test_a_watched_job_has_a_bar_within_80_columns(server: LiveServer) -> None:
    from rich.text import Text

    job_id = server.submit()
    screen = OnTerminal("--url", server.url, "watch", job_id)
    wait_until(lambda: server.num_waiting(job_id), "the watcher")
    values = {"train/loss": 0.123456}
    server.train(job_id, metrics(1200, values, total_steps=10000, samples_per_s=12345.6))
    screen.until(lambda shown: "1200/10000" in shown)
    server.succeed(job_id)
    assert screen.end() == 0
    frames = screen.shown.replace("\r", "\n").splitlines()
    bars = [Text.from_ansi(frame).plain for frame in frames if "1200/10000" in frame]
    assert all(len(bar) <= 80 for bar in bars)
    assert screen.shown.rstrip().endswith("DEST")


def test_a_download_has_a_bar_on_standard_error_alone(
    server: LiveServer, finished: str, tmp_path: Path
) -> None:
    screen = OnTerminal("--url", server.url, "download", finished, str(tmp_path))
    assert screen.end() == 0
    assert "model.bin" in screen.shown
    assert screen.shown.rfind(SHOW) > screen.shown.rfind(HIDE) >= 0
    run = as_process("--url", server.url, "download", finished, str(tmp_path))
    assert (run.stdout.split(), run.stderr) == ([str(tmp_path / "model.bin")], "")


def test_logs_bring_their_colours_and_nothing_else_to_a_terminal(server: LiveServer) -> None:
    job_id = server.submit()
    server.train(job_id, log(0, "\x1b[31mred\x1b[0m \x1b[2J\x1b]0;title\x07[bold]"))
    server.succeed(job_id)
    screen = OnTerminal("--url", server.url, "logs", job_id)
    assert screen.end() == 0
    assert screen.shown.strip() == "[1:0] \x1b[31mred\x1b[0m [bold]\x1b[0m"


def completed(words: str, url: str, shell: str = "zsh") -> str:
    """Return what a shell would offer for the command line `words`."""
    run = as_process(
        _DRAY_COMPLETE=f"complete_{shell}",
        _TYPER_COMPLETE_ARGS=words,
        COMP_WORDS=words,
        COMP_CWORD=str(len(words.split()) - (not words.endswith(" "))),
        DRAY_URL=url,
    )
    return run.stdout


def assert_offered(what: str, words: str, url: str) -> None:
    """Ask repeatedly, because a slow server may not answer within the one second that it has."""
    wait_until(lambda: what in completed(words, url), f"{what} to be offered")


def test_the_shell_is_offered_jobs_and_states(server: LiveServer) -> None:
    job_id = server.submit(name="named [bold]")
    assert_offered(job_id, "dray get ", server.url)
    assert_offered("named [bold] QUEUED", f"dray get {job_id[:-1]}", server.url)
    assert completed("dray get job-nobody", server.url).count("job-") == 0
    assert "SUCCEEDED" in completed("dray ls --state SU", server.url)
    assert_offered(job_id, f"dray --url {server.url} logs ", "http://127.0.0.1:9")


def test_without_a_server_the_shell_is_offered_nothing_and_no_error(server: LiveServer) -> None:
    run = completed("dray get ", "http://127.0.0.1:9")
    assert "job-" not in run
    assert "Traceback" not in run
    assert "Traceback" not in completed("dray get ", "nowhere")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_printed(shell: str) -> None:
    run = as_process(_DRAY_COMPLETE=f"source_{shell}")
    assert run.returncode == 0
    assert "_DRAY_COMPLETE" in run.stdout


def loaded_by(statements: str) -> set[str]:
    code = f"import sys; {statements}; print('loaded', *sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize("arguments", ["--help", "--version", "submit --help", "ls --limit 0"])
def test_what_needs_no_server_loads_no_client(arguments: str) -> None:
    loaded = loaded_by(f"from dray.cli.app import run; run({arguments.split()!r})")
    whole_command = not arguments.startswith("--")  # typer reads its options with pydantic
    assert not loaded & (HEAVY - {"pydantic"} if whole_command else HEAVY)


def test_listing_loads_no_more_than_it_needs(server: LiveServer, finished: str) -> None:
    for command in (["ls"], ["logs", finished], ["metrics", finished, "--plot"]):
        loaded = loaded_by(
            f"from dray.cli.app import run; run({['--url', server.url, *command]!r})"
        )
        assert "httpx" in loaded
        assert not loaded & {"rich", "pygments", "yaml", "asyncio", "torch", "dray.spec"}
