"""The benchmark of the queue compares with the best of each peer, and jobs really go through."""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.queue_speed import jobs, measure
from benchmarks.queue_speed.measure import MANY, WAITING, Place, Turn


def test_the_peer_counts_with_the_number_of_workers_that_is_fastest() -> None:
    samples = {turn: [1.0] * 4 for turn in measure.turns()}
    samples[Turn("SQLite", "huey", "single", 8)] = [4.0] * 4
    samples[Turn("SQLite", "huey", "single", 2)] = [3.0] * 4
    found = {each.label: each for each in measure.conclude(samples, [], [0.001]).comparisons}
    single = found["jobs per second on SQLite, single: dray / huey"]
    assert (single.ratio.value, single.met) == (3.0, True)
    array = found["jobs per second on SQLite, array: dray / huey"]
    assert (array.ratio.value, array.met) == (1.0, False)


def test_of_each_peer_the_fastest_number_of_workers_stays() -> None:
    tried = {turn: 8.0 - turn.workers / 8 for turn in measure.turns()}
    workers = {turn.workers for turn in measure.fastest(tried)}
    assert workers == {0, 8, 64}


def test_a_full_table_is_compared_with_the_empty_one_of_the_same_database() -> None:
    times = {("SQLite", 0): 2.0, ("SQLite", MANY): 3.0, ("PostgreSQL", 0): 4.0}
    times[("PostgreSQL", MANY)] = 4.0
    places = [Place(db, number, 0, [taken] * 20) for (db, number), taken in times.items()]
    places.append(Place("SQLite", 0, WAITING, [9.0] * 20))
    found = measure.conclude({}, places, [0.001]).comparisons
    assert [(each.ratio.value, each.met) for each in found] == [(1.5, False), (1.0, True)]


def test_jobs_go_through_a_service_on_the_instant_cluster(tmp_path: Path) -> None:
    for how in ("concurrent", "array"):
        home = tmp_path / how
        figures = asyncio.run(jobs.dray(home, f"sqlite:///{home}/dray.db", 5, how))
        assert 0 < figures["submit_s"] < figures["all_s"]
