"""Media are checked, and stored once for each step, within limits and without harm to others."""

from __future__ import annotations

import base64
import random
from typing import Any

import pytest

from dray import views
from dray.media.kinds import MediaKind
from dray.media.values import convert
from ray_workers.shared.contracts import Cause, Frame, FrameKind
from service.db.repositories import storage as storage_repository
from service.domain.errors import ArtifactNotFound, BadCursor, NotFound, StorageUnavailable
from service.ingest import media as ingest
from service.jobs.media import MediaListing, MediaSelection
from tests.unit.media import files
from tests.unit.service.helpers import Service, events_of, frame, metrics, resumed


def reported(
    step: Any, kind: str = "text", key: Any = "a", given: Any = "x", *, rank: int = 0, **more: Any
) -> Frame:
    converted = convert(MediaKind(kind), given)
    body = {"step": step, "key": key, "kind": kind, "value": converted.value, "left_out": 0}
    if converted.content is not None:
        body["file"] = base64.b64encode(converted.content).decode()
    return frame(FrameKind.MEDIA, {**body, **more}, rank=rank)


async def texts(service: Service, job_id: str, **wanted: Any) -> dict[tuple[int, str, int], str]:
    """Return the texts by rank, key and step."""
    page = await MediaListing(service.database).page(job_id, MediaSelection(**wanted), limit=500)
    assert page.next_cursor is None
    found = {}
    for one in page.items:
        assert isinstance(one.value, views.ReportedText)
        found[one.rank, one.key, one.step] = one.value.text
    return found


async def overview(service: Service, job_id: str) -> views.MediaOverview:
    return await MediaListing(service.database).overview(job_id)


async def next_attempt(service: Service, job_id: str, attempt: int) -> None:
    service.end(job_id, attempt, Cause.NODE_LOST)
    assert service.claim(job_id, attempt) is not None


async def test_each_kind_is_stored_and_read_back(service: Service) -> None:
    given: dict[str, Any] = {
        "histogram": [1, 2],
        "image": files.picture("WEBP"),
        "audio": files.sound(),
        "text": "hello\0",
        "table": [{"a": 1, "b": "x", "c": None, "d": 0.5, "e": True}],
        "confusion_matrix": ([0, 1], [1, 1]),
        "pr_curve": ([0, 1], [0.1, 0.2]),
        "roc_curve": ([0, 1], [0.1, 0.2]),
    }
    job_id = await service.running()
    service.report(job_id, 1, [reported(3, kind, "é/a", value) for kind, value in given.items()])
    page = await MediaListing(service.database).page(job_id, MediaSelection())
    by_kind = {one.value.kind: one for one in page.items}
    assert by_kind.keys() == given.keys()
    assert all((one.step, one.key, one.attempt) == (3, "é/a", 1) for one in page.items)
    table = by_kind["table"].value
    assert isinstance(table, views.ReportedTable)
    assert table.rows == [[1, "x", None, 0.5, True]]
    assert table.rows[0][4] is True
    image = by_kind["image"].value
    assert isinstance(image, views.Image)
    stored = await MediaListing(service.database).file(job_id, image.file.sha256)
    assert stored.file.media_type == "image/webp"
    assert service.storage.read_bytes(stored.key) == given["image"]
    found = await overview(service, job_id)
    assert {(one.kind, tuple(one.steps)) for one in found.items} == {
        (MediaKind(kind), (3,)) for kind in given
    }
    assert (found.num_records, found.num_left_out) == (8, 0)
    assert found.num_bytes > len(given["image"]) + len(given["audio"])
    assert not await events_of(service, job_id, "frames_refused")


async def test_equal_files_are_stored_once(service: Service) -> None:
    job_id, other = await service.running(), await service.running()
    content = files.picture()
    frames = [reported(step, "image", key, content) for step in range(5) for key in "ab"]
    service.report(job_id, 1, frames)
    service.report(other, 1, frames[:1])
    (name,) = service.storage.names(f"jobs/{job_id}/media")
    assert (await overview(service, job_id)).num_records == 10
    used = service.database.read_sync(storage_repository.used_bytes)
    assert used == 2 * len(content)
    with pytest.raises(ArtifactNotFound):
        await MediaListing(service.database).file(job_id, "0" * 64)
    await service.jobs.cancel(other, actor="ann")
    service.end(other, 1, Cause.STOPPED)
    await service.jobs.delete(other)
    assert service.storage.names(f"jobs/{other}") == []
    with pytest.raises(NotFound):
        await MediaListing(service.database).file(other, name)
    assert service.database.read_sync(storage_repository.used_bytes) == len(content)


