"""Self-tests of nodes: requests for them, the nodes that get no new work because of them, and their
results.

A node is tested if an admin asks for a test. A node that lost a rank in a way that suggests a fault
of the machine is also tested before it gets work again. Until a node's test has begun, and while
the test runs, the scheduler sees no free slots on the node. Slots that a job holds are never
tested. If the job that lost the rank keeps its slots on the node, because it recovered in place,
the test waits until the job has released them, and the node's other slots get work in the meantime.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import asdict
from datetime import datetime

from sqlalchemy.orm import Session

from dray.views import JobState
from ray_workers.shared.contracts import Outcome
from ray_workers.shared.frame_fields import clean
from ray_workers.shared.self_tests import DeviceOutcome, NodeTest, TestPhase
from ray_workers.shared.slices import Slice
from service.db.models import AttemptRow, JobRow, NodeCheckRow
from service.db.notifications import NODE_CHECKS, QUEUE
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import jobs as jobs_repository
from service.db.repositories.scheduling import cluster as cluster_repository
from service.db.repositories.scheduling import node_checks as repository
from service.db.repositories.scheduling import withheld as withheld_repository
from service.db.session import notify, touch
from service.domain.node_checks import (
    CheckCause,
    CheckOutcome,
    CheckState,
    machine_fault,
    nodes_of_ranks,
    outcome_of,
    sentence,
    why_not_withheld,
)
from service.lifecycle.transitions import remark
from service.lifecycle.withholding import withhold

NODE_CHECK = "node_check"
"""Type of the event."""
SELF_TEST = "self_test"
"""Code of a fault that a self-test found."""
OPEN = (CheckState.WAITING, CheckState.RUNNING)


def ask(
    session: Session,
    hostname: str,
    cause: CheckCause,
    why: str,
    now: datetime,
    *,
    job_id: str | None = None,
    attempt: int | None = None,
) -> NodeCheckRow:
    """Request a test of the host, unless one is already waiting or running. Return its row.

    why: who asked for the test, or what happened. job_id, attempt: the attempt that lost a rank.
    """
    withheld_repository.lock_changes(session)
    key = hostname[:255]
    row = repository.get(session, key)
    if row is None:
        row = NodeCheckRow(hostname=key, message="", devices=[], state=CheckState.DONE)
        _reopen(row, cause, clean(why), now)
        row.job_id, row.attempt = job_id, attempt
        repository.add(session, row)
    elif row.state not in OPEN:
        _reopen(row, cause, clean(why), now)
        row.job_id, row.attempt = job_id, attempt
    elif cause is CheckCause.ASKED and row.state == CheckState.WAITING:
        row.cause = cause  # test the free slots now, even if a job still holds other slots
    elif row.job_id is None or (row.state == CheckState.WAITING and not is_due(session, row)):
        # Don't let a job that keeps its slots delay the test after a newer loss.
        row.job_id, row.attempt, row.why = job_id, attempt, clean(why)
    touch(session)
    notify(session, QUEUE, NODE_CHECKS)
    return row


def _reopen(row: NodeCheckRow, cause: CheckCause, why: str, now: datetime) -> None:
    row.id, row.state, row.cause = secrets.token_hex(8), CheckState.WAITING, cause
    row.why, row.asked_at, row.began_at = why, now, None
    row.is_repeated = False


def suspect(
    session: Session,
    job: JobRow,
    attempt: AttemptRow,
    ranks: Collection[int],
    why: str,
    now: datetime,
) -> None:
    """Request tests of the nodes on which these ranks ran."""
    for hostname in sorted(set(hosts_of_ranks(session, job, attempt, ranks).values())):
        ask(
            *(session, hostname, CheckCause.LOST_RANK, f"{why} ({job.id})", now),
            job_id=job.id,
            attempt=attempt.attempt,
        )


def hosts_of_ranks(
    session: Session, job: JobRow, attempt: AttemptRow, ranks: Collection[int]
) -> dict[int, str]:
    """Return the host names of these ranks. Ranks on nodes that have disappeared are omitted."""
    slices = [Slice(part["node_id"], part["num_workers"]) for part in attempt.slices]
    keeps_order = bool(attempt.roles) or bool((job.spec.get("federated") or {}).get("silos"))
    node_ids = nodes_of_ranks(slices, ranks, keeps_order=keeps_order)
    names = cluster_repository.hostnames(session, sorted(set(node_ids.values())))
    return {rank: names[node_id] for rank, node_id in node_ids.items() if node_id in names}


def attempt_ended(
    session: Session, job: JobRow, attempt: AttemptRow, outcome: Outcome, now: datetime
) -> None:
    """Request a test of the node of the rank at fault, if the outcome suggests a fault of the
    machine."""
    why = machine_fault(outcome)
    if why is not None and outcome.rank is not None and job.state != JobState.CANCELLING:
        suspect(session, job, attempt, [outcome.rank], why, now)


def nodes_lost(session: Session, lost: Mapping[str, str], now: datetime) -> None:
    """Request tests of hosts that disappeared although attempts ran on them. The tests begin when
    the hosts return. lost: host names, keyed by node id."""
    for attempt in attempts_repository.live(session):
        node_ids = {part["node_id"] for part in attempt.slices} & lost.keys()
        for hostname in sorted({lost[node_id] for node_id in node_ids}):
            why = f"the node was lost while {attempt.job_id} ran on it"
            ask(
                *(session, hostname, CheckCause.LOST_RANK, why, now),
                job_id=attempt.job_id,
                attempt=attempt.attempt,
            )


def is_due(session: Session, row: NodeCheckRow) -> bool:
    """Whether the test may begin: an admin asked for it, or the attempt that lost a rank has no
    slots on the host any more."""
    if row.state == CheckState.RUNNING or row.cause == CheckCause.ASKED or row.job_id is None:
        return True
    attempt = attempts_repository.get(session, row.job_id, row.attempt or 0)
    if attempt is None or attempt.finished_at is not None:
        return True
    node_ids = [part["node_id"] for part in attempt.slices]
    return row.hostname not in cluster_repository.hostnames(session, node_ids).values()


def hosts_without_work(session: Session) -> set[str]:
    """Return the hosts that get no new work because they are tested, or are about to be."""
    return {row.hostname for row in repository.in_states(session, OPEN) if is_due(session, row)}


def nodes_without_work(session: Session, node_ids: Collection[str]) -> set[str]:
    """Return the nodes among `node_ids` that get no new work because of a test."""
    hosts = hosts_without_work(session)
    if not hosts:
        return set()
    names = cluster_repository.hostnames(session, sorted(node_ids))
    return {node_id for node_id, hostname in names.items() if hostname in hosts}


def num_gpus_held(session: Session, node_ids: Collection[str]) -> int:
    """Return the number of GPUs that live attempts hold on these nodes, rounded up."""
    total = 0.0
    for attempt in attempts_repository.live(session):
        for part in attempt.slices:
            if part["node_id"] in node_ids:
                total += part["num_workers"] * float(attempt.bundle.get("GPU", 0.0))
    return int(-(-total // 1))


def begin(session: Session, hostname: str, check_id: str, now: datetime) -> bool:
    """Mark a test as running. Return False if it is no longer wanted."""
    withheld_repository.lock_changes(session)
    row = repository.get(session, hostname)
    if row is None or row.id != check_id or row.state not in OPEN:
        return False
    if row.state != CheckState.RUNNING:
        row.state, row.began_at = CheckState.RUNNING, row.began_at or now
        touch(session)
        notify(session, QUEUE)
    return True


def wait_for_return(session: Session, hostname: str, check_id: str, now: datetime) -> None:
    """Restart a running test when its node returns to the cluster."""
    withheld_repository.lock_changes(session)
    row = repository.get(session, hostname)
    if row is not None and row.id == check_id and row.state == CheckState.RUNNING:
        row.state, row.cause = CheckState.WAITING, CheckCause.LOST_RANK
        row.asked_at, row.began_at = now, None
        touch(session)
        notify(session, QUEUE)


def settle(
    session: Session,
    hostname: str,
    check_id: str,
    test: NodeTest,
    now: datetime,
    *,
    repeats: bool = False,
) -> CheckOutcome | None:
    """Store the result of a test, and withhold the node if it failed. Does nothing, and returns
    None, if the result of this test is already stored. With `repeats`, the test is run again,
    unless it is itself the repetition of a test."""
    row = repository.get(session, hostname)
    # Lock in the order in which reports of attempts lock: the job, and then the nodes.
    job = None if row is None or row.job_id is None else jobs_repository.lock(session, row.job_id)
    withheld_repository.lock_changes(session)
    row = repository.get(session, hostname)
    if row is None or row.id != check_id or row.state not in OPEN:
        return None
    outcome = outcome_of(test)
    row.state, row.outcome, row.ended_at = CheckState.DONE, outcome, now
    row.message = clean(sentence(test))
    row.devices = [asdict(device) for device in test.devices]
    if outcome is CheckOutcome.FAILED:
        _withhold(session, row, test, now)
    if job is not None and job.id == row.job_id:
        _add_event(session, job, row, now)
    was_held = any(device.outcome is DeviceOutcome.HELD for device in test.devices)
    if repeats and not row.is_repeated:
        _reopen(row, CheckCause(row.cause), row.why, now)
        row.is_repeated = True
    elif row.job_id is not None and was_held and row.cause == CheckCause.ASKED:
        key = row.job_id, row.attempt
        _reopen(row, CheckCause.LOST_RANK, row.why, now)
        row.job_id, row.attempt = key
    touch(session)
    notify(session, QUEUE)
    return outcome


def untested(why: str) -> NodeTest:
    """Return the result of a test that could not be run."""
    return NodeTest(TestPhase.DONE, message=f"could not be tested: {why}")


def _withhold(session: Session, row: NodeCheckRow, test: NodeTest, now: datetime) -> None:
    nodes = cluster_repository.nodes(session)
    has_gpus = {node.hostname: False for node in nodes}
    for node in nodes:
        has_gpus[node.hostname] |= bool(node.total.get("GPU"))
    kind = has_gpus.get(row.hostname, False)
    hosts = {n.hostname for n in nodes if n.accepted and has_gpus[n.hostname] == kind}
    faults = withheld_repository.active(session)
    by_tests = {fault.hostname for fault in faults if fault.code == SELF_TEST}
    why_not = why_not_withheld(
        row.hostname, hosts, by_tests & hosts, {fault.hostname for fault in faults}
    )
    if why_not is not None:
        row.message += f"; the node is not withheld, because {why_not}"
        return
    failed = [device for device in test.devices if device.outcome is DeviceOutcome.FAILED]
    for device in failed:
        reason = f"{device.name} failed the self-test: {device.reason}"
        withhold(
            *(session, row.hostname, reason),
            code=SELF_TEST,
            now=now,
            gpu=device.gpu,
            mark=row.id,
        )
    if not failed:
        reason = f"the self-test failed: {test.message}"
        withhold(session, row.hostname, reason, code=SELF_TEST, now=now, mark=row.id)
    row.message += "; the node gets no new work until an admin releases it"


def _add_event(session: Session, job: JobRow, row: NodeCheckRow, now: datetime) -> None:
    """Report the result to the job that lost a rank on the node."""
    tested = "was to be tested" if row.outcome == CheckOutcome.UNTESTED else "was tested"
    message = f"{row.hostname} {tested}, because {row.why}: {row.message}"
    data = {"hostname": row.hostname, "outcome": row.outcome, "attempt": row.attempt}
    code = str(row.outcome)
    remark(session, job, type_=NODE_CHECK, code=code, message=message, now=now, data=data)
