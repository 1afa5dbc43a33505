"""Cost reports in both clients."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from dray import AsyncClient, Client
from tests.unit.api.serving import LiveServer


def test_both_clients_report_costs(server: LiveServer) -> None:
    since = datetime.now(UTC) - timedelta(days=1)
    with Client(server.url) as client:
        report = client.costs("queue", since=since)
        assert (report.by, report.since, report.items) == ("queue", since, [])
        assert [warning.code for warning in report.warnings] == ["no_prices"]
        with pytest.raises(ValueError, match="has no time zone"):
            client.costs(since=datetime(2026, 1, 1))

    async def ask() -> None:
        async with AsyncClient(server.url) as client:
            assert (await client.costs("user", until=datetime.now(UTC))).by == "user"

    asyncio.run(ask())
