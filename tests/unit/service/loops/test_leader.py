"""The rules of the lease, without which nothing is written."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy.orm import Session

from service.db.repositories.scheduling import leases as repository
from service.db.session import Database
from service.domain import leases
from service.domain.leases import Lease
from service.loops.leader import Leader
from service.loops.shared.fencing import LoopDatabase, Term
from service.loops.shared.timings import LoopTimings
from tests.unit.service.helpers import START

HELD_FOR = timedelta(seconds=7)
END = START + HELD_FOR
MINE = Lease("me", 3, END)


@pytest.mark.parametrize(
    ("found", "term"),
    [(None, 1), (Lease("you", 3, START), 4), (MINE, 4), (Lease("you", 3, END), None)],
)
def test_a_lease_is_taken_when_nobody_else_has_it_and_its_term_rises(
    found: Lease | None, term: int | None
) -> None:
    taken = leases.taken(found, "me", START, HELD_FOR)
    assert taken == (None if term is None else Lease("me", term, END))


@pytest.mark.parametrize(
    ("found", "held"),
    [
        (None, False),
        (MINE, True),
        (Lease("you", 3, END), False),
        (Lease("me", 4, END), False),
        (Lease("me", 3, START), False),
    ],
)
def test_who_holds_it_is_decided_by_holder_term_and_end(found: Lease | None, held: bool) -> None:
    assert leases.holds(found, "me", 3, START) is held


def test_a_renewed_lease_ends_later_and_a_released_one_now() -> None:
    later = START + timedelta(seconds=5)
    assert leases.renewed(MINE, later, HELD_FOR) == Lease("me", 3, later + HELD_FOR)
    assert leases.released(MINE, later).is_over(later)


async def test_a_write_under_a_term_that_is_over_is_not_made(database: Database) -> None:
    """This also applies if the same process holds the lease again in another term."""
    async with asyncio.timeout(20):
        now = await database.read(database.time)

        def give(session: Session, term: int) -> None:
            repository.put(session, Lease("me", term, now + timedelta(minutes=5)))

        def changes(session: Session, _: object) -> str:
            session.connection().exec_driver_sql("DELETE FROM leases")
            return "done"

        await database.write(lambda s: give(s, 2))
        stale = LoopDatabase(database, Term("me", 1))
        writing = asyncio.ensure_future(stale.write(changes))
        await stale.lost.wait()
        assert not writing.done()
        writing.cancel()
        found = await database.read(repository.get)
        assert found is not None
        assert found.term == 2
        assert await LoopDatabase(database, Term("me", 2)).write(changes) == "done"
        assert await database.read(repository.get) is None


async def test_on_sqlite_the_loops_run_without_a_lease(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    began = asyncio.Event()

    async def loop() -> None:
        began.set()

    leader = Leader(database, lambda _: [("loop", loop())], LoopTimings())
    running = asyncio.ensure_future(leader.run())
    async with asyncio.timeout(20):
        await began.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not leader.leads
    await leader.release()
    assert await database.read(repository.get) is None
    database.close()
