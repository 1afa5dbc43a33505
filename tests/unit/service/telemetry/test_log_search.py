"""A search of logs finds the lines that a slow loop over all lines finds."""

from __future__ import annotations

import random
import re
from datetime import timedelta

import pytest

from dray.views import LogLine
from ray_workers.shared.log_rows import row_mark
from service.telemetry import log_reader
from tests.unit.service.helpers import START, Service, log

WORDS = (
    "loss",
    "LOSS 0.5",
    "Straße",
    "épocha",
    "\x1b[31mred\x1b[0m",
    "a\tb",
    "ValueError: bad",
    "%_",
)


def drawn(seed: int, rank: int, count: int) -> list[str]:
    rng = random.Random(seed * 10 + rank)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 4))) + f" {n}" for n in range(count)]


async def search(service: Service, job_id: str, text: str, **of: int) -> list[LogLine]:
    """Read all pages of the search."""
    found: list[LogLine] = []
    cursor = None
    while True:
        page = await service.queries.logs(job_id, contains=text, cursor=cursor, **of)
        found += page.items
        if page.next_cursor == cursor:
            return found
        cursor = page.next_cursor


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_search_finds_what_a_loop_over_all_lines_finds(
    service: Service, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "MAX_SEARCHED", 97)
    job_id = await service.running()
    texts = {rank: drawn(seed, rank, 700) for rank in (0, 1)}
    for begin in range(0, 700, 350):  # part of the lines is in the storage, part in SQL
        frames = [
            log(n, texts[rank][n] + "x" * 90, rank=rank, at=START + timedelta(seconds=n))
            for n in range(begin, begin + 350)
            for rank in (0, 1)
        ]
        service.report(job_id, 1, frames)
    for text in ("loss 0.5", "straSSe", "ÉPOCHA", "red", "b ValueError", "%_ %_", " 69", "nowhere"):
        found = await search(service, job_id, text)
        wanted = {
            (rank, number)
            for rank, lines in texts.items()
            for number, line in enumerate(lines)
            if text.casefold() in re.sub("\x1b\\[[0-9]+m", "", line + "x" * 90).casefold()
        }
        assert {(line.rank, line.number) for line in found} == wanted, text
        assert len(found) == len(wanted)
        one = await search(service, job_id, text, rank=1)
        assert [line.number for line in one] == sorted(n for rank, n in wanted if rank == 1)


async def test_the_search_of_a_running_job_continues_with_new_lines(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [log(0, "epoch 1"), log(1, "other")])
    first = await service.queries.logs(job_id, contains="EPOCH")
    assert [line.text for line in first.items] == ["epoch 1"]
    assert not first.complete
    service.report(job_id, 1, [log(2, "epoch 2")])
    service.end(job_id, 1)
    second = await service.queries.logs(job_id, contains="epoch", cursor=first.next_cursor)
    assert [line.text for line in second.items if line.text.startswith("epoch")] == ["epoch 2"]
    assert second.complete


async def test_states_of_a_redrawn_row_have_its_name_and_no_mark(service: Service) -> None:
    job_id = await service.running()
    texts = ["start", row_mark("1a.1") + " 10%", row_mark("1a.1") + " 90%", "\x1b]dray;row=é\x07x"]
    service.report(job_id, 1, [log(n, text) for n, text in enumerate(texts)])
    page = await service.queries.logs(job_id)
    assert [(line.row, line.text) for line in page.items] == [
        (None, "start"),
        ("1a.1", " 10%"),
        ("1a.1", " 90%"),
        (None, texts[3]),
    ]
