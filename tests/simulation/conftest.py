"""Seeds and fixtures of the simulation tests."""

from __future__ import annotations

import gc
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.seeds import drawn, header

NUM_SEEDS = 20
"""Number of seeds in the ordinary suite. A storm takes half a second. DRAY_SEEDS and `make soak`
try more."""

TIMEOUT_S = 1500
"""Timeout of a test, which may have to share the CPUs with others."""


def seeds() -> range:
    return drawn(NUM_SEEDS)


def pytest_report_header() -> str:
    return header("storms", seeds())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="run only the storm of this seed and print its trace")


@pytest.fixture
def _quiet() -> Iterator[None]:
    """Disable logging, and collect garbage rarely until the end."""
    logging.disable(logging.CRITICAL)
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 20, 20)  # a simulation's garbage is freed when it ends
    yield
    gc.set_threshold(*thresholds)
    logging.disable(logging.NOTSET)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Folder for the services' files, in memory if possible."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="dray-simulation-", dir=place) as name:
        yield Path(name)
