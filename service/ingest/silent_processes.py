"""Adds events to a job when a node or a process of its attempt does not respond."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy.orm import Session

from ray_workers.shared.contracts import ProcessKind, SilentProcess
from service.db.models import AttemptRow, JobRow
from service.db.repositories.scheduling import cluster as cluster_repository
from service.domain.progress import without_rates
from service.lifecycle.transitions import remark

SILENT = "not_answering"
ANSWERS = "answers_again"
NAMES: Mapping[str, str] = {
    ProcessKind.SUPERVISOR: "the attempt's supervisor",
    ProcessKind.NODE_AGENT: "the node agent",
    ProcessKind.FORKSERVER: "the forkserver",
    ProcessKind.RANK_ACTOR: "a rank actor",
    ProcessKind.STORE: "the attempt's rendezvous store",
}


def note(
    session: Session,
    job: JobRow,
    attempt: AttemptRow,
    silent: Sequence[SilentProcess],
    now: datetime,
) -> bool:
    """Store the silent processes, with an event for each change. Return whether any changed."""
    known = {_key(entry): entry for entry in attempt.silent or ()}
    entries = [
        {"kind": str(one.kind), "node_id": one.node_id, "since": min(one.since, now.timestamp())}
        for one in silent
    ]
    # Keep the time at which a process first became silent, because a restarted gateway reports a
    # later time.
    kept = {_key(entry): known.get(_key(entry), entry) for entry in entries}
    fallen, back = kept.keys() - known.keys(), known.keys() - kept.keys()
    if not fallen and not back:
        return False
    hostnames = _hostnames(session)
    for key in sorted(fallen, key=str):
        message = f"{_name(kept[key], hostnames)} does not respond"
        _remark(session, job, SILENT, message, kept[key], now)
    for key in sorted(back, key=str):
        message = f"{_name(known[key], hostnames)} is responding again, or was replaced"
        _remark(session, job, ANSWERS, message, known[key], now)
    attempt.silent = list(kept.values()) or None
    if kept:
        job.progress = without_rates(job.progress)
    return True


def sentence(session: Session, attempt: AttemptRow | None) -> str:
    """Return a sentence about the processes that do not respond. The sentence is empty if all
    processes respond."""
    if attempt is None or attempt.finished_at is not None or not attempt.silent:
        return ""
    hostnames = _hostnames(session)
    parts = [
        f"{_name(entry, hostnames)} has not responded since "
        f"{datetime.fromtimestamp(entry['since'], UTC):%Y-%m-%d %H:%M:%S} UTC"
        for entry in attempt.silent
    ]
    return "; ".join(parts)


def _key(entry: Mapping[str, Any]) -> tuple[str, str | None]:
    return entry["kind"], entry["node_id"]


def _hostnames(session: Session) -> dict[str, str]:
    return {row.node_id: row.hostname for row in cluster_repository.nodes(session)}


def _name(entry: Mapping[str, Any], hostnames: Mapping[str, str]) -> str:
    name, node_id = NAMES[entry["kind"]], entry["node_id"]
    return name if node_id is None else f"{name} of {hostnames.get(node_id, node_id)}"


def _remark(
    session: Session,
    job: JobRow,
    code: str,
    message: str,
    entry: Mapping[str, Any],
    now: datetime,
) -> None:
    data = {"process": entry["kind"], "node_id": entry["node_id"]}
    remark(session, job, type_="silence", code=code, message=message, now=now, data=data)
