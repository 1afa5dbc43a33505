"""The folders of a script are made on each node before it starts, and kept once it has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ray_workers.node.folders.job_folders import FilesKept
from ray_workers.shared.contracts import Cause, Outcome
from ray_workers.shared.frames import Report
from ray_workers.shared.slices import Slice
from ray_workers.shared.supervisor_frames import WaitingReport
from ray_workers.supervision.node_clients import CodeUnavailable
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.script_folders import ScriptFolders, plans_of, with_files
from tests.wire import attempt_spec, traits

SPEC = attempt_spec(
    spec={"script": {"entrypoint": "train.py"}},
    slices=(Slice("a", 2), Slice("b", 1), Slice("a", 1)),
    storage_url="s3://bucket/dray/",
)
DONE = Outcome.of(Cause.SUCCEEDED, "every rank exited with code 0")
FAILED = Outcome.of(Cause.USER_ERROR, "KeyError", 1, 1)
KEPT = FilesKept(1, None, "", "")


class Nodes:
    """Agents that answer each question from a list; an error is raised, and the last one stays."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers = answers
        self.asked: list[tuple[Any, ...]] = []

    async def ask(self, node_id: str, method: str, *arguments: Any, limit_s: float) -> Any:
        self.asked.append((node_id, method, *arguments))
        left = self.answers[f"{node_id}_{method}"]
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def folders(
    nodes: Nodes, report: Callable[[Report], None] = lambda report: None, **fields: Any
) -> ScriptFolders:
    spec = attempt_spec(**{**vars(SPEC), **fields})
    timings = Timings(ask_again_pause_s=0.0)
    return ScriptFolders(spec, nodes, timings, report)  # type: ignore[arg-type]


async def never(_: Any) -> bool:
    return False


async def always(_: Any) -> bool:
    return True


def test_each_node_has_a_plan_with_its_first_rank() -> None:
    plans = plans_of(SPEC)
    assert {node: (plan.rank, plan.node_rank) for node, plan in plans.items()} == {
        "a": (0, 0),
        "b": (2, 1),
    }
    assert plans["b"].output_url == "s3://bucket/dray/jobs/job/attempts/1/output"
    assert plans["b"].folder_url == "s3://bucket/dray/jobs/job/checkpoint-folder"


async def test_a_node_that_cannot_have_the_folders_is_a_reason_not_to_start() -> None:
    nodes = Nodes(a_begin_folders=[None], b_begin_folders=["the bucket is gone"])
    with pytest.raises(CodeUnavailable, match="on node b: the bucket is gone"):
        await folders(nodes).begin(["a", "b"])


async def test_a_node_that_the_group_grows_onto_has_folders_too() -> None:
    nodes = Nodes(
        c_begin_folders=[None],
        **{f"{node}_output_sizes": [{"log": 1}] for node in "abc"},
        **{f"{node}_keep_output": [KEPT] for node in "abc"},
    )
    grown = folders(nodes)
    await grown.begin(["c"])
    ((_, _, plan),) = nodes.asked
    assert (plan.rank, plan.node_rank) == (3, 2)
    assert await grown.keep(DONE, never) == DONE
    assert nodes.asked[-1] == ("c", "keep_output", ["log"], 2)


async def test_names_that_two_nodes_use_are_reported_to_the_later_one() -> None:
    nodes = Nodes(
        a_output_sizes=[{"log": 1, "model": 100}],
        b_output_sizes=[TimeoutError(), {"log": 2, "more": 3}],
        a_keep_output=["", "the disk is full", "the disk is still full", KEPT],
        b_keep_output=[ConnectionError(), KEPT],
    )
    reports: list[Report] = []
    assert await folders(nodes, reports.append).keep(DONE, never) == DONE
    assert reports == [WaitingReport("the disk is full")]
    assert ("b", "keep_output", ["log"], 101) in nodes.asked
    assert ("a", "keep_output", [], 0) in nodes.asked


async def test_a_node_that_is_gone_with_its_files_is_no_success() -> None:
    nodes = Nodes(
        a_output_sizes=[{}],
        b_output_sizes=[TimeoutError()],
        a_keep_output=[KEPT],
        b_keep_output=[TimeoutError()],
    )
    outcome = await folders(nodes).keep(DONE, always)
    assert outcome.cause is Cause.NODE_LOST
    assert "a node that held some of the files was lost" in outcome.message


async def test_a_recipe_and_a_script_without_slots_have_no_files() -> None:
    nodes = Nodes()
    assert await folders(nodes, traits=traits({})).keep(DONE, never) == DONE
    none = Outcome.of(Cause.SLOTS_UNAVAILABLE, "others use the cluster")
    assert await folders(nodes).keep(none, never) == none


def test_lost_files_end_a_success_and_left_out_files_are_reported() -> None:
    full = FilesKept(1, "no space left", "", "")
    outcome = with_files(DONE, [KEPT, full])
    assert outcome.cause is Cause.INFRASTRUCTURE
    assert outcome.message.endswith("were stored: no space left")
    failed = with_files(FAILED, [full])
    assert (failed.cause, failed.rank) == (Cause.USER_ERROR, 1)
    assert failed.message.startswith("KeyError; not all files in the script's folders")
    outcome = with_files(
        DONE, [FilesKept(0, None, "1 file of DRAY_OUTPUT_DIR can't be kept: 'x'", "")]
    )
    assert outcome.cause is Cause.SUCCEEDED
    assert outcome.message == DONE.message
    assert outcome.left_behind == "1 file of DRAY_OUTPUT_DIR can't be kept: 'x'"


@pytest.mark.parametrize("outcome", [DONE, FAILED])
def test_each_end_names_the_results_that_were_left_behind(outcome: Outcome) -> None:
    left = FilesKept(1, None, "", "1 file was left")
    ended = with_files(outcome, [left, KEPT, left])
    assert ended == replace(outcome, left_behind="1 file was left")
