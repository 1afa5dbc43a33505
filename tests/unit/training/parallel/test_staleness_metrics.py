"""The staleness of updates as metrics."""

from __future__ import annotations

from ray_workers.shared.contracts import STALENESS_COUNT
from ray_workers.training.parallel.staleness_metrics import staleness_metrics


def test_each_update_is_in_one_bucket_of_the_histogram() -> None:
    metrics = staleness_metrics({0: 4, 1: 3, 3: 1, 4: 2, 5: 1, 128: 6, 129: 1, 4000: 1, 7: 0})
    found = {name.removeprefix(STALENESS_COUNT): n for name, n in metrics.items()}
    buckets = {name: n for name, n in found.items() if name not in metrics}
    assert list(buckets.items()) == [
        *(("000", 4.0), ("001", 3.0), ("003_004", 3.0)),
        *(("005_008", 1.0), ("065_128", 6.0), ("129_up", 2.0)),
    ]
    assert list(buckets) == sorted(buckets)


def test_the_figures_of_all_updates() -> None:
    metrics = staleness_metrics({2: 94, 0: 4, 10: 2})
    figures = {name: n for name, n in metrics.items() if not name.startswith(STALENESS_COUNT)}
    assert figures == {
        "sync/staleness_mean": 2.08,
        "sync/staleness_max": 10.0,
        "sync/staleness_p50": 2.0,
        "sync/staleness_p95": 2.0,
        "sync/staleness_p99": 10.0,
    }
    assert staleness_metrics({3: 0}) == {}
