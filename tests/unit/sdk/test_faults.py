"""Preemption, drills and hangs in both clients."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from dray import AsyncClient, Client, Retry, errors
from dray.views import Drill, DrillKind, DrillState
from tests.unit.api.serving import LiveServer, wait_until
from tests.unit.sdk.lossy import Lossy
from tests.unit.service.helpers import drilled, hang, spent


def pass_when_waited_for(server: LiveServer, job_id: str) -> threading.Thread:
    def work() -> None:
        wait_until(lambda: server.num_waiting(job_id), "the client to wait")
        (drill,) = server.ask("GET", f"/v1/jobs/{job_id}/drills").json()["items"]
        struck = drilled(drill["id"], "struck", step=50)
        over = drilled(drill["id"], "passed", step=50, recovery_s=0.25, steps_lost=1)
        server.hands.report(job_id, 1, [struck, over])

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def check(drill: Drill) -> None:
    assert drill.state is DrillState.PASSED
    assert (drill.recovery_s, drill.steps_lost) == (0.25, 1)


def test_a_drill_is_waited_for(server: LiveServer) -> None:
    job_id = server.trains()
    thread = pass_when_waited_for(server, job_id)
    with Client(server.url) as client:
        check(client.drill(job_id, kind="kill", rank=1, at_step=50))
        assert [one.rank for one in client.drills(job_id)] == [1]
    thread.join()


def test_a_drill_is_awaited(server: LiveServer) -> None:
    job_id = server.trains()
    thread = pass_when_waited_for(server, job_id)

    async def work() -> None:
        async with AsyncClient(server.url) as client:
            check(await client.drill(job_id, kind=DrillKind.STALL))
            assert [one.kind for one in await client.drills(job_id)] == [DrillKind.STALL]
            assert await client.hangs(job_id) == []
            assert (await client.preempt(job_id)).id == job_id

    asyncio.run(work())
    thread.join()


def test_a_drill_whose_answer_was_lost_strikes_once(server: LiveServer) -> None:
    job_id, transport = server.trains(), Lossy()
    with Client(server.url, transport=transport, retry=Retry(patience_s=60)) as client:
        made = client.drill(job_id, kind="preempt", wait=False)
        assert [one.id for one in client.drills(job_id)] == [made.id]
    assert json.loads(transport.lost[0].content)["id"] == made.id


def test_errors_have_classes_of_their_own(server: LiveServer) -> None:
    job_id = server.trains()
    with Client(server.url) as client:
        with pytest.raises(errors.DrillImpossible) as impossible:
            client.drill(job_id, kind="kill", rank=7)
        assert impossible.value.pointer == "/rank"
        with pytest.raises(errors.JobNotRunning):
            client.preempt(server.submit())
        with pytest.raises(errors.JobNotFound):
            client.hangs("job-none")
        with pytest.raises(ValueError, match="kil"):
            client.drill(job_id, kind="kil")


def test_a_preemption_gives_the_requested_grace(server: LiveServer) -> None:
    job_id = server.trains()
    with Client(server.url) as client:
        for _ in range(2):
            assert client.preempt(job_id, grace_s=7).id == job_id
        asked = [event for event in client.events(job_id) if event.type == "preempting"]
    assert [event.data for event in asked] == [{"grace_s": 7.0}]


def test_hangs_and_goodput_are_read(server: LiveServer) -> None:
    job_id = server.trains()
    server.hands.report(job_id, 1, [hang(0), spent(useful=3.0, starting=1.0)])
    with Client(server.url) as client:
        (found,) = client.hangs(job_id)
        assert (found.culprits, found.ranks[1].stack) == ([0], "File x, line 1")
        goodput = client.get(job_id).goodput
    assert goodput is not None
    assert (goodput.total, goodput.useful_share) == (4.0, 0.75)
