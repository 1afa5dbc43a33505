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
    folder = tmp_path_factory.mktemp("names")
    urls = {}
    if request.param == "postgresql":
        # Servers with the same database need the same storage: the user `default` of one server has
        # the code that was uploaded to the other without a token.
        urls["database_url"] = request.getfixturevalue("module_postgres_url")
        urls["storage_url"] = (folder / "storage").as_uri()
    with opened(folder, **urls) as sites:
        yield sites
