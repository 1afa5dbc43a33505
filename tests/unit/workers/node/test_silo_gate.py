"""A silo's reports leave its node only as far as the node's owner has opened them."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dray.train.spool import SpoolWriter
from ray_workers.node import agent, silo_gate
from ray_workers.node.rank_gate import RankGate
from ray_workers.node.silo_gate import METRICS, OPENS, Opening, SiloGate, SiloRules
from ray_workers.shared import frames, paths, spool_reader
from ray_workers.shared.contracts import Cause, FrameKind, RankTask
from ray_workers.shared.node_needs import BuildState, DataPolicy, EnvironmentPolicy, NodeNeeds
from ray_workers.supervision.log_pump import ClosedLogPump
from ray_workers.supervision.rank_actor import RankActor
from ray_workers.supervision.rules.timings import Timings
from tests.unit.workers.node.test_agent import node_agent
from tests.unit.workers.node.test_secret_masking import CANARY, REPORTS, filled, line_of
from tests.wire import rank_task

CLOSED = SiloRules("north", frozenset(), frozenset({"train/loss"}))


def silo_task(home: Path, **fields: Any) -> RankTask:
    silos = [{"name": "north", "source": None}, {"name": "south", "source": None}]
    federated = {"silos": silos, "metrics": ["train/loss", "val/loss"]}
    plain = {"rank": 1, "work_dir": str(home / "work"), "spec": {"federated": federated}}
    return rank_task(**{**plain, "spool_dir": str(home / "spool" / "r1.0.metrics"), **fields})


def passed(silo: SiloRules, kind: FrameKind, body: Any) -> list[Any]:
    line = line_of(kind, body) + b"\n"
    left = silo.frames(line)
    assert len(left) == len(line)
    assert left.endswith(b"\n")
    return [frame.body for frame in spool_reader.decode("r1.0.metrics", left)]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.__name__)
def test_no_text_of_any_frame_leaves_a_closed_silo(report: Any) -> None:
    body = filled(report)
    if report is frames.ErrorReport:
        body["cause"] = Cause.BAD_DATA
    found = passed(CLOSED, report.KIND, body)
    assert CANARY not in str(found)
    if report is frames.ErrorReport:
        assert [each["cause"] for each in found] == ["bad_data"]
        assert [(each["seat"], each["incarnation"]) for each in found] == [(1, 1)]
    else:
        assert found == []


def test_only_metrics_of_the_list_leave_and_nothing_next_to_them() -> None:
    values = {"train/loss": 0.5, "val/age": 77.0, f"val/{CANARY}": 1.0}
    body = {"step": 3, "values": values, "epoch": 1, "samples_per_s": 1234.5}
    expected = [{"step": 3, "values": {"train/loss": 0.5}}]
    assert passed(CLOSED, FrameKind.METRICS, body) == expected
    assert passed(CLOSED, FrameKind.METRICS, {"step": 3, "values": {"val/age": 77.0}}) == []
    sly = {"step": 3, "values": {"train/loss": CANARY}}
    assert passed(CLOSED, FrameKind.METRICS, sly) == []
    assert CLOSED.frames(f"{CANARY} is no frame\n".encode()).strip() == b""


@pytest.mark.parametrize(
    ("opening", "kind"),
    [
        (Opening.LOGS, FrameKind.LOG),
        (Opening.LOGS, FrameKind.ERROR),
        (Opening.FILES, FrameKind.ARTIFACT),
        (Opening.FILES, FrameKind.CHECKPOINT),
    ],
)
def test_an_owner_opens_one_thing_and_no_other(opening: Opening, kind: FrameKind) -> None:
    opens = silo_gate.owner_opens({OPENS: opening})
    for each in FrameKind:
        body = {"cause": "user_error", "text": CANARY, "step": 1, "values": {CANARY: 1.0}}
        leaves = CANARY in str(passed(SiloRules("n", opens, set()), each, body))
        assert leaves == (silo_gate.OPENED_BY.get(each) is opening), each
    assert silo_gate.OPENED_BY.get(kind) is opening


def test_a_job_may_ask_for_metrics_and_the_owner_allows_fewer() -> None:
    asked = frozenset({"train/loss", "val/loss"})
    assert silo_gate.owner_metrics({}, asked) == asked
    assert silo_gate.owner_metrics({METRICS: "val/loss, val/accuracy"}, asked) == {"val/loss"}
    assert silo_gate.owner_metrics({METRICS: ""}, asked) == frozenset()


def test_a_silos_task_leads_nowhere_but_to_its_node(tmp_path: Path) -> None:
    task = silo_task(tmp_path, artifact_url="s3://bucket/a", checkpoint_url="s3://bucket/c")
    own = silo_gate.restricted(task, {METRICS: "val/loss", silo_gate.SOURCE: "file:///own.npz"})
    assert own.silo_source == "file:///own.npz"
    assert own.spec["federated"]["metrics"] == ["val/loss"]
    here = Path(task.work_dir).as_uri()
    assert own.artifact_url.startswith(here)
    assert own.checkpoint_url.startswith(here)
    opened = silo_gate.restricted(task, {OPENS: "files"})
    assert (opened.artifact_url, opened.checkpoint_url) == ("s3://bucket/a", "s3://bucket/c")


def test_a_job_names_no_other_data_where_the_owner_names_some(tmp_path: Path) -> None:
    policy = replace(DataPolicy.open(), file_roots=("/data",))
    named = silo_task(tmp_path, silo_source="s3://b/d", data_policy=policy)
    alone = silo_gate.restricted(named, {})
    assert (alone.silo_source, alone.data_policy) == ("s3://b/d", policy)
    with pytest.raises(ValueError, match="the job document name different data"):
        silo_gate.restricted(named, {silo_gate.SOURCE: "file:///own.npz"})
    same = silo_gate.restricted(named, {silo_gate.SOURCE: "s3://b/d"})
    assert same.data_policy.file_roots is None


async def test_a_node_with_a_silos_source_starts_no_other_rank_and_builds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds for an older service, and for another service on the same Ray."""
    monkeypatch.delenv(silo_gate.SOURCE, raising=False)
    rank_class = RankActor.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    actor = rank_class("dray:j:1:r0:0", "j", Timings())
    started: list[int] = []

    async def start(gate: RankGate, *_: object) -> int:
        started.append(gate.task.rank)
        return 1

    monkeypatch.setattr(actor, "_start", start)
    aggregates, silo = silo_task(tmp_path, rank=0), silo_task(tmp_path, rank=1)
    node = node_agent(tmp_path / "node", monkeypatch)
    needs = NodeNeeds({"setup": [f"touch {tmp_path}/ran"]}, True, EnvironmentPolicy.open(), None)
    await actor.start(aggregates, "", b"")
    monkeypatch.setenv(silo_gate.SOURCE, "file:///own.npz")
    for task in (aggregates, rank_task(rank=0), rank_task(rank=3)):
        with pytest.raises(RuntimeError, match="runs only ranks of silos"):
            await actor.start(task, "", b"")
    await actor.start(silo, "", b"")
    assert started == [0, 1]
    answer = await node.prepare(needs)
    assert (answer.state, answer.message) == (BuildState.FAILED, silo_gate.FOR_SILOS_ALONE)
    assert not (tmp_path / "ran").exists()


