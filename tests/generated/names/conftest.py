"""The seeds to try, and the servers that they share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.generated.names.sites import Sites, opened
from tests.marks import soak
from tests.seeds import drawn, header

FEW = 3
"""Number of seeds in `make test`, which with a sweep take 7 s; `make soak` tries more."""


def seeds() -> range:
    return drawn(FEW)


def sweep_seeds() -> range:
    """One fifth of the seeds: the trials of a sweep take as long as several jobs."""
    return seeds()[: max(1, len(seeds()) // 5)]


def pytest_report_header() -> str:
    return header("names", seeds())


@pytest.fixture(scope="module", params=["sqlite", soak("postgresql")])
def sites(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sites]:
    on_postgres = request.param == "postgresql"
    urls = {"database_url": request.getfixturevalue("module_postgres_url")} if on_postgres else {}
    with opened(tmp_path_factory.mktemp("names"), **urls) as sites:
        yield sites
