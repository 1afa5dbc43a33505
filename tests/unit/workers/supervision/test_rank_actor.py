"""A rank actor shows the progress of its process to Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from dray import train
from ray_workers.supervision.rank_actor import _last_metrics


def test_the_speed_that_a_script_reports_is_shown_as_a_recipes_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRAY_SPOOL_PID", raising=False)
    monkeypatch.setenv("DRAY_SPOOL_DIR", str(tmp_path))
    assert _last_metrics(tmp_path) == {}
    train.report(3, {"train/loss": 0.5}, samples_per_s=70)
    assert _last_metrics(tmp_path) == {"step": 3, "train/loss": 0.5, "perf/samples_per_s": 70}
    train.report(4, {"train/loss": 0.25})
    assert _last_metrics(tmp_path) == {"step": 4, "train/loss": 0.25}
    train.report(5, {"perf/samples_per_s": 60.0}, samples_per_s=70)
    assert _last_metrics(tmp_path) == {"step": 5, "perf/samples_per_s": 60.0}