async def test_an_agent_lets_out_what_the_owner_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(OPENS, raising=False)
    node = node_agent(tmp_path / "node", monkeypatch)
    spools = paths.spool_dir("deployment", "0" * 56, "j", 1)

    def write(rank: int, kind: FrameKind, body: dict[str, Any]) -> None:
        writer = SpoolWriter(spools / f"r{rank}.0.{kind}", limit_bytes=1 << 20)
        writer.append(kind, body)
        writer.close()

    async def collect(*_: object) -> dict[int, str]:
        return {0: "aggregator", 1: CANARY}

    async def sample(*_: object) -> dict[int, dict[str, float]]:
        return {0: {"system/cpu": 1.0}, 1: {"system/cpu": 77.0}}

    monkeypatch.setattr(agent.stack_collector, "collect", collect)
    monkeypatch.setattr(node._system_metrics, "sample", sample)
    silo_gate.note_silo(silo_task(tmp_path, spool_dir=str(spools / "r1.0.metrics")))
    silo_gate.note_silo(rank_task(rank=0, spool_dir=str(spools / "r0.0.metrics")))
    write(0, FrameKind.LOG, {"line": 0, "text": "of the aggregator"})
    # A replacement may have another number than the rank that was noted.
    for rank in (1, 2):
        write(rank, FrameKind.LOG, {"line": 0, "text": CANARY})
        write(rank, FrameKind.ERROR, {"cause": "user_error", "message": f"bad {CANARY}" * 9})

    async def seen() -> tuple[list[Any], list[Any], Any, Any]:
        read = await node.read("j", 1, {}, 1 << 20, 0.0)
        bodies = [f.body for k, d in read.data.items() for f in spool_reader.decode(k, d)]
        errors = [frame.body for frame in await node.errors("j", 1)]
        observed = await node.observe("j", 1, False, True)
        return bodies, errors, await node.stacks("j", 1, [0, 1], 1.0), observed.system_metrics

    bodies, errors, stacks, system = await seen()
    assert CANARY not in str([bodies, errors])
    assert [body["text"] for body in bodies if "text" in body] == ["of the aggregator"]
    assert [error["message"] for error in errors] == ["error in silo north"] * 2
    assert stacks == {
        0: "aggregator",
        1: "the stacks of silo north are only available on the silo's node",
    }
    assert system == {0: {"system/cpu": 1.0}}
    monkeypatch.setenv(OPENS, "logs, stacks, system_metrics")
    bodies, errors, stacks, system = await seen()
    assert [body["text"] for body in bodies if "text" in body].count(CANARY) == 2
    assert stacks[1] == CANARY
    assert set(system) == {0, 1}


