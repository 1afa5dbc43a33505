"""Reports the packages that a rank's interpreter can import.

This module imports only the standard library and modules of dray that don't import other packages,
so that it can run in a fresh interpreter.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable
from pathlib import Path

from dray import train
from ray_workers.shared.contracts import MAX_PACKAGES, RankTask
from ray_workers.shared.frames import PackagesReport

ENDING = ".dist-info"
PYTHON = "python"
"""The name under which the interpreter's version is reported."""


def report_packages(task: RankTask) -> None:
    """Report the packages of this process if it is the first process of rank 0."""
    if task.rank == 0 and task.incarnation == 0:
        report = PackagesReport(packages=packages_in(sys.path))
        train.emit(report.KIND, report.body())


def packages_in(path: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of the packages in these folders, by name. Of several
    packages with the same name, the first one is imported. The names are read from the names of
    folders, because reading the metadata of hundreds of packages takes much longer."""
    found = {PYTHON: platform.python_version()}
    for folder in path:
        try:
            entries = sorted(entry.name for entry in Path(folder).iterdir())
        except OSError:  # a zip file, or a folder that does not exist
            continue
        for entry in entries:
            name, _, version = entry.removesuffix(ENDING).rpartition("-")
            if entry.endswith(ENDING) and name:
                found.setdefault(name.lower().replace("_", "-"), version)
    return dict(sorted(found.items())[:MAX_PACKAGES])
