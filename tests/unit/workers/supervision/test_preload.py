"""Imports of a job's Ray worker processes before they are needed, and imports that they avoid."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.marks import ONE_SET, SOAK

HEAVY = ("torch", "dray.spec", "pandas", "sqlalchemy", "fastapi")
FOR_SERIALIZERS = ("numpy", "pyarrow", "pydantic", "starlette")


def modules_after(program: str) -> set[str]:
    """Names of the modules that a process has when it ran this."""
    code = f"{program}; import sys; print(*[n for n, m in sys.modules.items() if m is not None])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_a_worker_process_imports_nothing_that_takes_long() -> None:
    assert modules_after("import ray_workers.supervision.supervisor").isdisjoint(HEAVY)


@SOAK
def test_ray_registers_no_serializers_that_a_worker_process_never_needs() -> None:
    registering = (
        "from unittest.mock import Mock; from ray.util import serialization_addons; "
        "serialization_addons.apply(Mock())"
    )
    assert modules_after(registering) >= set(FOR_SERIALIZERS), "Ray does not ask for them any more"
    assert modules_after(
        f"import ray_workers.supervision.preload_minimal; {registering}"
    ).isdisjoint(FOR_SERIALIZERS)


@SOAK
def test_on_a_cluster_of_others_they_are_imported_before_they_are_needed() -> None:
    assert modules_after("import ray_workers.supervision.preload") >= set(FOR_SERIALIZERS)


@ONE_SET
@pytest.mark.parametrize("leads_already", [False, True])
def test_each_worker_of_an_embedded_ray_leads_a_session(leads_already: bool) -> None:
    code = "import os, ray_workers.supervision.preload_minimal; print(os.getsid(0) == os.getpid())"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        start_new_session=leads_already,
    )
    assert ended.stdout.split() == ["True"]
