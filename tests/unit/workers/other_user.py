"""Another user of this machine, for tests that run as root."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NOBODY = 65534

needs_root = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can start a process of another user"
)


_BECOME = f"""
import encodings.idna, os, socket, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
"""
"""The imports come first: Python may be in a folder that the other user may not read."""


def run_as_another(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Run a text of Python, which has os, socket and sys."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _BECOME + code, *arguments],
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
