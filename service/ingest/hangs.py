"""Limits the size of hang reports, which contain the stalled ranks and the stacks of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dray import views
from ray_workers.shared.supervisor_frames import HangReport, RankWhereabouts
from service.db.models import HangRow

KEPT_OF_A_JOB = 20
MAX_STACK_BYTES = 64 << 10
MAX_BUNDLE_BYTES = 4 << 20
"""Maximum total size of the stacks in a report. If a thousand ranks wait for one rank, a few stacks
suffice."""
_CUT = "\n[... cut here: the stack is too long ...]\n"


def bounded(report: HangReport, num_ranks: int) -> HangReport:
    """Return the report to store, with at most `num_ranks` ranks in rank order."""
    culprits = list(report.culprits)[:num_ranks]
    return replace(report, culprits=culprits, ranks=_bounded(report.ranks[:num_ranks], culprits))


def _bounded(ranks: Sequence[RankWhereabouts], culprits: Sequence[int]) -> list[RankWhereabouts]:
    """Return the ranks in order. If the stacks exceed MAX_BUNDLE_BYTES, some are dropped, but the
    stacks of the ranks in `culprits` are kept if possible."""
    kept, left = [], MAX_BUNDLE_BYTES
    for one in sorted(ranks, key=lambda one: one.rank not in culprits):
        stack = None if one.stack is None else shortened(one.stack, MAX_STACK_BYTES)
        size = len((stack or "").encode())
        stack, left = (None, left) if size > left else (stack, left - size)
        kept.append(replace(one, stack=stack))
    return sorted(kept, key=lambda one: one.rank)


def shortened(stack: str, limit_bytes: int) -> str:
    """Cut the middle out of a stack that is longer than the limit."""
    data = stack.encode()
    if len(data) <= limit_bytes:
        return stack
    half = (limit_bytes - len(_CUT)) // 2
    return data[:half].decode(errors="ignore") + _CUT + data[-half:].decode(errors="ignore")


def sentence(report: HangReport, job_id: str) -> str:
    """Return a sentence such as `rank 1 stood still for 12.3 s in data_wait at step 50 (the limit
    is 4.0 s)`, and the command that shows the stacks."""
    culprits = report.culprits
    shown = ", ".join(map(str, culprits[:8])) + (" and more" if len(culprits) > 8 else "")
    who = {0: "an unknown rank", 1: f"rank {shown}"}.get(len(culprits), f"ranks {shown}")
    parts = [f"{who} stood still"]
    if report.waited_s is not None:
        parts.append(f"for {report.waited_s:.1f} s")
    if report.phase is not None:
        parts.append(f"in {report.phase}")
    if report.step is not None:
        parts.append(f"at step {report.step}")
    if report.limit_s is not None:
        parts.append(f"(the limit is {report.limit_s:.1f} s)")
    return f"{' '.join(parts)}; {how_to_see(job_id)}"


def how_to_see(job_id: str) -> str:
    """Return a sentence that names the command for showing the stacks of a hang."""
    return f"`dray hangs {job_id}` shows where each rank was when it hung"


def view(row: HangRow) -> views.Hang:
    return views.Hang(seq=row.seq, attempt=row.attempt, time=row.time, **row.body)
