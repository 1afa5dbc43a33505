"""Browsers that stay signed in: what is stored, and when a session ends for all processes."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import select

from service.db.models import BrowserSessionRow
from service.tracking import browser_sessions
from service.tracking.browser_sessions import BrowserSessions, NewSession
from tests.unit.service.helpers import Service


def opened(service: Service) -> BrowserSessions:
    return BrowserSessions(service.database)


async def owners(service: Service, *sessions: NewSession) -> list[str]:
    found = await opened(service).find([each.cookie for each in sessions])
    return sorted(one.owner for one in found)


async def test_every_process_recognises_the_browser_by_its_two_secrets(service: Service) -> None:
    first, second = opened(service), opened(service)
    new = await first.open("ann", "token-1", [])
    (found,) = await second.find([new.cookie])
    assert (found.owner, found.token_id) == ("ann", "token-1")
    assert found.has_key(new.write_key)
    assert not found.has_key(new.cookie)
    assert not found.has_key("")
    assert await second.find([new.write_key, "x", "\udcff"]) == []
    names = await asyncio.gather(*(opened(service).deployment_id() for _ in range(4)))
    assert len({*names, await first.deployment_id()}) == 1


async def test_its_secrets_are_not_stored(service: Service) -> None:
    new = await opened(service).open("ann", "token-1", [])
    (row,) = service.database.read_sync(lambda s: s.execute(select(BrowserSessionRow.__table__)))
    assert new.cookie not in str(row)
    assert new.write_key not in str(row)
    assert len(new.cookie) == len(new.write_key) == 43, "256 bits"


async def test_it_ends_when_a_process_closes_or_replaces_it(service: Service) -> None:
    sessions = opened(service)
    first, second, third = [await sessions.open(name, "t", []) for name in ("ann", "ann", "bob")]
    await opened(service).close([first.cookie])
    assert await owners(service, first, second, third) == ["ann", "bob"]
    fourth = await sessions.open("cat", "t", [third.cookie])
    assert await owners(service, second, third, fourth) == ["ann", "cat"]
    fifth = await sessions.open("ann", "t", [])
    await sessions.close_all("ann")
    assert await owners(service, second, fourth, fifth) == ["cat"]


async def test_it_expires_and_is_removed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    lasting = await opened(service).open("ann", "t", [])
    monkeypatch.setattr(browser_sessions, "LIFETIME", timedelta(0))
    expired = await opened(service).open("bob", "t", [])
    assert await owners(service, lasting, expired) == ["ann"]
    monkeypatch.undo()
    await opened(service).open("cat", "t", [])
    kept = service.database.read_sync(lambda s: s.scalars(select(BrowserSessionRow.owner)).all())
    assert sorted(kept) == ["ann", "cat"]


async def test_a_user_has_so_many_at_most(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browser_sessions, "MOST", 3)
    of_bob = await opened(service).open("bob", "t", [])
    made = [await opened(service).open("ann", "t", []) for _ in range(5)]
    found = [bool(await owners(service, each)) for each in made]
    assert found == [False, False, True, True, True]
    assert await owners(service, of_bob) == ["bob"]
