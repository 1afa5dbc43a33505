"""Tours in the documentation, run word for word: a test has verified what a page shows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from dray import Client
from tests.integration.harness import ROOT

MARK = "=== block"

Block = tuple[str, str]
"""Language (`bash` or `python`) and text."""


def blocks_of(text: str) -> list[Block]:
    """The blocks to run; one in another language, such as `sh` or `yaml`, is only read."""
    return re.findall(r"^```(bash|python)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def as_one_shell(blocks: list[Block]) -> str:
    """Return one script, as if all blocks were pasted into one shell, with a mark before each."""
    parts = ["set -euo pipefail"]
    for number, (language, text) in enumerate(blocks):
        parts.append(f'printf "\\n{MARK} {number}\\n"')  # what is before may lack its newline
        parts.append(text if language == "bash" else f"python - <<'PYTHON'\n{text}PYTHON\n")
    return "\n".join(parts)


class HasUrl(Protocol):
    @property
    def url(self) -> str: ...


def run_tour(service: HasUrl, folder: Path, blocks: list[Block], *, takes_s: float) -> list[str]:
    """Return what each block printed, run in `folder`, which gets the examples.

    Fails the test if a command fails, anything is written to standard error, or `takes_s` is over.
    Jobs that other tests left there are deleted first: a page shows what a newcomer sees.
    """
    with Client(service.url) as client:
        for job in client.jobs():
            if job.state.is_terminal:
                client.delete(job.id)
    (folder / "examples").symlink_to(ROOT / "examples")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("DRAY_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with open(folder / "said", "w") as said, open(folder / "complained", "w") as complained:
        shell = subprocess.Popen(
            ["bash", "-c", as_one_shell(blocks)],
            cwd=folder,
            env={**clean, "PATH": path, "DRAY_URL": service.url, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=complained,
            start_new_session=True,
        )
    try:
        code = shell.wait(takes_s)
    except subprocess.TimeoutExpired:
        os.killpg(shell.pid, signal.SIGKILL)
        code = shell.wait()
    text = (folder / "said").read_text()
    errors = (folder / "complained").read_text()
    assert code == 0, f"{code}: {text[-2000:]}\n{errors[-2000:]}\n{_happened(service.url)}"
    assert not errors
    return re.split(rf"\n{MARK} \d+\n", text)[1:]


def _happened(url: str) -> str:
    """The events of all jobs, which show why a command failed."""
    with Client(url) as client:
        return "\n".join(
            f"{job.name} {event.time:%H:%M:%S.%f} {event.code}: {event.message}"
            for job in client.jobs()
            for event in client.events(job.id)
        )