async def test_output_of_a_closed_silo_stays_in_a_file_of_its_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = silo_task(tmp_path)
    source, sink = os.pipe()
    log = ClosedLogPump(tmp_path / "spool" / "r1.0.metrics", source, 60, Timings(), task)
    os.write(sink, f"{CANARY}\n".encode() + b"x" * 30 + b"\n" + b"beyond the limit" * 9 + b"\n")
    await asyncio.sleep(0)
    os.close(sink)
    log.finish()
    assert await log.lines_lost_at_the_end() == 0
    kept = (silo_gate.folder_of(task) / silo_gate.OUTPUT).read_text()
    assert kept == f"{CANARY}\n{'x' * 30}\n"
    assert capsys.readouterr().out == ""
    spooled = [p.read_bytes() for p in (tmp_path / "spool").rglob("*") if p.is_file()]
    assert CANARY.encode() not in b"".join(spooled)


def test_a_word_that_opens_nothing_is_an_error_and_no_silo_is_opened_by_it(tmp_path: Path) -> None:
    task = silo_task(tmp_path)
    silo_gate.note_silo(task)
    with pytest.raises(ValueError, match="'log' is not a valid"):
        SiloGate({OPENS: "log"}).silo(tmp_path / "spool", 1)


def test_nothing_leaves_in_a_field_next_to_the_body_or_instead_of_a_number() -> None:
    for frame in (
        {"time": 1.5, "more": CANARY, "body": {"step": 1, "values": {"train/loss": 1.0}}},
        {"time": CANARY, "body": {"step": 1, "values": {"train/loss": 1.0}}},
        {"time": 1.5, "body": {"step": CANARY, "values": {"train/loss": 1.0}}},
    ):
        line = json.dumps({"kind": "metrics", **frame}, ensure_ascii=False).encode() + b"\n"
        assert CANARY.encode() not in CLOSED.frames(line).replace(b"\\", b"")
