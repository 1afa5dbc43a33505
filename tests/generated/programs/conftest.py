"""Which seeds are tried."""

from __future__ import annotations

from tests.seeds import drawn, header

FEW = 1
"""Of `make test`; `make soak` tries more."""


def seeds() -> range:
    return drawn(FEW)


def pytest_report_header() -> str:
    return header("programs", seeds())