async def test_repeated_steps_replace_those_of_earlier_attempts(service: Service) -> None:
    job_id = await service.running()
    frames = [reported(step, key=key, given="1") for step in range(1, 6) for key in "ab"]
    service.report(job_id, 1, [resumed(0), *frames, reported(4, given="again")])
    assert (await texts(service, job_id))[0, "a", 4] == "1", "the first of an attempt is kept"
    await next_attempt(service, job_id, 1)
    service.report(job_id, 2, [resumed(3)])
    found = await texts(service, job_id)
    assert sorted(found) == [(0, key, step) for key in "ab" for step in (1, 2, 3)]
    service.report(job_id, 2, [reported(3, given="2"), reported(4, given="2")])
    found = await texts(service, job_id, key="a")
    assert [found[0, "a", step] for step in (1, 2, 3, 4)] == ["1", "1", "2", "2"]
    assert (await overview(service, job_id)).num_records == len(await texts(service, job_id))


async def test_a_script_that_does_not_say_where_it_resumed_starts_at_its_first_metric(
    service: Service,
) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [metrics(9, {"x": 1.0}), *(reported(step) for step in range(1, 9))])
    await next_attempt(service, job_id, 1)
    service.report(job_id, 2, [metrics(5, {"x": 1.0})])
    assert [step for _, _, step in sorted(await texts(service, job_id))] == [1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(8))
async def test_the_listing_is_that_of_a_dictionary(service: Service, seed: int) -> None:
    """Attempts resume at random steps and report random series; the oracle is a dictionary."""
    draw = random.Random(seed)
    job_id = await service.running()
    expected: dict[tuple[int, str, int], tuple[int, str]] = {}
    for attempt in range(1, 6):
        if attempt > 1:
            await next_attempt(service, job_id, attempt - 1)
        start = 0 if attempt == 1 else draw.randint(0, 12)
        frames = [resumed(start)]
        expected = {at: one for at, one in expected.items() if at[2] <= start}
        for step in range(start + 1, start + draw.randint(1, 8)):
            for rank, key in ((0, "a"), (0, "b%"), (1, "a")):
                if draw.random() < 0.6:
                    text = f"{attempt} {draw.random()}"
                    frames.append(reported(step, key=key, given=text, rank=rank))
                    expected[rank, key, step] = attempt, text
        draw.shuffle(frames)
        while frames:
            number = draw.randint(1, len(frames))
            service.report(job_id, attempt, frames[:number])
            frames = frames[number:]
    assert await texts(service, job_id) == {at: text for at, (_, text) in expected.items()}
    assert (await overview(service, job_id)).num_records == len(expected)
    steps = {(one.rank, one.key): one.steps for one in (await overview(service, job_id)).items}
    assert steps == {
        (rank, key): sorted(at[2] for at in expected if at[:2] == (rank, key))
        for rank, key in {at[:2] for at in expected}
    }


