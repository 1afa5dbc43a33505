"""The rows of a finished and a waiting job, in the schema of any version of dray."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from sqlalchemy import ColumnElement
from sqlalchemy.orm import DeclarativeBase

from dray.views import JobState
from ray_workers.shared.names import attempt_prefix
from ray_workers.shared.quarantine import Quarantined
from ray_workers.shared.supervisor_frames import HangReport
from service.checkpoints.init_from import InitFromCheckpoint
from service.db import models
from service.db.types import UtcDateTime
from service.domain.node_checks import CheckCause, CheckOutcome, CheckState
from service.domain.series import CHUNK_POINTS, pack, pack_row, summarise
from service.domain.system_metrics import SystemSamples
from service.domain.system_metrics import pack as pack_samples
from service.ingest.decoding import decode
from service.ingest.hangs import bounded
from service.storage.storage import Storage
from tests.unit.service.helpers import SHA, START, hang

JOB = "job-00000000000000000000000001"
WAITING = "job-00000000000000000000000002"
HELD = {"useful": 30.0, "idle": 10.0}
VALUES = {str: "x", int: 1, float: 0.5, bool: True, object: {"a": 1}, bytes: b"x"}
"""A value for each type of column."""
RECEIPT = {
    "step": 4,
    "url": "file:///s/step-4",
    "sha256": SHA,
    "size_bytes": 10,
    "loss_before": 0.6,
    "loss_after": 0.5,
}


def rows(storage: Storage) -> Iterator[tuple[type[DeclarativeBase], dict[str, Any]]]:
    """The rows that the current version of dray would write. For older schemas, columns can be
    omitted."""
    written = list(rows_that_are_read(storage))
    yield from written
    others = {mapper.class_ for mapper in models.Base.registry.mappers} - {
        row for row, _ in written
    }
    order = [table.name for table in models.Base.metadata.sorted_tables]  # by foreign keys
    for row in sorted(others, key=lambda row: order.index(row.__tablename__)):
        yield row, made_up_row(row)


def made_up_row(row: type[DeclarativeBase]) -> dict[str, Any]:
    """Return a value of the correct type for each column."""
    return {column.name: made_up_value(column) for column in row.__table__.columns}


def made_up_value(column: ColumnElement[Any]) -> object:
    if column.key in ("job_id", "baseline"):
        return JOB
    if isinstance(column.type, UtcDateTime):
        return START
    return VALUES[column.type.python_type]  # JSON columns return object


def rows_that_are_read(
    storage: Storage,
) -> Iterator[tuple[type[DeclarativeBase], dict[str, Any]]]:
    """Yield the rows whose values matter to the tests, or to the use cases that they call."""
    yield models.DeploymentRow, {"id": "old-deployment", "created_at": START}
    yield (
        models.JobRow,
        job(
            JOB,
            JobState.SUCCEEDED,
            attempt=1,
            finished_at=START,
            min_workers=1,
            recoveries=2,
            slot_seconds=HELD,
            cost={"currency": "EUR", "total": 2.0, "useful": 1.5, "wasted": 0.5, "unreported": 0.0},
        ),
    )
    url = storage.url_of(f"{attempt_prefix(JOB, 1)}/checkpoints/step-5")
    origin = InitFromCheckpoint(JOB, "latest", 1, 5, url, SHA)
    waiting = job(WAITING, JobState.QUEUED, attempt=0)
    yield models.JobRow, {**waiting, "init_from": origin.as_row(), "init_from_job": JOB}
    asked = {"id": 1, "num_nodes": 1, "bundles": [[{"CPU": 1.0}, 2]], "asked_at": START}
    yield models.AutoscalingRow, asked
    yield models.JobLabelRow, {"job_id": JOB, "key": "team", "value": "a"}
    yield (
        models.DocumentValueRow,
        {"holder": JOB, "pointer": "/train/seed", "number": 1.0, "text": None},
    )
    dependency = {"waiter": "array-2", "after_id": "array-1", "on_success": True}
    yield models.JobDependencyRow, dependency
    sweep = {"array_id": "array-1", "sweep": {"metric": "x"}, "base": {"a": 1}, "num_trials": 2}
    yield models.SweepRow, sweep
    trial = {"job_id": JOB, "array_id": "array-1", "array_index": 1, "parameters": {"lr": 0.1}}
    yield models.TrialRow, {**trial, "value": 0.5, "value_step": 3, "last_step": 4, "rung": 1}
    yield (
        models.AttemptRow,
        {
            "job_id": JOB,
            "attempt": 1,
            "phase": "ended",
            "slices": [],
            "held": {"node-a": {"labels": {"zone": "a"}, "slot_seconds": 40.0}},
            "held_until": START,
            "carriers": ["node-a"],
            "bundle": {"CPU": 1.0},
            "world_size": 1,
            "cluster_session": "s",
            "cursor": {"rank-0": 5},
            "resume_step": 0,
            "last_metric_step": 7,
            "generation": 2,
            "slot_seconds": HELD,
            "ledger_at": START,
            "lacking": 0,
            "grants": 1,
            "granted": [],
            "grow_after": START,
            "growth": {"code": "no_room", "message": "full", "blocked_by": []},
            "preempt_asked_at": START,
            "preempt_grace_s": 5.0,
            "num_errors": 0,
            "reason_code": "succeeded",
            "reason_message": "it ended",
            "created_at": START,
            "finished_at": START,
            "receipt": RECEIPT,
        },
    )
    for seq, state in enumerate(("QUEUED", "STARTING", "RUNNING", "SUCCEEDED"), 1):
        yield (
            models.EventRow,
            {
                "job_id": JOB,
                "seq": seq,
                "time": START,
                "type": "state",
                "attempt": 1,
                "to_state": JobState(state),
                "code": "x",
                "message": f"m{seq}",
                "data": {},
            },
        )
    for number in range(2):
        first = 1 + number * CHUNK_POINTS
        yield models.MetricChunkRow, chunk(range(first, first + CHUNK_POINTS), is_open=number == 1)
    yield (
        models.RecentMetricsRow,
        {
            "job_id": JOB,
            "attempt": 1,
            "last_step": 2 * CHUNK_POINTS + 1,
            "points": pack_row(
                {("loss", 0): ([2 * CHUNK_POINTS + 1], [1.0 / (2 * CHUNK_POINTS + 1)])}
            ),
        },
    )
    yield (
        models.SystemMetricsRow,
        {
            "job_id": JOB,
            "first_rank": 0,
            "is_lone": True,
            "mean_of": 1,
            "num_samples": 1,
            "last_time": 100,
            "points": pack_samples(SystemSamples([100], {("system/cpu", 0): [1.5]})),
        },
    )
    line = json.dumps([START.timestamp(), "hello"]) + "\n"
    yield (
        models.LogChunkRow,
        {
            "job_id": JOB,
            "attempt": 1,
            "rank": 0,
            "first_line": 0,
            "num_lines": 1,
            "size_bytes": len(line),
            "incarnation": 0,
            "next_number": 1,
            "text": line,
        },
    )
    yield (
        models.CheckpointRow,
        {
            "job_id": JOB,
            "attempt": 1,
            "step": 5,
            "url": url,
            "size_bytes": 10,
            "manifest_sha256": SHA,
            "metrics": {},
            "created_at": START,
        },
    )
    yield (
        models.ArtifactRow,
        {
            "job_id": JOB,
            "id": "a",
            "attempt": 1,
            "path": "model",
            "url": f"{url}/m",
            "size_bytes": 3,
            "sha256": SHA,
            "created_at": START,
        },
    )
    of = {"job_id": "job-deleted", "attempt": 1, "queue": "default", "owner": "ann"}
    slots = {"slices": [{"node_id": "node-a", "num_workers": 1}], "bundle": {"CPU": 1.0}}
    yield (
        models.DeletedAttemptRow,
        {**of, **slots, "created_at": START, "finished_at": START},
    )
    yield from faults()
    yield from forecasts()
    yield from surroundings()


def hang_row() -> dict[str, Any]:
    report = decode(hang(1))
    assert isinstance(report, HangReport)
    return bounded(report, 2).body()


def faults() -> Iterator[tuple[type[DeclarativeBase], dict[str, Any]]]:
    """Yield the hang and the drill of the finished job."""
    yield (
        models.HangRow,
        {"job_id": JOB, "seq": 1, "attempt": 1, "time": START, "body": hang_row()},
    )
    yield (
        models.DrillRow,
        {
            "job_id": JOB,
            "id": "drill-1",
            "attempt": 1,
            "kind": "kill",
            "rank": 0,
            "resumes": False,
            "state": "passed",
            "step": 5,
            "recovery_s": 0.5,
            "steps_lost": 0,
            "message": "recovered",
            "created_at": START,
            "struck_at": START,
            "finished_at": START,
        },
    )


def forecasts() -> Iterator[tuple[type[DeclarativeBase], dict[str, Any]]]:
    """Yield the forecast of the waiting job's start, and the policy's snapshot."""
    yield (
        models.ForecastRow,
        {
            "job_id": WAITING,
            "attempt": 1,
            "of": "start",
            "expected_at": START,
            "num_assumed": 1,
            "made_at": START,
            "first_expected_at": START,
            "first_made_at": START,
        },
    )
    packed = b"packed"
    yield models.OutlookRow, {"id": 1, "made_at": START, "situation": packed, "errors": {}}
    summary = {"started": [JOB], "num_waiting": 1}
    yield (
        models.DecisionRow,
        {"made_at": START, "summary": summary, "size_bytes": 6, "record": packed},
    )


def surroundings() -> Iterator[tuple[type[DeclarativeBase], dict[str, Any]]]:
    """Yield rows that do not belong to a job."""
    yield models.SlotSecondsRow, {"slot_class": "useful", "seconds": 40.0}
    yield (
        models.LeaseRow,
        {"name": "loops", "holder": "big.lan:7:ab", "term": 3, "expires_at": START},
    )
    yield models.StorageStateRow, {"id": 1, "used_bytes": 7, "free_bytes": 9, "updated_at": START}
    yield from uploaded()
    yield models.ClusterRow, {"id": 1, "connected": True, "session": "s", "updated_at": START}
    yield (
        models.WithheldRow,
        {
            "hostname": "big.lan",
            "gpu": "GPU-1",
            "code": "xid_79",
            "mark": "1.0",
            "reason": "GPU 0: Xid 79: the GPU has fallen off the bus",
            "since": START,
            "is_active": True,
        },
    )
    yield (
        models.NodeCheckRow,
        {
            "hostname": "big.lan",
            "id": "check-1",
            "state": CheckState.DONE,
            "cause": CheckCause.ASKED,
            "why": "root",
            "asked_at": START,
            "began_at": START,
            "ended_at": START,
            "outcome": CheckOutcome.PASSED,
            "message": "passed",
            "devices": [],
        },
    )
    yield (
        models.NodeRow,
        {
            "node_id": "node-a",
            "hostname": "big.lan",
            "alive": True,
            "accepted": True,
            "total": {"CPU": 4.0},
            "available": {"CPU": 3.0},
            "quarantined": [asdict(Quarantined(JOB, 1, 1, {"CPU": 1.0}, "pid 7", 0.0))],
            "updated_at": START,
        },
    )


def uploaded() -> Iterator[tuple[type[DeclarativeBase], dict[str, Any]]]:
    """Yield the rows for code that consists of one file."""
    yield (
        models.CodeRow,
        {
            "owner": "ann",
            "id": "code-1",
            "num_files": 1,
            "size_bytes": 9,
            "manifest_key": "code/a/code-1.json",
            "manifest_sha256": "0" * 64,
            "created_at": START,
            "used_at": START,
        },
    )
    pack_row = {"key": "code/a/packs/1", "owner": "ann", "size_bytes": 9, "used_at": START}
    yield models.CodePackRow, pack_row
    place = {"pack": "code/a/packs/1", "start": 0, "size_bytes": 9}
    yield (
        models.QueueRow,
        {
            "name": "night",
            "weight": 2.0,
            "user_weights": {"ann": 2.0},
            "limit": {"GPU": 8.0},
            "max_queued": 5,
        },
    )
    yield models.CodePartRow, {"owner": "ann", "sha256": "1" * 64, **place}
    yield models.CodeUseRow, {"owner": "ann", "code": "code-1", "pack": "code/a/packs/1"}


def job(job_id: str, state: JobState, **more: Any) -> dict[str, Any]:
    document = {"version": 1, "recipe": "image_classification", "name": "old"}
    counts = dict.fromkeys(
        (
            *("event_seq", "user_failures", "infra_failures", "free_requeues", "preemptions"),
            *("max_user_retries", "max_infra_retries", "num_metric_keys", "log_bytes"),
            *("log_lines_dropped",),
        ),
        0,
    )
    return {
        **counts,
        "id": job_id,
        "name": "old",
        "owner": "ann",
        "project": "vision",
        "queue": "default",
        "priority": 50,
        "spec": document,
        "spec_version": 1,
        "num_workers": 1,
        "bundle": {"CPU": 1.0},
        "state": state,
        "reason_code": "x",
        "reason_message": "y",
        "blocked_by": [],
        "world_size": 1,
        "runtime_used_s": 0.0,
        "summary": {"loss": 0.5},
        "log_limit_bytes": 1000,
        "created_at": START,
        **more,
    }


def chunk(steps: range, *, is_open: bool) -> dict[str, Any]:
    values = [1.0 / step for step in steps]
    summary = summarise(steps, values)
    assert summary.low is not None
    assert summary.high is not None
    return {
        "job_id": JOB,
        "key": "loss",
        "attempt": 1,
        "rank": 0,
        "is_open": is_open,
        "count": len(steps),
        "first_step": steps[0],
        "first_value": values[0],
        "last_step": steps[-1],
        "last_value": values[-1],
        "min_step": summary.low[0],
        "min_value": summary.low[1],
        "max_step": summary.high[0],
        "max_value": summary.high[1],
        "points": pack(steps, values),
    }
