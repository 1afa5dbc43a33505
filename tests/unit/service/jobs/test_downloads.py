"""A job's download link works once, and can't be read from the database."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import func, select

from dray.requests import DownloadRequest
from service.db.models import DownloadLinkRow
from service.domain.errors import DownloadLinkNotFound, NotFound
from service.jobs import downloads
from service.jobs.downloads import DownloadLinks, UsedLink
from tests.unit.service.helpers import Service

WANTED = DownloadRequest.model_validate({"artifact": "artifact-1"})


async def link(service: Service, job_id: str) -> str:
    """Return the secret of a link."""
    made = await DownloadLinks(service.database).create(
        job_id, WANTED, owner="ann", token_id="token-1"
    )
    return made.url.removeprefix("/v1/downloads/")


def num_links(service: Service) -> int:
    count = select(func.count()).select_from(DownloadLinkRow)
    return service.database.read_sync(lambda s: s.scalar(count)) or 0


async def test_of_many_who_use_a_link_at_once_one_gets_its_file(service: Service) -> None:
    job_id = await service.submit()
    secret = await link(service, job_id)
    several = [DownloadLinks(service.database) for _ in range(6)]
    found = await asyncio.gather(*(one.use(secret) for one in several), return_exceptions=True)
    used = [one for one in found if isinstance(one, UsedLink)]
    assert used == [UsedLink(job_id, WANTED, "ann", "token-1")]
    assert sum(isinstance(one, DownloadLinkNotFound) for one in found) == 5


async def test_its_secret_is_not_stored(service: Service) -> None:
    secret = await link(service, await service.submit())
    (row,) = service.database.read_sync(lambda s: s.execute(select(DownloadLinkRow.__table__)))
    assert secret not in str(row)
    assert len(secret) >= 43, "256 bits"


async def test_an_old_one_is_refused_and_removed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await service.submit()
    monkeypatch.setattr(downloads, "LIFETIME", timedelta(0))
    secret = await link(service, job_id)
    with pytest.raises(DownloadLinkNotFound):
        await DownloadLinks(service.database).use(secret)
    monkeypatch.undo()
    await link(service, job_id)
    assert num_links(service) == 1


async def test_it_goes_with_its_job(service: Service) -> None:
    job_id = await service.submit()
    secret = await link(service, job_id)
    await service.jobs.cancel(job_id, actor="ann")
    await service.jobs.delete(job_id)
    assert num_links(service) == 0
    with pytest.raises(DownloadLinkNotFound):
        await DownloadLinks(service.database).use(secret)
    with pytest.raises(NotFound):
        await link(service, job_id)
