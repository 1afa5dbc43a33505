"""The output of a rank's process is searched for metrics on its way to the log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ray_workers.node.found_metrics import lines
from ray_workers.node.found_metrics.finder import MetricFinder
from ray_workers.shared import spool_reader
from ray_workers.shared.log_rows import without_mark
from ray_workers.supervision.log_pump import LogPump
from ray_workers.supervision.rank_actor import runs_user_code
from ray_workers.supervision.rules.redraws import LINE_CHARS
from ray_workers.supervision.rules.timings import Timings
from tests.wire import rank_task


def bodies(folder: Path, stream: str) -> list[dict[str, object]]:
    key = spool_reader.spool_key(0, 0, stream)
    data = spool_reader.read(folder / key, 0, 1 << 30)
    return [dict(frame.body) for frame in spool_reader.decode(key, data)]


async def test_metrics_are_found_in_text_bytes_and_lines_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "SEARCHES_PER_S", 100)
    source, sink = os.pipe()
    metric = {"name": "loss", "pattern": r"loss=(\S+)", "step": None, "source": None, "rank": 0}
    task = rank_task(
        spool_dir=str(tmp_path / "r0.0.metrics"),
        work_dir=str(tmp_path / "work"),
        folders_dir=str(tmp_path / "folders"),
        spec={"metrics": [metric, {**metric, "name": None, "pattern": None, "source": "none"}]},
    )
    finder = MetricFinder(task, since=0.0)
    log = LogPump(Path(task.spool_dir), source, 1 << 20, Timings())
    log.show_to(finder.saw)
    os.write(sink, b"loss=0.5\n\xff\xfe\x00 loss=0.25\n" + b"x" * (2 * LINE_CHARS) + b"\n")
    log._pump()
    os.write(sink, b"\n" * 200 + b"loss=9\n")
    os.close(sink)
    log.finish()
    note = await finder.finish()
    assert note is not None
    log.add(note)
    assert await log.lines_lost_at_the_end() == 0
    assert bodies(tmp_path, "found") == [
        {"step": 1, "values": {"loss": 0.5}, "found": True},
        {"step": 2, "values": {"loss": 0.25}, "found": True},
    ]
    last = bodies(tmp_path, "log")[-1]
    assert str(last["text"]).startswith("dray: 10")
    assert str(last["text"]).endswith(
        "lines were not searched for metrics: too many lines were printed at once"
    )


async def test_the_step_of_a_record_is_found_though_the_log_leaves_most_states_of_the_bar_out(
    tmp_path: Path,
) -> None:
    """tqdm moves the cursor out of the bar of an evaluation, which is nested in another."""
    source, sink = os.pipe()
    metric = {"name": None, "pattern": None, "step": None, "source": "transformers", "rank": 0}
    task = rank_task(
        spool_dir=str(tmp_path / "r0.0.metrics"),
        work_dir=str(tmp_path / "work"),
        folders_dir=str(tmp_path / "folders"),
        spec={"script": {"entrypoint": "a.py"}, "metrics": [metric]},
    )
    finder = MetricFinder(task, since=0.0)
    log = LogPump(Path(task.spool_dir), source, 1 << 20, Timings())
    log.show_to(finder.saw, finder.logged)

    def bar(at: int) -> str:
        return f"\r {at:3d}%|#         | {at}/100 [00:01<00:09, 9.9it/s]"

    record = "{'eval_loss': 0.4, 'epoch': 0.1}"
    evaluation = [f"\n\r {at * 25}%|#  | {at}/4 [00:00<00:00]\x1b[A" for at in range(5)]
    parts = [*map(bar, range(11)), *evaluation, "\n\r" + " " * 50 + "\r\x1b[A", "\r" + " " * 50]
    os.write(sink, "".join([*parts, f"\r{record}\n", *map(bar, range(10, 100))]).encode())
    log._pump()
    os.close(sink)
    log.finish()
    await finder.finish()
    assert bodies(tmp_path, "found") == [{"step": 10, "values": {"eval/loss": 0.4}, "found": True}]
    logged = [without_mark(str(body["text"])) for body in bodies(tmp_path, "log")]
    assert [text for _, text in logged] == [record, bar(99)[1:]]
    assert len({row for row, _ in logged}) == 2


def test_a_rank_with_a_model_of_the_users_own_gets_no_credentials_as_a_script_gets_none() -> None:
    assert runs_user_code({"script": {"entrypoint": "a.py"}, "model": None})
    assert runs_user_code({"script": None, "model": {"name": "imported"}})
    assert not runs_user_code({"script": None, "model": {"name": "cnn"}})
    tuned = {"model": {"name": "pretrained"}, "method": {"name": "sft", "metrics": {}}}
    assert not runs_user_code(tuned)
    assert runs_user_code({**tuned, "method": {"name": "sft", "metrics": {"a": "m:A"}}})
