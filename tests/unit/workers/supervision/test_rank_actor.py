"""A rank actor shows the progress of its process to Ray, and its last status to the supervisor."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dray import train
from ray_workers.shared.heartbeat import SIZE_BYTES, HeartbeatPage, page_path
from ray_workers.supervision.rank_actor import RankActor, _last_metrics
from ray_workers.supervision.rules.timings import Timings


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


async def test_the_end_of_a_process_comes_with_the_last_status_of_its_page(tmp_path: Path) -> None:
    async def no_lines() -> int:
        return 0

    async def code() -> int:
        return 0

    actor: Any = RankActor.__ray_actor_class__("dray:job:1:worker:3:2", "digits", Timings())  # type: ignore[attr-defined]
    actor._log = SimpleNamespace(finish=lambda: None, lines_lost_at_the_end=no_lines)
    actor._process = SimpleNamespace(wait=code, left=(), memory_kills=0)
    actor._gauges, actor._finder = asyncio.get_running_loop().create_future(), None
    actor._page_prefix = str(tmp_path / "r3.2")
    assert (await actor.wait()).last_status is None, "it ended before it had a page"
    path = page_path(actor._page_prefix)
    page = HeartbeatPage(path)
    page.begin(2, 7)
    page.commit(8)
    status = (await actor.wait()).last_status
    assert (status.generation, status.resumed_step, status.step) == (2, 7, 8)
    path.write_bytes(b"\xff" * SIZE_BYTES)
    assert (await actor.wait()).last_status is None, "the user's program wrote over the page"
