"""One server for all tests in this folder. Each test creates its own jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dray import Client
from tests.unit.api.serving import LiveServer, serving


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("home")) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client
