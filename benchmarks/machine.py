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
"""Maximum share of all cores that the idle daemons of a service and two Ray clusters can use."""
SAMPLE_S = 0.5

ROOT = Path(__file__).resolve().parent.parent


class BenchmarkError(RuntimeError):
    """A measurement failed. The message states which one and why."""


def describe() -> dict[str, str]:
    """Return the machine and the versions on which figures depend."""
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
    """Return the package's version, or `absent`, since not all measurements require it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def wait_until_quiet(*, at_least_s: float = 0.0, at_most_s: float = 30.0) -> float:
    """Wait until the cores are nearly idle, or for `at_most_s`. Return the share that is busy
    then."""
    began = time.monotonic()
    while True:
        busy: float = psutil.cpu_percent(interval=SAMPLE_S) / 100
        waited = time.monotonic() - began
        if waited >= at_most_s or (waited >= at_least_s and busy <= QUIET_SHARE):
            return busy


def clean_environment() -> dict[str, str]:
    """Return the environment without dray and Ray settings, with one thread per rank and gloo on
    loopback.

    dray also configures loopback for ranks that are all on one machine. Otherwise gloo might spend
    time looking up the host name, so the peers use it too.
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
    """Return the checkout's commit, with `+` if tracked files have been modified."""
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
