"""Clients of a federated job on each database: tokens, and updates that come at once."""

from __future__ import annotations

import asyncio
from typing import Any

from dray.requests import UpdateRequest
from dray.secure_aggregation.messages import MaskingPhase
from dray.views import RoundPhase
from ray_workers.shared import round_files
from ray_workers.shared.contracts import FrameKind
from service.domain.errors import TooManyClients, UpdateRefused
from service.federation.service import Federation, token_digest
from tests.unit.service.helpers import Service, frame

FEDERATED = {"clients": 4, "clients_per_round": 4, "rounds": 2, "quorum": 2, "http": {}}
SHA = "0" * 64
NAME = round_files.round_name(1, SHA)


async def opened(service: Service) -> tuple[Federation, str]:
    """A job whose first round is open."""
    job_id = await service.running(federated=FEDERATED)
    report(service, job_id)
    return Federation(service.database, service.storage), job_id


def report(service: Service, job_id: str, **fields: Any) -> None:
    """Have its rank report the first round."""
    body = {
        "number": 1,
        "name": NAME,
        "is_open": True,
        "clients": [0, 1],
        "quorum": 2,
        "deadline_s": 60.0,
        "num_elements": 1,
        "model_sha256": SHA,
        "model_size_bytes": 1,
        "form_sha256": SHA,
        "form_size_bytes": 1,
        "received": [],
        "awaits": "update",
        "update_bytes": 4,
        **fields,
    }
    service.report(job_id, 1, [frame(FrameKind.ROUND, body)])


async def test_those_who_invite_at_once_get_clients_of_their_own(service: Service) -> None:
    federation, job_id = await opened(service)
    several = [federation.invite(job_id, 1, by="ann") for _ in range(6)]
    found = await asyncio.gather(*several, return_exceptions=True)
    made = [one.items[0].client for one in found if not isinstance(one, BaseException)]
    assert sorted(made) == [0, 1, 2, 3]
    assert sum(isinstance(one, TooManyClients) for one in found) == 2


async def test_of_updates_that_come_at_once_one_counts(service: Service) -> None:
    federation, job_id = await opened(service)
    invited = (await federation.invite(job_id, 3, by="ann")).items
    tokens = [token_digest(one.token) for one in invited]
    phases = [(await federation.look(job_id, token)).phase for token in tokens]
    assert phases == [RoundPhase.OPEN, RoundPhase.OPEN, RoundPhase.WAITING]
    await federation.put_part(job_id, tokens[0], NAME, 0, bytes(4))
    updates = [
        UpdateRequest(sha256=f"{number}" * 64, num_samples=1, num_steps=1, loss=0.5)
        for number in range(6)
    ]
    sent = await asyncio.gather(
        *(federation.send(job_id, tokens[0], NAME, one) for one in updates), return_exceptions=True
    )
    assert sum(isinstance(one, tuple) for one in sent) == 1
    assert sum(isinstance(one, UpdateRefused) for one in sent) == 5
    (client, *_) = (await federation.clients(job_id)).items
    assert client.num_sent == 1


async def test_of_the_answers_of_a_masked_round_one_is_the_update(service: Service) -> None:
    """Each phase has a deadline of its own, which the end of the round leaves as it was."""
    federation, job_id = await opened(service)
    token = token_digest((await federation.invite(job_id, 1, by="ann")).items[0].token)
    seen: list[tuple[int | None, int]] = []
    closes: list[Any] = []
    for number, phase in enumerate(list(MaskingPhase)[:-1]):
        report(service, job_id, awaits=phase, deadline_s=100.0 + number)
        if phase is MaskingPhase.MASKED_INPUT:
            await federation.put_part(job_id, token, NAME, 0, bytes(4))
        await federation.answer(job_id, token, NAME, phase, b"answer")
        page = await federation.clients(job_id)
        seen.append((page.num_sent, page.items[0].num_sent))
        closes.append(page.closes_at)
    assert seen == [(0, 0), (0, 0), (1, 1), (1, 1), (1, 1)]
    assert closes == sorted({*closes}), "each later than the one before"
    report(service, job_id, is_open=False)
    assert (await federation.clients(job_id)).closes_at == closes[-1]
