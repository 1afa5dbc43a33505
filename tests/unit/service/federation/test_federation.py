"""Clients of a federated job, with each database: tokens and concurrent updates."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

from dray import views
from dray.requests import UpdateRequest
from dray.secure_aggregation.messages import MaskingPhase
from dray.views import RoundPhase
from ray_workers.shared import round_files
from ray_workers.shared.contracts import Cause, FrameKind
from service.db.models import JobRow
from service.domain.errors import TooManyClients, UpdateRefused
from service.federation.client_rounds import ClientRounds
from service.federation.invitations import Invitations
from service.ingest import open_rounds
from tests.unit.service.helpers import START, Service, frame
from tests.wire import round_report

FEDERATED = {"clients": 4, "clients_per_round": 4, "rounds": 2, "quorum": 2, "http": {}}

NAME = round_files.round_name(1, "0" * 64)


async def opened(service: Service) -> tuple[Invitations, str]:
    """Start a job whose first round is open."""
    job_id = await service.running(federated=FEDERATED)
    report(service, job_id)
    return Invitations(service.database), job_id


async def joined(service: Service, job_id: str, count: int) -> list[ClientRounds]:
    """Invite clients, and return the rounds as they see them."""
    invited = (await Invitations(service.database).invite(job_id, count, by="ann")).items
    at = service.database, service.storage, job_id
    return [ClientRounds(*at, one.token) for one in invited]


def report(service: Service, job_id: str, **fields: Any) -> None:
    """Let the job's rank report the first round."""
    body = round_report(NAME, **{"clients": [0, 1], **fields}).body()
    service.report(job_id, 1, [frame(FrameKind.ROUND, body)])


async def waited_for(service: Service, job_id: str) -> views.OpenRound:
    found = (await service.queries.explain(job_id)).round
    assert found is not None
    return found


async def test_those_who_invite_at_once_get_clients_of_their_own(service: Service) -> None:
    invitations, job_id = await opened(service)
    several = [invitations.invite(job_id, 1, by="ann") for _ in range(6)]
    found = await asyncio.gather(*several, return_exceptions=True)
    made = [one.items[0].client for one in found if not isinstance(one, BaseException)]
    assert sorted(made) == [0, 1, 2, 3]
    assert sum(isinstance(one, TooManyClients) for one in found) == 2


async def test_of_updates_that_come_at_once_one_counts(service: Service) -> None:
    invitations, job_id = await opened(service)
    clients = await joined(service, job_id, 3)
    phases = [(await one.look()).phase for one in clients]
    assert phases == [RoundPhase.OPEN, RoundPhase.OPEN, RoundPhase.WAITING]
    await clients[0].put_part(NAME, 0, bytes(4))
    updates = [
        UpdateRequest(sha256=f"{number}" * 64, num_samples=1, num_steps=1, loss=0.5)
        for number in range(6)
    ]
    sent = await asyncio.gather(
        *(clients[0].send(NAME, one) for one in updates), return_exceptions=True
    )
    assert sum(isinstance(one, tuple) for one in sent) == 1
    assert sum(isinstance(one, UpdateRefused) for one in sent) == 5
    (client, *_) = (await invitations.clients(job_id)).items
    assert client.num_sent == 1


async def test_of_the_answers_of_a_masked_round_one_is_the_update(service: Service) -> None:
    """Each phase has its own deadline, which is not changed by the end of the round."""
    invitations, job_id = await opened(service)
    (rounds,) = await joined(service, job_id, 1)
    seen: list[tuple[int | None, int]] = []
    closes: list[Any] = []
    for number, phase in enumerate(list(MaskingPhase)[:-1]):
        report(service, job_id, awaits=phase, deadline_s=100.0 + number)
        if phase is MaskingPhase.MASKED_INPUT:
            await rounds.put_part(NAME, 0, bytes(4))
        await rounds.answer(NAME, phase, b"answer")
        page = await invitations.clients(job_id)
        seen.append((page.num_sent, page.items[0].num_sent))
        closes.append(page.closes_at)
    assert seen == [(0, 0), (0, 0), (1, 1), (1, 1), (1, 1)]
    assert closes == sorted({*closes}), "each later than the one before"
    report(service, job_id, is_open=False)
    assert (await invitations.clients(job_id)).closes_at == closes[-1]


async def test_explain_names_the_clients_that_have_not_answered(service: Service) -> None:
    invitations, job_id = await opened(service)
    clients = await joined(service, job_id, 2)
    report(service, job_id, clients=None)
    found = await waited_for(service, job_id)
    assert (found.missing, found.num_answered, found.quorum) == (["0", "1", "2", "3"], 0, 2)
    await clients[1].put_part(NAME, 0, bytes(4))
    await clients[1].send(
        NAME, UpdateRequest(sha256="0" * 64, num_samples=1, num_steps=1, loss=0.5)
    )
    explained = await service.queries.explain(job_id)
    assert (
        "waits for clients 0, 2, 3, and has received responses from 1 of 4: 2 responses are enough"
        in (explained.reason.message)
    )
    assert (await invitations.clients(job_id)).missing == [0, 2, 3]
    report(service, job_id, clients=[0, 1], awaits=MaskingPhase.UNMASK)
    found = await waited_for(service, job_id)
    assert (found.missing, found.awaits) == (["0", "1"], MaskingPhase.UNMASK)
    report(service, job_id, is_open=False)
    assert (await service.queries.explain(job_id)).round is None
    assert (await invitations.clients(job_id)).missing == []


async def test_a_round_of_an_earlier_attempt_waits_for_nobody(service: Service) -> None:
    _, job_id = await opened(service)
    service.end(job_id, 1, Cause.NODE_LOST)
    assert (await service.queries.explain(job_id)).round is None
    service.advance(3600.0)
    assert service.claim(job_id, 1) is not None
    service.report(job_id, 2)
    assert (await service.queries.explain(job_id)).round is None


async def test_explain_names_the_silos_that_have_not_answered(service: Service) -> None:
    silos = [{"name": name, "node_labels": {"at": name}} for name in ("north", "south", "west")]
    job_id = await service.running(federated={"rounds": 2, "silos": silos})

    async def said(**fields: Any) -> str:
        plain = {"number": 2, "missing": [0, 2], "quorum": 1, "ends_in_s": None}
        service.report(job_id, 1, [frame(FrameKind.SILO_ROUND, {**plain, **fields})])
        return (await service.queries.explain(job_id)).reason.message

    waits = "round 2 waits for silos north, west, and has received responses from 1 of 3"
    assert (await said()).endswith(waits)
    assert (await waited_for(service, job_id)).missing == ["north", "west"]
    told = await said(ends_in_s=5.0)
    assert told.endswith(f"{waits}: 1 response is enough now that the deadline has passed")
    for bad in {"missing": [3]}, {"missing": None}, {"ends_in_s": -1.0}:
        assert told == await said(**bad), "such a report changes nothing"
    assert "round" not in await said(missing=[])


def test_a_sentence_names_some_clients_and_the_time_that_is_left() -> None:
    job = JobRow(spec={"federated": FEDERATED})
    found = views.OpenRound(
        number=7,
        awaits=MaskingPhase.MASKED_INPUT,
        missing=[str(number) for number in range(100)],
        num_missing=150,
        num_answered=50,
        quorum=120,
        closes_at=START,
    )
    assert open_rounds.sentence(job, found, START - timedelta(seconds=42)) == (
        "round 7 waits in masked_input for clients 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 140 more, and "
        "has received responses from 50 of 200: 120 responses are enough at the deadline, in 42 s"
    )
