"""Run commands in this process, as separate processes, and on a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from typing import Any

import pytest

from dray.cli.app import run

DEADLINE_S = 60.0


class Cli:
    """Runs commands against one server, in this process."""

    def __init__(self, url: str, capture: pytest.CaptureFixture[str]) -> None:
        self._url = url
        self._capture = capture
        self.err = ""

    def __call__(self, *arguments: str, exits: int = 0) -> str:
        code = run(["--url", self._url, *arguments])
        out, self.err = self._capture.readouterr()
        assert code == exits, (out, self.err)
        assert "Traceback" not in self.err
        return out

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))


def as_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dray.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        check=False,
    )


class OnTerminal:
    """A command on a pseudo-terminal with 80 columns. Its output is read as it is printed."""

    def __init__(self, *arguments: str, columns: int = 80, **environment: str) -> None:
        self._screen, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dray.cli", *arguments],
            stdin=side,
            stdout=side,
            stderr=side,
            env={**clean, "TERM": "xterm-256color", **environment},
            start_new_session=True,
            # A shell's background jobs ignore Ctrl-C, and so do the processes that they start.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(side)
        self._shown = b""

    @property
    def shown(self) -> str:
        return self._shown.decode(errors="replace")

    def until(self, condition: Callable[[str], bool]) -> str:
        """Read until `condition` is true for all of the output so far."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition(self.shown):
            assert time.monotonic() < deadline, self.shown
            assert self._read(), self.shown
        return self.shown

    def type(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Read the rest, and return the exit code."""
        while self._read():
            pass
        os.close(self._screen)
        return self._process.wait(DEADLINE_S)

    def _read(self) -> bool:
        """Read a part of the output. Returns False at its end."""
        ready, _, _ = select.select([self._screen], [], [], DEADLINE_S)
        assert ready, f"nothing more was shown: {self.shown}"
        try:
            piece = os.read(self._screen, 65536)
        except OSError:  # Linux raises EIO when the other side has been closed
            return False
        self._shown += piece
        return bool(piece)
