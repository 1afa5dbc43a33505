"""Hang bundles: who stood still, and where everyone was. Bounded, whatever a supervisor says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dray import views
from ray_workers.shared.frames import HangReport
from service.db.models import HangRow

KEPT_OF_A_JOB = 20
MAX_STACK_BYTES = 64 << 10
MAX_BUNDLE_BYTES = 4 << 20
"""Of all its stacks together: of a thousand ranks that wait for one, a few tell it all."""
_CUT = "\n[... cut here: the stack is too long ...]\n"


def bundle(report: HangReport, num_ranks: int) -> dict[str, Any]:
    """What is stored of a hang, of at most so many ranks."""
    culprits = list(report.culprits)[:num_ranks]
    told = sorted(report.ranks[:num_ranks], key=lambda one: one.rank)
    ranks = [vars(one) | {"stack": _short(one.stack)} for one in told]
    _bound(ranks, set(culprits))
    return report.body() | {"culprits": culprits, "ranks": ranks}


def _short(stack: str | None) -> str | None:
    return None if stack is None else shortened(stack, MAX_STACK_BYTES)


def _bound(ranks: list[dict[str, Any]], culprits: set[int]) -> None:
    """Leave out stacks beyond what a bundle may hold, the culprits' last."""
    left = MAX_BUNDLE_BYTES
    for rank in sorted(ranks, key=lambda rank: rank["rank"] not in culprits):
        size = len((rank["stack"] or "").encode())
        if size > left:
            rank["stack"] = None
        else:
            left -= size


def shortened(stack: str, limit_bytes: int) -> str:
    """Its two ends, which say where it began and where it stands, if it is longer."""
    data = stack.encode()
    if len(data) <= limit_bytes:
        return stack
    half = (limit_bytes - len(_CUT)) // 2
    return data[:half].decode(errors="ignore") + _CUT + data[-half:].decode(errors="ignore")


def sentence(body: Mapping[str, Any]) -> str:
    """`rank 1 stood still for 12.3 s in data_wait at step 50 (the limit is 4.0 s)`."""
    culprits = body["culprits"]
    shown = ", ".join(map(str, culprits[:8])) + (" and more" if len(culprits) > 8 else "")
    who = {0: "nobody knows who", 1: f"rank {shown}"}.get(len(culprits), f"ranks {shown}")
    parts = [f"{who} stood still"]
    if body["waited_s"] is not None:
        parts.append(f"for {body['waited_s']:.1f} s")
    if body["phase"] is not None:
        parts.append(f"in {body['phase']}")
    if body["step"] is not None:
        parts.append(f"at step {body['step']}")
    if body["limit_s"] is not None:
        parts.append(f"(the limit is {body['limit_s']:.1f} s)")
    return " ".join(parts)


def view(row: HangRow) -> views.Hang:
    return views.Hang(seq=row.seq, attempt=row.attempt, time=row.time, **row.body)