@pytest.mark.parametrize(
    ("limit", "value"), [("MAX_RECORDS", 3), ("MAX_SERIES", 1), ("MAX_JOB_BYTES", 150)]
)
async def test_beyond_a_limit_values_are_counted_and_the_first_is_named(
    service: Service, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(ingest, limit, value)
    job_id = await service.running()
    frames = [reported(step, key=f"k{step % 2}") for step in range(1, 7)]
    service.report(job_id, 1, [*frames, metrics(6, {"x": 1.0})])
    kept = sorted(step for _, _, step in await texts(service, job_id))
    assert kept == ([1, 3, 5] if limit == "MAX_SERIES" else [1, 2, 3])
    found = await overview(service, job_id)
    assert (found.num_records, found.num_left_out) == (3, 3)
    (event,) = await events_of(service, job_id, "media_left_out")
    assert "was not stored" in event.message
    assert "x" in (await service.queries.metrics(job_id)).series


async def test_what_a_rank_left_out_is_added(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [reported(1, left_out=3), reported(2, left_out=4)])
    assert (await overview(service, job_id)).num_left_out == 7


async def test_a_storage_that_refuses_costs_files_and_nothing_else(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refuse(key: str, data: bytes) -> None:
        tried.append(key)
        raise StorageUnavailable("the storage is away")

    monkeypatch.setattr(service.storage, "write_bytes", refuse)
    job_id = await service.running()
    pictures = [reported(n, "image", "a", files.picture(seed=n)) for n in range(4)]
    service.report(job_id, 1, [*pictures, reported(1), metrics(1, {"x": 1.0})])
    assert len(tried) == 1, "the others would take as long"
    assert list(await texts(service, job_id, kind=MediaKind.TEXT)) == [(0, "a", 1)]
    found = await overview(service, job_id)
    assert (found.num_records, found.num_left_out) == (1, 4)
    (event,) = await events_of(service, job_id, "media_left_out")
    assert "the storage is away" in event.message
    assert "x" in (await service.queries.metrics(job_id)).series


HOSTILE: dict[str, dict[str, Any]] = {
    "a negative step": {"step": -1},
    "a huge step": {"step": 2**60},
    "a step that is a flag": {"step": True},
    "no key": {"key": ""},
    "a long key": {"key": "k" * 129},
    "an unprintable key": {"key": "a\n"},
    "another kind": {"kind": "point_cloud"},
    "no value": {"value": None},
    "a value of another kind": {"value": {"counts": [1], "edges": [0, 1]}},
    "a file of a text": {"file": "aaaa"},
    "no base64": {"kind": "image", "file": "é"},
    "no picture": {"kind": "image", "file": base64.b64encode(b"<html>").decode()},
    "an image without file": {"kind": "image"},
    "a text longer than it says": {"value": {"text": "abc", "num_chars": 1}},
    "a long text": {"value": {"text": "a" * 70_000, "num_chars": 70_000}},
    "edges that fall": {"kind": "histogram", "value": {"counts": [1], "edges": [1, 0]}},
    "edges that are NaN": {"kind": "histogram", "value": {"counts": [1], "edges": [0, "nan"]}},
    "a count below 0": {"kind": "histogram", "value": {"counts": [-1], "edges": [0, 1]}},
    "a huge count": {"kind": "histogram", "value": {"counts": [2**70], "edges": [0, 1]}},
    "no bins": {"kind": "histogram", "value": {"counts": [], "edges": [0]}},
    "short rows": {"kind": "table", "value": {"columns": ["a"], "rows": [[]], "num_rows": 1}},
    "no columns": {"kind": "table", "value": {"columns": [], "rows": [], "num_rows": 0}},
    "a deep cell": {"kind": "table", "value": {"columns": ["a"], "rows": [[{}]], "num_rows": 1}},
    "a huge cell": {"kind": "table", "value": {"columns": ["a"], "rows": [[2**60]], "num_rows": 1}},
    "many rows": {
        "kind": "table",
        "value": {"columns": ["a"], "rows": [[1]] * 1001, "num_rows": 1001},
    },
    "no square": {"kind": "confusion_matrix", "value": {"classes": ["a"], "counts": [[1, 2]]}},
    "a rate above 1": {
        "kind": "roc_curve",
        "value": {
            "x": [0, 2],
            "y": [0, 1],
            "thresholds": [None, 1],
            "area": 0.5,
            "positives": 1,
            "negatives": 1,
        },
    },
    "left out below 0": {"left_out": -1},
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_frames_of_user_code_are_checked(sqlite_service: Service, name: str) -> None:
    service = sqlite_service
    job_id = await service.running()
    body = {"step": 1, "key": "a", "kind": "text", "value": {"text": "", "num_chars": 0}}
    hostile = frame(FrameKind.MEDIA, {**body, "left_out": 0, **HOSTILE[name]})
    service.report(job_id, 1, [hostile])
    assert (await overview(service, job_id)).items == []
    assert len(await events_of(service, job_id, "frames_refused")) == 1
    service.report(job_id, 1, [reported(1)])
    assert len((await overview(service, job_id)).items) == 1


async def test_pages_have_every_record_once(service: Service) -> None:
    job_id = await service.running()
    at = [(rank, key, step) for rank in (0, 1) for key in "ab" for step in range(1, 6)]
    service.report(job_id, 1, [reported(step, key=key, rank=rank) for rank, key, step in at])
    listing = MediaListing(service.database)
    for wanted in (MediaSelection(), MediaSelection(key="b"), MediaSelection(rank=1, step=3)):
        found, cursor = [], None
        while True:
            page = await listing.page(job_id, wanted, limit=3, cursor=cursor)
            assert len(page.items) <= 3
            found += [(one.rank, one.key, one.step) for one in page.items]
            cursor = page.next_cursor
            if cursor is None:
                break
        assert found == [
            (rank, key, step)
            for rank, key, step in at
            if wanted.key in (None, key) and wanted.rank in (None, rank)
            if wanted.step in (None, step)
        ]
    first = await listing.page(job_id, MediaSelection(), limit=1)
    for other in (MediaSelection(key="a"), MediaSelection(rank=0)):
        with pytest.raises(BadCursor):
            await listing.page(job_id, other, cursor=first.next_cursor)
    assert (await listing.page(job_id, MediaSelection(key="a\0"))).items == []


async def test_a_series_is_thinned_out_evenly(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [reported(10 * step) for step in range(1, 102)])
    listing = MediaListing(service.database)

    async def steps(number: int) -> list[int]:
        page = await listing.spread(job_id, MediaKind.TEXT, "a", 0, number)
        return [one.step for one in page.items]

    assert await steps(2) == [10, 1010]
    assert await steps(5) == [10, 260, 510, 760, 1010]
    assert await steps(500) == [*range(10, 1011, 10)]
    assert (await listing.spread(job_id, MediaKind.IMAGE, "a", 0, 5)).items == []
