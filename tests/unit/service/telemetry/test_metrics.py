"""The served series: each step once across all attempts, exact values, and downsampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select

from ray_workers.shared.contracts import Cause, Frame
from service.db.models import MetricChunkRow
from service.db.repositories.telemetry import chunks as repository
from service.db.repositories.telemetry.chunks import MetricChunk
from service.domain.series import CHUNK_POINTS, TIMES, outline, summarise, unpack
from service.telemetry.chunk_columns import summary_of
from service.telemetry.metric_writer import MAX_KEYS
from service.telemetry.series_filters import MetricsFilter
from tests.marks import ONE_SET, soak
from tests.unit.service.helpers import START, Service, events_of, metrics, resumed


def losses(steps: Sequence[int], value: float = 1.0, **more: int) -> list[Frame]:
    return [metrics(step, {"loss": value}, **more) for step in steps]


async def series(service: Service, job_id: str, key: str = "loss", **more: int) -> dict[int, float]:
    found = await service.queries.metrics(job_id, MetricsFilter(max_points=100_000, **more))
    if key not in found.series:
        return {}
    steps, values = found.series[key].steps, found.series[key].values
    assert steps == sorted(set(steps))
    return dict(zip(steps, map(float, values), strict=True))


async def next_attempt(service: Service, job_id: str, attempt: int) -> None:
    service.end(job_id, attempt, Cause.NODE_LOST)
    assert service.claim(job_id, attempt) is not None


async def test_a_step_is_served_once_over_attempts_that_resumed(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [resumed(0), *losses(range(1, 81), 1.0)])
    await next_attempt(service, job_id, 1)
    service.report(job_id, 2, [resumed(50), *losses(range(51, 71), 2.0)])
    await next_attempt(service, job_id, 2)
    service.report(job_id, 3, [resumed(60), *losses(range(61, 101), 3.0)])
    served = await series(service, job_id)
    assert sorted(served) == list(range(1, 101))
    assert [served[step] for step in (50, 51, 60, 61, 100)] == [1.0, 2.0, 2.0, 3.0, 3.0]


async def test_an_attempt_that_never_trained_voids_nothing(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [resumed(0), *losses(range(1, 11))])
    await next_attempt(service, job_id, 1)
    assert sorted(await series(service, job_id)) == list(range(1, 11))
    await next_attempt(service, job_id, 2)
    service.report(job_id, 3, [resumed(0), *losses([1], 9.0)])
    assert await series(service, job_id) == {1: 9.0}


async def test_what_a_later_attempt_went_back_behind_is_void_also_for_keys_it_does_not_report(
    service: Service,
) -> None:
    job_id = await service.running()
    frames = [resumed(0), *losses(range(1, 21)), metrics(20, {"val": 0.5})]
    service.report(job_id, 1, frames)
    await next_attempt(service, job_id, 1)
    service.report(job_id, 2, [resumed(10), *losses([11], 2.0)])
    assert await series(service, job_id, "val") == {}
    assert max(await series(service, job_id)) == 11


async def test_a_script_that_does_not_say_where_it_resumed_is_cut_at_its_first_step(
    service: Service,
) -> None:
    job_id = await service.running()
    service.report(job_id, 1, losses(range(1, 21), 1.0))
    await next_attempt(service, job_id, 1)
    service.report(job_id, 2, losses(range(15, 18), 2.0))
    served = await series(service, job_id)
    assert sorted(served) == list(range(1, 18))
    assert (served[14], served[15]) == (1.0, 2.0)


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_fold_that_begins_in_a_later_attempt_hides_no_other_fold(
    service: Service, at_once: bool
) -> None:
    def fold(key: str, steps: range, value: float) -> list[Frame]:
        # Unlike floats, ints are checked frame by frame.
        values = {key: value if at_once else int(value)}
        return [metrics(step, values, found=True) for step in steps]

    job_id = await service.running()
    service.report(job_id, 1, [*fold("a/f1", range(6), 1.0), *fold("b/f1", range(5), 1.0)])
    await next_attempt(service, job_id, 1)
    service.report(job_id, 2, [*fold("b/f1", range(3, 6), 2.0), *fold("c/f1", range(6), 2.0)])
    await next_attempt(service, job_id, 2)
    service.report(job_id, 3, fold("d/f1", range(2), 3.0))
    assert await series(service, job_id, "a/f1") == dict.fromkeys(range(6), 1.0)
    replaced = dict.fromkeys(range(3), 1.0) | dict.fromkeys(range(3, 6), 2.0)
    assert await series(service, job_id, "b/f1") == replaced
    assert await series(service, job_id, "c/f1") == dict.fromkeys(range(6), 2.0)
    service.end(job_id, 3)
    assert set((await service.jobs.get(job_id)).summary) == {f"{name}/f1" for name in "abcd"}


async def test_reported_steps_that_were_undone_are_void_for_series_that_come_later(
    service: Service,
) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [*losses(range(1, 21)), metrics(20, {"val": 0.5})])
    await next_attempt(service, job_id, 1)
    service.report(job_id, 2, losses([15]))
    assert await series(service, job_id, "val") == {}


async def test_a_step_at_which_both_attempts_report_is_the_later_ones(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [resumed(0), *losses(range(11), 1.0)])
    await next_attempt(service, job_id, 1)
    service.report(job_id, 2, [resumed(5), *losses(range(5, 8), 2.0)])
    served = await series(service, job_id)
    assert sorted(served) == list(range(8))
    assert (served[4], served[5]) == (1.0, 2.0)


async def test_within_an_attempt_the_first_value_of_a_step_stays(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, losses([1, 2, 3], 1.0))
    service.report(job_id, 1, losses([2, 3, 4, 4], 2.0, incarnation=1))
    assert await series(service, job_id) == {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0}
    types = [e.type for e in (await service.queries.events(job_id)).items]
    assert "metric_steps_repeated" not in types
    service.report(job_id, 1, losses([4, 3], 3.0))
    service.report(job_id, 1, losses([4, 3], 3.0))
    types = [e.type for e in (await service.queries.events(job_id)).items]
    assert types.count("metric_steps_repeated") == 1


async def test_ranks_are_apart(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, losses([1], 1.0) + losses([1, 2], 5.0, rank=1))
    assert await series(service, job_id) == {1: 1.0}
    assert await series(service, job_id, rank=1) == {1: 5.0, 2: 5.0}
    assert await series(service, job_id, rank=2) == {}


async def test_no_value_is_lost_or_changed(service: Service) -> None:
    job_id = await service.running()
    values = [math.nan, math.inf, -math.inf, 5e-324, 1.7976931348623157e308, 0.1, -0.0]
    frames = [metrics(i, {"x": value}) for i, value in enumerate(values, 1)]
    for one in frames:
        service.report(job_id, 1, [one])
    served = (await service.queries.metrics(job_id)).series["x"]
    assert served.steps == list(range(1, 8))
    assert served.values == ["NaN", "Infinity", "-Infinity", *values[3:]]
    service.report(job_id, 1, [metrics(8, {"x": math.nan})])
    assert (await service.jobs.get(job_id)).summary["x"] == "NaN"


async def test_keys_can_be_chosen(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [metrics(1, {"a": 1.0, "b": 2.0, "c": 3.0})])
    found = await service.queries.metrics(job_id, MetricsFilter(keys=("c", "a", "none")))
    assert list(found.series) == ["a", "c"]


async def test_a_series_goes_on_from_chunk_to_chunk(service: Service) -> None:
    job_id = await service.running()
    last = 2 * CHUNK_POINTS + 100
    for begin in range(1, last + 1, 700):
        service.report(job_id, 1, losses(range(begin, min(begin + 700, last + 1)), begin))
    served = await series(service, job_id)
    assert sorted(served) == list(range(1, last + 1))
    service.end(job_id, 1)
    assert await series(service, job_id) == served
    rows = service.database.read_sync(
        lambda s: s.execute(
            select(MetricChunkRow.count, MetricChunkRow.is_open)
            .where(MetricChunkRow.key == "loss")
            .order_by(MetricChunkRow.first_step)
        ).all()
    )
    assert [tuple(row) for row in rows] == [
        (CHUNK_POINTS, False),
        (CHUNK_POINTS, False),
        (100, True),
    ]


@pytest.mark.parametrize("max_points", [soak(2), 5, soak(40)])
async def test_a_long_series_keeps_ends_spikes_and_its_nan(
    service: Service, max_points: int
) -> None:
    job_id = await service.running()
    count = 40 * CHUNK_POINTS
    values = dict.fromkeys(range(1, count + 1), 1.0)
    values[20_001], values[30_002], values[10_003] = 1e9, -1e9, math.nan
    service.report(job_id, 1, [metrics(step, {"loss": v}) for step, v in values.items()])
    answer = await service.queries.metrics(job_id, MetricsFilter(max_points=max_points))
    found = answer.series["loss"]
    assert len(found.steps) <= max_points
    assert (found.steps[0], found.steps[-1]) == (1, count)
    if max_points >= 5:
        assert {1e9, -1e9, "NaN"} <= set(found.values)


async def test_polling_by_next_step_gathers_the_whole_series(service: Service) -> None:
    job_id = await service.running()
    gathered: dict[str, dict[int, object]] = {"loss": {}, "val": {}}
    after: int | None = None

    async def poll() -> None:
        nonlocal after
        found = await service.queries.metrics(job_id, MetricsFilter(after_step=after))
        for key, part in found.series.items():
            gathered[key].update(zip(part.steps, part.values, strict=True))
        after = found.next_step

    for step in range(1, 11):
        service.report(job_id, 1, losses([step]))
        await poll()
        if step % 5 == 0:  # a step's evaluation is reported after its training metrics
            service.report(job_id, 1, [metrics(step, {"val": float(step)})])
            await poll()
    service.end(job_id, 1)
    await poll()
    assert sorted(gathered["loss"]) == list(range(1, 11))
    assert gathered["val"] == {5: 5.0, 10: 10.0}
    assert after == 10
    await poll()
    assert (await service.queries.metrics(job_id, MetricsFilter(after_step=after))).series == {}


async def test_only_steps_after_the_given_one_are_served(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, losses(range(3000)))
    assert sorted(await series(service, job_id, after_step=2990)) == list(range(2991, 3000))
    assert await series(service, job_id, after_step=5000) == {}
    assert (await service.queries.metrics(job_id, MetricsFilter(after_step=5000))).next_step == 5000
    assert min(await series(service, job_id)) == 0


async def test_a_part_of_a_series_is_served_in_more_detail_than_the_whole(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [resumed(0), *losses(range(1, 3001), 1.0)])
    await next_attempt(service, job_id, 1)
    service.report(job_id, 2, [resumed(2500), *losses(range(2501, 5001), 2.0)])
    part = await series(service, job_id, after_step=2000, until_step=2600)
    assert sorted(part) == list(range(2001, 2601))
    assert (part[2500], part[2501]) == (1.0, 2.0)
    query = MetricsFilter(after_step=2000, until_step=2100, max_points=100)
    found = await service.queries.metrics(job_id, query)
    assert found.series["loss"].steps == list(range(2001, 2101))
    assert await series(service, job_id, after_step=50, until_step=50) == {}


async def test_more_than_a_thousand_names_are_refused_once_and_the_known_go_on(
    service: Service,
) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [metrics(1, {f"k{i}": 1.0 for i in range(MAX_KEYS - 1)})])
    service.report(job_id, 1, [metrics(2, {"k0": 2.0, "one": 1.0, "two": 1.0})])
    service.report(job_id, 1, [metrics(3, {"k0": 3.0, "two": 1.0, "three": 1.0}, rank=0)])
    names = service.database.read_sync(lambda s: repository.metric_keys(s, job_id))
    assert len(names - {TIMES}) == MAX_KEYS
    assert await series(service, job_id, "k0") == {1: 1.0, 2: 2.0, 3: 3.0}
    types = [e.type for e in (await service.queries.events(job_id)).items]
    assert types.count("metric_keys_limit") == 1


async def test_a_key_can_consist_of_commas(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [metrics(1, {",": 1.0, "a,b": 2.0, "a": 3.0, "b": 4.0})])
    for asked, found in (
        ((",",), {","}),
        (("a,b",), {"a,b"}),
        (("b,a",), {"a", "b"}),
        (("",), {",", "a,b", "a", "b"}),
        ((",,",), {",", "a,b", "a", "b"}),
        (("none",), set()),
    ):
        got = await service.queries.metrics(job_id, MetricsFilter(keys=asked))
        assert got.series.keys() == found


@ONE_SET
@pytest.mark.parametrize("per_step", [soak(1000), 100_000])
async def test_of_a_hundred_thousand_names_the_first_thousand_are_kept(
    service: Service, per_step: int
) -> None:
    job_id = await service.running()
    names = [f"k{i:06}" for i in range(100_000)]
    frames = [
        metrics(first + 1, dict.fromkeys(names[first : first + per_step], 1.0))
        for first in range(0, len(names), per_step)
    ]
    service.report(job_id, 1, frames)
    stored = service.database.read_sync(lambda s: set(s.scalars(select(MetricChunkRow.key))))
    assert stored == {TIMES, *names[:MAX_KEYS]}
    assert (await service.jobs.get(job_id)).summary.keys() == stored - {TIMES}
    (event,) = await events_of(service, job_id, "metric_keys_limit")
    assert repr(names[MAX_KEYS]) in event.message


@pytest.mark.parametrize("count", [33 * 128, soak(300_000)])
async def test_no_level_of_detail_loses_a_spike_or_the_only_nan(
    service: Service, count: int
) -> None:
    """The number of points determines whether individual points, blocks, or chunks are read."""
    job_id = await service.running()
    spikes = {count // 7: 50.0, count // 3: -50.0, count - 3: 70.0}
    for begin in range(1, count + 1, 20_000):
        frames = []
        for step in range(begin, min(begin + 20_000, count + 1)):
            value = spikes.get(step, math.sin(step / 100))
            frames.append(metrics(step, {"loss": value, "holed": value}))
        frames[0] = metrics(begin, {"loss": math.sin(begin / 100), "holed": math.nan})
        service.report(job_id, 1, frames)
    for max_points in (100, 1000, 20_000):
        found = await service.queries.metrics(job_id, MetricsFilter(max_points=max_points))
        series = found.series["loss"]
        assert len(series.steps) <= max_points
        assert (series.steps[0], series.steps[-1]) == (1, count)
        assert series.steps == sorted(set(series.steps))
        shown = dict(zip(series.steps, series.values, strict=True))
        assert spikes.items() <= shown.items()
        assert all(
            value == math.sin(step / 100) for step, value in shown.items() if step not in spikes
        )
        assert "NaN" in found.series["holed"].values
        assert {50.0, -50.0, 70.0} <= set(found.series["holed"].values)


@ONE_SET
@pytest.mark.parametrize("sizes", [[1] * 130, [63, 1, 64, 65, 1000, 2, 1023], [3000]])
async def test_a_chunk_that_grew_is_summarised_as_one_that_was_written_at_once(
    service: Service, sizes: list[int]
) -> None:
    job_id = await service.running()
    steps = iter(range(1, 10_000))
    values = [math.nan if step % 97 == 0 else math.cos(step) for step in range(10_000)]
    for size in sizes:
        taken = [next(steps) for _ in range(size)]
        service.report(job_id, 1, [metrics(step, {"x": values[step]}) for step in taken])
    service.end(job_id, 1)
    rows = service.database.read_sync(
        lambda s: list(s.scalars(select(MetricChunkRow).where(MetricChunkRow.key == "x")))
    )
    assert sum(row.count for row in rows) == sum(sizes)
    for row in rows:
        its_steps, its_values = unpack(row.points)
        assert row.outline == outline(its_steps, its_values)
        told, whole = summary_of(row), summarise(its_steps, its_values)
        assert (told.count, told.low, told.high) == (whole.count, whole.low, whole.high)
        assert (told.nan_step, told.first[0], told.last[0]) == (
            whole.nan_step,
            whole.first[0],
            whole.last[0],
        )


async def test_a_poll_reads_the_chunks_with_something_new_and_no_other(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [resumed(0), *losses(range(1, 20 * CHUNK_POINTS + 1))])
    await next_attempt(service, job_id, 1)
    last = 20 * CHUNK_POINTS
    service.report(job_id, 2, [resumed(last), *losses(range(last, last + 11), 2.0)])
    read: list[int] = []
    chunks = repository.metric_chunks

    def counting(*asked: Any) -> list[MetricChunk]:
        found = chunks(*asked)
        read.append(sum(chunk.key != TIMES for chunk in found))
        return found

    monkeypatch.setattr(repository, "metric_chunks", counting)
    served = await series(service, job_id, after_step=last - 1)
    assert served == dict.fromkeys(range(last, last + 11), 2.0)
    assert read == [2], "the last chunk of the first attempt, and the one of the second"
    assert await series(service, job_id, after_step=last - 2) == {last - 1: 1.0, **served}


async def times(service: Service, job_id: str, **more: Any) -> dict[str, list[float]]:
    """Return the times of points by key, in seconds after `START`."""
    found = await service.queries.metrics(job_id, MetricsFilter(times=True, **more))
    return {
        key: [time - START.timestamp() for time in one.times or ()]
        for key, one in found.series.items()
    }


def at(second: float) -> datetime:
    return START + timedelta(seconds=second)


async def test_each_point_has_the_time_at_which_its_step_was_first_reported(
    service: Service,
) -> None:
    job_id = await service.running()
    frames = [metrics(step, {"loss": 1.0}, at=at(10 * step)) for step in (1, 2, 4)]
    late = metrics(4, {"val": 1.0}, at=at(99))
    service.report(job_id, 1, [resumed(0), *frames, late, metrics(3, {"eval": 1.0}, at=at(100))])
    assert await times(service, job_id) == {"eval": [30.0], "loss": [10, 20, 40], "val": [40.0]}
    assert (await times(service, job_id, after_step=2))["loss"] == [40]
    await next_attempt(service, job_id, 1)
    service.report(job_id, 2, [resumed(1), metrics(2, {"loss": 2.0}, at=at(500))])
    assert await times(service, job_id) == {"loss": [10, 500]}
    job = await service.jobs.get(job_id)
    assert set(job.summary) == {"loss", "val", "eval"}, "the times are no metric"
    assert (await service.queries.metrics(job_id)).series["loss"].times is None


async def test_points_that_are_thinned_out_have_times_near_theirs(service: Service) -> None:
    job_id = await service.running()
    steps = range(1, 3 * CHUNK_POINTS)
    service.report(job_id, 1, [metrics(n, {"loss": math.sin(n)}, at=at(n)) for n in steps])
    found = await service.queries.metrics(job_id, MetricsFilter(times=True, max_points=100))
    (series,) = found.series.values()
    assert len(series.steps) <= 100
    assert [time - START.timestamp() for time in series.times or ()] == pytest.approx(series.steps)


async def test_a_frame_without_a_time_gets_the_servers(service: Service) -> None:
    job_id = await service.running()
    no_times = (math.nan, -1.0, 1e12)
    frames = [metrics(n, {"loss": 1.0}) for n in range(len(no_times))]
    wrong = [replace(frame, time=time) for frame, time in zip(frames, no_times, strict=True)]
    service.report(job_id, 1, wrong)
    assert (await times(service, job_id))["loss"] == [0.0, 0.0, 0.0]


async def test_read_in_order_no_point_is_left_out(service: Service) -> None:
    """The series have different lengths and gaps across attempts, and pages have any size."""
    job_id = await service.running()
    last = 2 * CHUNK_POINTS + 100
    frames = [metrics(n, {"loss": n, **({"val": n} if n % 50 == 0 else {})}) for n in range(last)]
    service.report(job_id, 1, [metrics(0, {"once": 7}), *frames])
    await next_attempt(service, job_id, 1)
    service.report(job_id, 2, [resumed(1500), metrics(1501, {"loss": -1.0})])
    service.report(job_id, 2, [metrics(1502, {"loss": -2.0})])
    whole = await service.queries.metrics(job_id, MetricsFilter(max_points=100_000))
    for size in (2, 700, CHUNK_POINTS, 100_000):
        read: dict[str, list[int]] = {}
        after_step, num_pages = None, 0
        while True:
            page = await service.queries.metrics(
                job_id, MetricsFilter(after_step=after_step, max_points=size, in_order=True)
            )
            num_pages += 1
            for key, one in page.series.items():
                known = read.setdefault(key, [])
                known += [step for step in one.steps if not known or step > known[-1]]
                assert len(one.steps) <= size
            after_step = page.next_step
            if all(len(one.steps) < size for one in page.series.values()):
                break
            if size == 2 and num_pages == 5:
                break
        wanted = {key: one.steps for key, one in whole.series.items()}
        if size == 2:
            assert read["loss"] == wanted["loss"][: len(read["loss"])]
        else:
            assert read == wanted


async def test_a_part_is_read_in_order_up_to_its_last_step(service: Service) -> None:
    job_id = await service.running()
    steps = range(1, 2 * CHUNK_POINTS)
    service.report(job_id, 1, [metrics(n, {"loss": 1.0}, at=at(n)) for n in steps])
    part: dict[str, Any] = {"until_step": 1030, "max_points": 20, "in_order": True}
    assert await times(service, job_id, after_step=1000, **part) == {"loss": [*range(1001, 1021)]}
    page = await service.queries.metrics(job_id, MetricsFilter(after_step=1000, **part))
    assert page.next_step == 1020
    assert await times(service, job_id, after_step=1020, **part) == {"loss": [*range(1021, 1031)]}
