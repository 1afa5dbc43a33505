"""The page of a rank: written by one process, read and poked by others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ray_workers import pages
from ray_workers.ledger import Ledger
from ray_workers.pages import RING, USES, Doing, Look, Page, Place, Sight, Untold, Use


def figures(step: int) -> Untold:
    return Untold(step, 0, 200, 0.1, 2.0 / step, 0.5, 0.01, 0.001)


def test_what_a_process_does_is_seen_from_outside(tmp_path: Path) -> None:
    page = Page(pages.page_path(pages.prefix_of(tmp_path, 3, 1)))
    page.begin(generation=2, step=7)
    page.enter(Doing.COMPUTE, Use.USEFUL)
    page.exchange()
    page.commit(8)
    (sight,) = pages.see(tmp_path)
    assert (sight.rank, sight.incarnation, sight.state) == (3, 1, "R")
    look = sight.look
    assert (look.step, look.doing, look.collective) == (8, Doing.EXCHANGE, 1)
    assert (look.generation, look.resumed_step, look.pid) == (2, 7, os.getpid())
    assert look.use is Use.USEFUL
    assert look.first_at > 0
    assert 0 <= sight.age_s < 60


def test_the_first_step_of_a_generation_keeps_its_time(tmp_path: Path) -> None:
    page = Page(pages.page_path(pages.prefix_of(tmp_path, 0, 0)))
    page.commit(1)
    first = pages.see(tmp_path)[0].look.first_at
    page.commit(2)
    assert pages.see(tmp_path)[0].look.first_at == first
    page.begin(1, 2)
    assert pages.see(tmp_path)[0].look.first_at == 0.0


def test_what_gets_on_is_young_again_and_its_time_is_booked_whole(tmp_path: Path) -> None:
    page = Page(pages.page_path(pages.prefix_of(tmp_path, 0, 0)))
    page.enter(Doing.EVALUATE, Use.USEFUL)
    began = time.monotonic()
    entered = pages.see(tmp_path)[0].look.since
    page.move()
    moved = pages.see(tmp_path)[0].look.since
    page.enter(Doing.SAVE, Use.CHECKPOINTING)
    saved = pages.see(tmp_path)[0].look
    assert entered < began < moved < saved.since
    assert saved.uses[Use.USEFUL] == pytest.approx(saved.since - entered)


def test_a_place_is_announced_and_found(tmp_path: Path) -> None:
    prefix = pages.prefix_of(tmp_path, 0, 0)
    with pytest.raises(FileNotFoundError):
        pages.announce(prefix, Place(1, 0, 2))
    page = Page(pages.page_path(prefix))
    assert page.wanted == 0
    pages.announce(prefix, Place(1, 0, 2))
    assert page.wanted == 1
    assert pages.announced(prefix) == Place(1, 0, 2)
    assert not page.is_asked_to_leave
    pages.ask_to_leave(prefix)
    assert page.is_asked_to_leave


def test_the_last_figures_outlive_their_process(tmp_path: Path) -> None:
    path = pages.page_path(pages.prefix_of(tmp_path, 0, 0))
    page = Page(path)
    assert page.kept() == []
    for step in range(1, RING + 6):
        page.keep(figures(step))
    del page
    found = pages.untold(path.read_bytes())
    assert found == [figures(step) for step in range(6, RING + 6)]


def test_a_page_that_is_just_being_made_is_not_seen(tmp_path: Path) -> None:
    pages.page_path(pages.prefix_of(tmp_path, 0, 0)).write_bytes(b"")
    assert pages.see(tmp_path) == []
    assert pages.see(tmp_path / "none") == []


def seen(incarnation: int, uses: dict[Use, float], *, alive: Use | None = None) -> Sight:
    look = Look(1, Doing.COMPUTE, 0, 0.0, 0, 0, 0.0, 1, alive or Use.USEFUL, uses)
    return Sight(0, incarnation, look, 2.0, "R" if alive else "")


def test_the_classes_of_the_ledger_add_up_to_what_was_held() -> None:
    ledger = Ledger()
    none = dict.fromkeys(USES, 0.0)
    ledger.hold(1, now=100.0)
    ledger.hold(1, now=103.0)
    books = ledger.look([], Use.STARTING)
    assert books == dict.fromkeys(map(str, USES), 0.0) | {"starting": 3.0}
    first = seen(0, none | {Use.STARTING: 1.0, Use.USEFUL: 4.0}, alive=Use.USEFUL)
    ledger.hold(2, now=110.0)
    books = ledger.look([first], Use.IDLE)
    assert books["useful"] == pytest.approx(6.0)
    assert sum(books.values()) == pytest.approx(10.0)
    dead = seen(0, none | {Use.STARTING: 1.0, Use.USEFUL: 7.0})
    second = seen(1, none | {Use.RECOVERING: 0.5, Use.RECOMPUTED: 1.0}, alive=Use.USEFUL)
    ledger.hold(2, now=112.5)
    books = ledger.look([dead, second], Use.RECOVERING)
    assert books["useful"] == pytest.approx(9.0)
    assert books["recomputed"] == pytest.approx(1.0)
    assert books["recovering"] > 0.5
    assert sum(books.values()) == pytest.approx(15.0)
    gone = ledger.look([second], Use.IDLE)
    assert gone["useful"] == pytest.approx(9.0), "what a page said is kept when the page is gone"
