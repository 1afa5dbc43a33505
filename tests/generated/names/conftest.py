"""Which seeds are tried, and the server that they share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.generated.names.exits import Readers
from tests.marks import soak
from tests.seeds import drawn, header
from tests.unit.api.serving import LiveServer, serving

FEW = 4
"""Of `make test`, in which they take 3 s; `make soak` tries more."""


def seeds() -> range:
    return drawn(FEW)


def pytest_report_header() -> str:
    return header("names", seeds())


@pytest.fixture(scope="module", params=["sqlite", soak("postgresql")])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    on_postgres = request.param == "postgresql"
    urls = {"database_url": request.getfixturevalue("module_postgres_url")} if on_postgres else {}
    with serving(tmp_path_factory.mktemp("names"), **urls) as server:
        yield server


@pytest.fixture(scope="module")
def readers(server: LiveServer) -> Iterator[Readers]:
    with Readers(server) as readers:
        yield readers
