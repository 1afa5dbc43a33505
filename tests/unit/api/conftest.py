"""One server for all tests of this folder; each test makes jobs of its own."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.unit.api.serving import LiveServer, serving


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("home")) as server:
        yield server


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        yield client
