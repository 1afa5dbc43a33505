"""The seeds to try."""

from __future__ import annotations

from tests.seeds import drawn, header

FEW = 10
"""Number of seeds in `make test`, which take 3 s; `make soak` tries more."""


def seeds() -> range:
    return drawn(FEW)


def pytest_report_header() -> str:
    return header("documents", seeds())
