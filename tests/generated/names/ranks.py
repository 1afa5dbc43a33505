"""What a rank passes to its job: metrics through the logger of a case, and files."""

from __future__ import annotations

import asyncio
import csv
import functools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from dray import train
from dray.train import reporting
from ray_workers.node.found_metrics.finder import MetricFinder
from ray_workers.shared import spool_reader
from ray_workers.shared.contracts import Frame
from ray_workers.shared.names import attempt_prefix
from tests.generated.names.drawing import Case, is_odd
from tests.unit.api.serving import LiveServer
from tests.wire import rank_task


def frames_of(server: LiveServer, job_id: str, spec: Mapping[str, Any], case: Case) -> list[Frame]:
    """Return rank 0's frames for the job with document `spec`. Refused parts are removed."""
    folder = server.settings.home / "ranks" / job_id
    artifacts = f"{attempt_prefix(job_id, 1)}/artifacts"
    variables = {
        "DRAY_SPOOL_DIR": str(folder / "r0.0.metrics"),
        "DRAY_ARTIFACT_URL": server.hands.storage.url_of(artifacts),
    }
    (folder / "work").mkdir(parents=True)
    with mock.patch.dict(os.environ, variables):
        if case.logger == "report":
            _report(case)
        _save(folder / "file", case)
        reporting.wait_until_written(lambda: None)
    frames = _spooled(folder, "r0.0.metrics")
    if case.logger != "report":
        with ThreadPoolExecutor(1) as thread:  # Playwright runs an event loop in this thread
            thread.submit(asyncio.run, _log(folder, spec, case)).result()
        frames += _spooled(folder, "r0.0.found")
    return frames


def _spooled(folder: Path, name: str) -> list[Frame]:
    spool = folder / name
    data = spool_reader.read(spool, 0, 1 << 30) if spool.exists() else b""
    return list(spool_reader.decode(name, data))


def _report(case: Case) -> None:
    for key, values in list(case.metrics.items()):
        for step, value in enumerate(values, 1):
            why = refused(functools.partial(train.report, step, {key: value}))
            if why is not None:
                assert "metric key" in why
                assert is_odd(key), f"refused: {key!r}"
                case.refused.append(key)
                case.metrics.pop(key, None)


def _save(file: Path, case: Case) -> None:
    for name, content in list(case.files.items()):
        file.write_bytes(content)
        why = refused(functools.partial(train.save_artifact, file, name))
        if why is not None:
            assert "artifact name" in why
            assert is_odd(name.replace("/", "").replace(".", "")), f"refused: {name!r}"
            case.refused.append(name)
            del case.files[name]


async def _log(folder: Path, spec: Mapping[str, Any], case: Case) -> None:
    """Write or print like a logger, and let dray find the metrics."""
    task = rank_task(
        spool_dir=str(folder / "r0.0.metrics"),
        work_dir=str(folder / "work"),
        folders_dir=str(folder / "folders"),
        folder_url=str(folder / "job" / "checkpoint-folder"),
        spec=spec,
    )
    if case.logger == "tensorboard":
        write_events(folder / "work" / "events.out.tfevents.1.host", case.metrics)
    elif case.logger == "csv":
        write_table(folder / "work" / "metrics.csv", case.metrics)
    finder = MetricFinder(task, since=0.0)
    finder.begin()
    if case.logger == "printed":
        for one in spec["metrics"]:
            for value in case.metrics[one["name"]]:
                finder.saw(one["pattern"].replace("(.*)", repr(value)))
    await finder.finish()
    for key in [key for key in case.metrics if not _is_taken(key)]:
        assert is_odd(key)
        case.refused.append(key)
        del case.metrics[key]


def _is_taken(key: str) -> bool:
    """Whether a metric of a logger can have this name."""
    return 0 < len(key) <= 128 and key.isprintable() and key != "@time"


def write_events(path: Path, metrics: Mapping[str, list[float]]) -> None:
    """An event file, written by TensorBoard's own classes."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    with path.open("wb") as file:
        writer = RecordWriter(file)
        for key, values in metrics.items():
            for step, value in enumerate(values, 1):
                summary = Summary(value=[Summary.Value(tag=key, simple_value=value)])
                writer.write(Event(step=step, summary=summary).SerializeToString())


def write_table(path: Path, metrics: Mapping[str, list[float]]) -> None:
    """A table with a column for each metric; cells without a value are empty."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *metrics])
        for at in range(max(map(len, metrics.values()), default=0)):
            cells = [repr(of[at]) if at < len(of) else "" for of in metrics.values()]
            writer.writerow([at + 1, *cells])


def refused(call: Callable[[], object]) -> str | None:
    """Return the message of a call's ValueError, or None if the call succeeds."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None
