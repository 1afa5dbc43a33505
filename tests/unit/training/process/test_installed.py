"""The packages that a rank reports."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path

from ray_workers.shared.contracts import MAX_PACKAGES
from ray_workers.training.process.installed import packages_in
from tests.unit.training.ranks import frames, run_ranks


def test_the_packages_are_those_that_python_lists() -> None:
    found = packages_in(sys.path)
    assert found.pop("python") == platform.python_version()
    assert {"torch", "numpy", "pytest"} < found.keys()
    assert {name: metadata.version(name) for name in found} == found


def test_the_first_folder_wins_and_the_number_is_limited(tmp_path: Path) -> None:
    for folder, version in (("overlay", "2.0"), ("site", "1.0")):
        (tmp_path / folder / f"My_Package-{version}.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "no-version").mkdir()
    for number in range(MAX_PACKAGES + 10):
        (tmp_path / "site" / f"p{number:05d}-1.dist-info").touch()
    path = [str(tmp_path / name) for name in ("overlay", "missing", "site")]
    found = packages_in(path)
    assert found["my-package"] == "2.0"
    assert len(found) == MAX_PACKAGES


def test_rank_0_reports_its_packages_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('hello')\n")
    assert run_ranks(tmp_path, {"script": {"entrypoint": str(script)}}, world_size=2) == [0, 0]
    (report,) = frames(tmp_path, rank=0, kind="packages")
    assert report["packages"]["python"] == platform.python_version()
    assert frames(tmp_path, rank=1, kind="packages") == []
