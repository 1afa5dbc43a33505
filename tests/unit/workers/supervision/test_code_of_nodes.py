"""The end of an attempt whose code a node can't have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_workers.shared.contracts import Cause
from ray_workers.shared.node_needs import CodeProblem, CodeRef
from ray_workers.shared.processes.machine_speed import MachineSpeed
from ray_workers.shared.slices import Slice
from ray_workers.supervision import node_clients
from ray_workers.supervision.node_clients import CodeUnavailable, CodeUnfetchable, NodeClients
from ray_workers.supervision.rules.timings import Timings
from tests.unit.workers.supervision.test_attempt_run import Ended
from tests.unit.workers.supervision.test_running_time import RUN, no, nothing
from tests.wire import attempt_spec


@pytest.mark.parametrize(
    ("kind", "cause"),
    [(CodeUnfetchable, Cause.CANNOT_RUN), (CodeUnavailable, Cause.INFRASTRUCTURE)],
)
async def test_only_code_that_another_try_may_get_is_the_clusters_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: type[Exception], cause: Cause
) -> None:
    one = Ended(monkeypatch, tmp_path).run
    group = {"acquire": nothing, "start": nothing, "release": nothing, "has_lost_a_node": no}
    one._group = SimpleNamespace(**group, num_slots=1, log_lines_lost={})
    for name in ("_slot_seconds", "_report_ledger", "_keep_books", "_refresh_speed"):
        monkeypatch.setattr(one, name, nothing)

    async def put_code(*_: Any) -> None:
        raise kind("fatal: repository 'https://h.org/a/' not found")

    monkeypatch.setattr(one._nodes, "put_code", put_code)
    monkeypatch.setattr(one, "_train", one._build)
    await RUN(one)
    assert one._outcome.cause is cause
    assert "repository 'https://h.org/a/' not found" in one._outcome.message


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (CodeProblem("fatal: not our ref", is_final=True), CodeUnfetchable),
        (CodeProblem("fatal: timed out", is_final=False), CodeUnavailable),
    ],
)
async def test_a_node_reports_whether_another_try_may_help(
    monkeypatch: pytest.MonkeyPatch, problem: CodeProblem, kind: type[Exception]
) -> None:
    async def answer(_limit_s: float, asked: CodeProblem | None) -> CodeProblem | None:
        return asked

    def agent(problem: CodeProblem | None) -> Any:
        return SimpleNamespace(put_code=SimpleNamespace(remote=lambda *_: problem))

    monkeypatch.setattr(node_clients, "result_within", answer)
    code = CodeRef("code-1", "file:///a", "0" * 64)
    spec = attempt_spec(code=code, slices=(Slice("a", 1), Slice("b", 1)))
    agents = {"a": agent(None), "b": agent(problem)}
    metrics: Any = None  # nothing is observed
    clients = NodeClients(spec, agents, MachineSpeed(), metrics, Timings())
    with pytest.raises(kind, match=f"to the node b: {problem.message}"):
        await clients.put_code(spec, ["a", "b"])
