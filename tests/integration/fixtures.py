"""One embedded service for the whole run; tests that break it put it together again.

Imported by the top conftest, so that integration and chaos tests share one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dray import Client
from tests.integration.harness import Service


def cancel_what_is_left(client: Client) -> None:
    """A test that failed half-way must not hold the slots that the next one needs."""
    for job in client.jobs():
        if not job.state.is_terminal:
            client.cancel(job.id)
            client.wait(job.id, timeout_s=90)


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service on SQLite with an embedded Ray of four slots."""
    folder = tmp_path_factory.mktemp("embedded")
    settings = {
        "DRAY_LOCAL_SLOTS": "4",
        "DRAY_SECRETS_DIR": str(folder / "secrets"),
        "DRAY_DATA_PRIVATE_HOSTS": "127.0.0.1",
    }
    service = Service(folder / "home", settings)
    service.start()
    yield service
    assert service.stop() == 0


@pytest.fixture
def client(embedded: Service) -> Iterator[Client]:
    with embedded.client as client:
        yield client
        cancel_what_is_left(client)


@pytest.fixture
def script_path(tmp_path: Path) -> Path:
    return tmp_path / "job.py"
