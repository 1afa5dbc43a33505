"""The report in a frame, checked: the one place where frames of ranks and supervisors are parsed.

BadFrame where a frame is malformed or out of bounds; texts are made safe to show and cut to length.
Whether a report may name a file, such as one in another job's folder, its handler checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from dray.secure_aggregation.messages import MaskingPhase
from dray.spec import MAX_WORKERS, OnDivergence
from dray.spec.federated.parts import MAX_CLIENTS
from dray.views import DrillState
from ray_workers.shared.contracts import Cause, Frame, FrameKind, Slice
from ray_workers.shared.frames import (
    ArtifactReport,
    CheckpointDroppedReport,
    CheckpointReport,
    DataPosition,
    DivergenceReport,
    DrillReport,
    ErrorReport,
    HangReport,
    LedgerReport,
    LogReport,
    LossKind,
    MetricsReport,
    PassedOver,
    RankWhereabouts,
    RegroupedReport,
    RegroupingReport,
    Report,
    ResizedReport,
    ResumedReport,
    RoundReport,
    RoundTroubleReport,
    SiloRoundReport,
    StragglersReport,
    SystemMetricsColumns,
    SystemMetricsReport,
    WaitingReport,
)
from ray_workers.shared.round_files import UPDATE, number_of
from service.domain.attempts import ledger
from service.domain.series import TIMES
from service.domain.text import clean
from service.ingest.frame_checks import (
    MAX_STEP,
    BadFrame,
    count,
    count_or_none,
    finite,
    number,
    number_or_none,
    ranks_of,
    seconds_or_none,
    sha256,
    short_text,
    text,
)

MAX_KEY_CHARS = 128
MAX_LINE = 2**40
"""Highest number of a line of a log: gaps between the numbers are added up in a 64-bit column."""
MAX_STRAGGLERS = 64
MAX_ROUND_CHARS = 64
MAX_MESSAGE_CHARS = 4096
MAX_TRACEBACK_CHARS = 16 * 1024
MAX_NODE_ID_CHARS = 128
MAX_PHASE_CHARS = 64
MAX_CODE_CHARS = 64
MAX_RECEIPT_CHARS = 2048
MAX_PASSED_OVER = 100
MAX_COLUMNS = 1000
MAX_SYSTEM_KEYS = 100
MAX_SYSTEM_VALUE = 1e30
SYSTEM_PREFIX = "system/"

Body = Mapping[str, Any]


def decode(frame: Frame) -> Report:
    """The report in a frame. BadFrame, LookupError, TypeError or ValueError if it is malformed."""
    return _DECODERS[frame.kind](frame.body)


def metric_key(key: Any) -> str:
    if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_CHARS or not key.isprintable():
        raise BadFrame(f"not a metric's name: {key!r}")
    if key == TIMES:
        raise BadFrame(f"{key!r} is the name of dray's own series")
    return key


def _metrics(body: Body) -> MetricsReport:
    step, values = count(body, "step", MAX_STEP), body["values"]
    if not isinstance(values, Mapping):
        raise BadFrame("values is not a mapping")
    numbers = {metric_key(key): number(value) for key, value in values.items()}
    speed = body.get("samples_per_s")
    return MetricsReport(
        step=step,
        values=numbers,
        epoch=count_or_none(body, "epoch"),
        total_steps=count_or_none(body, "total_steps"),
        samples_per_s=None if speed is None else number(speed),
    )


def _log(body: Body) -> LogReport:
    line = body["text"]
    if not isinstance(line, str):
        raise BadFrame("text is not a string")
    return LogReport(count(body, "line", MAX_LINE), clean(line))


def _checkpoint(body: Body) -> CheckpointReport:
    return CheckpointReport(
        step=count(body, "step", MAX_STEP),
        url=_url(body),
        size_bytes=count(body, "size_bytes", 2**62),
        manifest_sha256=sha256(body["manifest_sha256"]),
        metrics={metric_key(k): number(v) for k, v in (body.get("metrics") or {}).items()},
    )


def _dropped(body: Body) -> CheckpointDroppedReport:
    return CheckpointDroppedReport(count(body, "step", MAX_STEP), _url(body))


def _artifact(body: Body) -> ArtifactReport:
    return ArtifactReport(
        path=str(body["path"]),
        url=_url(body),
        size_bytes=count(body, "size_bytes", 2**62),
        sha256=sha256(body["sha256"]),
    )


def _url(body: Body) -> str:
    url = body["url"]
    if not isinstance(url, str) or clean(url) != url:
        raise BadFrame(f"url is no text that can be stored: {url!r}")
    return url


def resumed_step(frame: Frame) -> int:
    """The step of a RESUMED frame, also where the rest of it is malformed."""
    return count(frame.body, "step", MAX_STEP)


def _resumed(body: Body) -> ResumedReport:
    passed_over = body.get("passed_over") or []
    if not isinstance(passed_over, list | tuple) or len(passed_over) > MAX_PASSED_OVER:
        raise BadFrame(f"passed_over is not a list of at most {MAX_PASSED_OVER}")
    optimizer_restored, loss = body.get("optimizer_restored", False), body.get("loss_before")
    if not isinstance(optimizer_restored, bool):
        raise BadFrame(f"optimizer_restored is not a truth value: {optimizer_restored!r}")
    manifest, position, rng = body.get("sha256"), body.get("position"), body.get("rng")
    return ResumedReport(
        step=count(body, "step", MAX_STEP),
        url=short_text(body["url"], MAX_RECEIPT_CHARS),
        sha256=None if manifest is None else sha256(manifest),
        size_bytes=count_or_none(body, "size_bytes", 2**62),
        position=None if position is None else _position(position),
        world_size=count_or_none(body, "world_size"),
        optimizer_restored=optimizer_restored,
        rng=None if rng is None else short_text(rng, MAX_RECEIPT_CHARS),
        loss_before=None if loss is None else finite(loss),
        passed_over=[
            PassedOver(count(one, "step", MAX_STEP), short_text(one["why"], MAX_RECEIPT_CHARS))
            for one in passed_over
        ],
    )


def _position(told: Body) -> DataPosition:
    return DataPosition(
        epoch=count(told, "epoch", MAX_STEP),
        step_in_epoch=count(told, "step_in_epoch", MAX_STEP),
        samples=count(told, "samples", MAX_STEP),
    )


def _stragglers(body: Body) -> StragglersReport:
    ranks = [int(rank) for rank in body["ranks"]][:MAX_STRAGGLERS]
    return StragglersReport(
        step=count(body, "step", MAX_STEP),
        ranks=ranks,
        slowdown={str(rank): finite(body["slowdown"][str(rank)]) for rank in ranks},
        lost_s=finite(body["lost_s"]),
        num_steps=count(body, "num_steps", MAX_STEP),
    )


def _divergence(body: Body) -> DivergenceReport:
    rule = body["then"]
    if rule not in get_args(OnDivergence):
        raise BadFrame(f"then is no rule of train.on_divergence: {rule!r}")
    return DivergenceReport(
        step=count(body, "step", MAX_STEP),
        loss=number(body["loss"]),
        grad_norm=number_or_none(body, "grad_norm"),
        then=rule,
    )


def _round(body: Body) -> RoundReport:
    name, is_open, clients = body["name"], body["is_open"], body.get("clients")
    number = count(body, "number", MAX_STEP)
    if not isinstance(name, str) or len(name) > MAX_ROUND_CHARS or number_of(name) != number:
        raise BadFrame(f"name is not that of the round {number}: {name!r}")
    if not isinstance(is_open, bool):
        raise BadFrame(f"is_open is not a truth value: {is_open!r}")
    return RoundReport(
        number=number,
        name=name,
        is_open=is_open,
        clients=None if clients is None else ranks_of(body, "clients", MAX_CLIENTS),
        quorum=count(body, "quorum", MAX_CLIENTS),
        deadline_s=finite(body["deadline_s"]),
        num_elements=count(body, "num_elements", 2**40),
        model_sha256=sha256(body["model_sha256"]),
        model_size_bytes=count(body, "model_size_bytes", 2**62),
        form_sha256=sha256(body["form_sha256"]),
        form_size_bytes=count(body, "form_size_bytes", 2**62),
        received=ranks_of(body, "received", MAX_CLIENTS),
        awaits=_awaits(body["awaits"]),
        update_bytes=count(body, "update_bytes", 2**42),
    )


def _round_trouble(body: Body) -> RoundTroubleReport:
    return RoundTroubleReport(
        number=count(body, "number", MAX_STEP),
        left_out=ranks_of(body, "left_out", MAX_CLIENTS),
        message=text(body, "message", MAX_MESSAGE_CHARS),
    )


def _silo_round(body: Body) -> SiloRoundReport:
    return SiloRoundReport(
        number=count(body, "number", MAX_STEP),
        missing=ranks_of(body, "missing", MAX_CLIENTS),
        quorum=count(body, "quorum", MAX_CLIENTS),
        ends_in_s=seconds_or_none(body, "ends_in_s"),
    )


def _awaits(value: Any) -> str:
    """A part of a path, so that none but these may come."""
    if value not in (UPDATE, *MaskingPhase):
        raise BadFrame(f"awaits nothing that clients send: {value!r}")
    return str(value)


def _error(body: Body) -> ErrorReport:
    return ErrorReport(
        cause=Cause(body["cause"]),
        type=text(body, "type", MAX_CODE_CHARS),
        message=clean(str(body.get("message", "")))[:MAX_MESSAGE_CHARS],
        traceback=clean(str(body.get("traceback", "")))[-MAX_TRACEBACK_CHARS:],
        raised_at=number_or_none(body, "raised_at"),
        seat=count_or_none(body, "seat"),
        incarnation=count_or_none(body, "incarnation"),
    )


def _regrouping(body: Body) -> RegroupingReport:
    return RegroupingReport(
        generation=count(body, "generation", MAX_STEP),
        ranks=ranks_of(body, "ranks", MAX_WORKERS),
        code=LossKind(body["code"]),
        message=text(body, "message", MAX_MESSAGE_CHARS),
    )


def _regrouped(body: Body) -> RegroupedReport:
    world_size = count(body, "world_size", MAX_WORKERS)
    if world_size == 0:
        raise BadFrame("a group of nobody trains nothing")
    return RegroupedReport(
        generation=count(body, "generation", MAX_STEP),
        ranks=ranks_of(body, "ranks", MAX_WORKERS),
        world_size=world_size,
        step=count_or_none(body, "step"),
        steps_lost=count_or_none(body, "steps_lost"),
        recovery_s=seconds_or_none(body, "recovery_s"),
    )


def _resized(body: Body) -> ResizedReport:
    rows = body["slices"]
    if not isinstance(rows, list | tuple) or len(rows) > MAX_WORKERS:
        raise BadFrame("slices is not a list")
    held = (
        Slice(text(row, "node_id", MAX_NODE_ID_CHARS), count(row, "num_workers", MAX_WORKERS))
        for row in rows
    )
    return ResizedReport(
        world_size=count(body, "world_size", MAX_WORKERS),
        slices=[slots for slots in held if slots.num_workers],
        lacking=count(body, "lacking", MAX_WORKERS),
        grants=count(body, "grants", MAX_STEP),
        message=text(body, "message", MAX_MESSAGE_CHARS),
    )


def _hang(body: Body) -> HangReport:
    told = body["ranks"]
    if not isinstance(told, list | tuple):
        raise BadFrame("ranks is not a list")
    return HangReport(
        culprits=ranks_of(body, "culprits", MAX_WORKERS),
        step=count_or_none(body, "step"),
        phase=text(body, "phase", MAX_PHASE_CHARS) or None,
        waited_s=seconds_or_none(body, "waited_s"),
        limit_s=seconds_or_none(body, "limit_s"),
        ranks=[_whereabouts(one) for one in told[:MAX_WORKERS]],
    )


def _whereabouts(told: Body) -> RankWhereabouts:
    collective = told.get("collective")
    if isinstance(collective, int) and not isinstance(collective, bool):
        collective = count(told, "collective", MAX_STEP)
    elif collective is not None:
        collective = text(told, "collective", MAX_PHASE_CHARS)
    stack = told.get("stack")
    return RankWhereabouts(
        rank=count(told, "rank", MAX_STEP),
        step=count_or_none(told, "step"),
        phase=text(told, "phase", MAX_PHASE_CHARS) or None,
        collective=collective,
        since_s=seconds_or_none(told, "since_s"),
        stack=None if stack is None else clean(str(stack)),
    )


def _drill(body: Body) -> DrillReport:
    return DrillReport(
        id=text(body, "id", MAX_CODE_CHARS),
        state=DrillState(body["state"]),
        step=count_or_none(body, "step"),
        recovery_s=seconds_or_none(body, "recovery_s"),
        steps_lost=count_or_none(body, "steps_lost"),
        message=text(body, "message", 1024),
    )


def _waiting(body: Body) -> WaitingReport:
    return WaitingReport(message=text(body, "message", MAX_MESSAGE_CHARS))


def _ledger(body: Body) -> LedgerReport:
    return LedgerReport(ledger.checked(body["slot_seconds"]))


def _system_metrics(body: Body) -> SystemMetricsReport:
    rows = body["columns"]
    if not isinstance(rows, list | tuple) or len(rows) > MAX_COLUMNS:
        raise BadFrame(f"columns is not a list of at most {MAX_COLUMNS}")
    return SystemMetricsReport(count(body, "time", MAX_STEP), [_columns(row) for row in rows])


def _columns(told: Body) -> SystemMetricsColumns:
    ranks, values = ranks_of(told, "ranks", MAX_WORKERS), told["values"]
    if ranks != list(told["ranks"]):
        raise BadFrame("ranks do not rise")
    if not isinstance(values, Mapping) or len(values) > MAX_SYSTEM_KEYS:
        raise BadFrame(f"values is not a mapping of at most {MAX_SYSTEM_KEYS} names")
    columns = {metric_key(key): [_amount(v) for v in column] for key, column in values.items()}
    for key, column in columns.items():
        if len(column) != len(ranks) or not key.startswith(SYSTEM_PREFIX):
            raise BadFrame(f"{key!r} is no system metric of {len(ranks)} ranks")
    return SystemMetricsColumns(ranks, columns)


def _amount(value: Any) -> float:
    found = finite(value)
    if not 0 <= found <= MAX_SYSTEM_VALUE:
        raise BadFrame(f"not a system metric: {found}")
    return found


_DECODERS: dict[FrameKind, Callable[[Body], Report]] = {
    FrameKind.METRICS: _metrics,
    FrameKind.LOG: _log,
    FrameKind.CHECKPOINT: _checkpoint,
    FrameKind.CHECKPOINT_DROPPED: _dropped,
    FrameKind.ARTIFACT: _artifact,
    FrameKind.RESUMED: _resumed,
    FrameKind.STRAGGLERS: _stragglers,
    FrameKind.DIVERGENCE: _divergence,
    FrameKind.ROUND: _round,
    FrameKind.SILO_ROUND: _silo_round,
    FrameKind.ROUND_TROUBLE: _round_trouble,
    FrameKind.ERROR: _error,
    FrameKind.REGROUPING: _regrouping,
    FrameKind.REGROUPED: _regrouped,
    FrameKind.RESIZED: _resized,
    FrameKind.HANG: _hang,
    FrameKind.DRILL: _drill,
    FrameKind.WAITING: _waiting,
    FrameKind.LEDGER: _ledger,
    FrameKind.SYSTEM_METRICS: _system_metrics,
}
