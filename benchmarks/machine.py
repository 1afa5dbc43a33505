"""The description of the machine, and whether it is idle."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path

import psutil

PACKAGES = ("torch", "ray", "numpy", "SQLAlchemy", "fastapi", "pyarrow")
QUIET_SHARE = 0.12
"""Share of all cores that the idle daemons of a service and of two Rays may take."""
SAMPLE_S = 0.5

ROOT = Path(__file__).resolve().parent.parent


class BenchmarkError(RuntimeError):
    """A measurement failed; the message names it and the reason."""


def describe() -> dict[str, str]:
    """The machine and the versions that a figure depends on."""
    memory_gib = psutil.virtual_memory().total / 2**30
    facts = {
        "cores": str(len(os.sched_getaffinity(0))),
        "cpu": _cpu_model(),
        "memory": f"{memory_gib:.0f} GiB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }
    facts |= {name: _version(name) for name in PACKAGES}
    return facts | {"commit": _commit()}


def _version(package: str) -> str:
    """`absent` where a measurement does without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def wait_until_quiet(*, at_least_s: float = 0.0, at_most_s: float = 30.0) -> float:
    """Wait until the cores are nearly idle, or `at_most_s`; the share that is busy then."""
    began = time.monotonic()
    while True:
        busy: float = psutil.cpu_percent(interval=SAMPLE_S) / 100
        waited = time.monotonic() - began
        if waited >= at_most_s or (waited >= at_least_s and busy <= QUIET_SHARE):
            return busy


def clean_environment() -> dict[str, str]:
    """The environment without settings of dray and Ray, one thread per rank, gloo on loopback.

    The last is what dray gives its ranks where all are on one machine; without it gloo may spend
    its time looking up the host's name, so the peers get it too.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("DRAY_", "RAY_"))}
    return inherited | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _commit() -> str:
    """The checkout's commit, with `+` if tracked files differ from it."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
