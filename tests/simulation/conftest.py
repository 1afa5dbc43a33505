"""Which seeds are tried, and what the tests of the simulation share."""

from __future__ import annotations

import gc
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.seeds import drawn, header

NUM_SEEDS = 40
"""Of the ordinary suite; a storm takes half a second. DRAY_SEEDS and `make soak` try more."""

TIMEOUT_S = 1500
"""Of a test: beside others its process is given what they leave."""


def seeds() -> range:
    return drawn(NUM_SEEDS)


def pytest_report_header() -> str:
    return header("storms", seeds())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="play the storm of this seed alone, and tell it")


@pytest.fixture
def _quiet() -> Iterator[None]:
    """Nobody logs, and little garbage is collected before the end."""
    logging.disable(logging.CRITICAL)
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 20, 20)  # all that a simulation makes goes at its end
    yield
    gc.set_threshold(*thresholds)
    logging.disable(logging.NOTSET)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where services keep their files, in memory where there is such a place."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="dray-simulation-", dir=place) as name:
        yield Path(name)
