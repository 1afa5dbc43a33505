"""Types that cross the boundary arrive unchanged."""

from __future__ import annotations

import json
import pickle
from dataclasses import MISSING, fields
from typing import get_args

import pytest

from dray.train.checkpoints import CheckpointRef
from ray_workers.node.attempt_residue import AttemptResidue
from ray_workers.node.folders.job_folders import FilesKept, FolderPlan
from ray_workers.node.node_report import NodeReport
from ray_workers.shared import commands, contracts
from ray_workers.shared import names as names_of
from ray_workers.shared.contracts import (
    AttemptSpec,
    Outcome,
    PollReply,
    ProcessSpec,
    RankSpec,
    RankTask,
)
from ray_workers.shared.frames import Report
from ray_workers.shared.node_needs import (
    CodeProblem,
    CodeRef,
    DataPolicy,
    EnvironmentPolicy,
    LicensedModel,
    NodeEnvironment,
    NodeNeeds,
    RemoteCodeRef,
    ResultFile,
)
from ray_workers.shared.processes.procfs import Activity
from ray_workers.shared.slices import Slice
from ray_workers.supervision.rules.failure_attribution import RankExit
from service.cluster.port import AttemptRef, ClusterNode, ClusterSnapshot
from service.cluster.ray.node_agents import GatewayConfig
from tests.wire import attempt_spec, rank_task


def test_a_rank_task_comes_back_from_json_as_it_was() -> None:
    refs = (CheckpointRef("file:///c/9", 9, "a" * 64), CheckpointRef("file:///c/6", 6, "b" * 64))
    result = (ResultFile("config.json", "s3://b/c", 9, "a" * 64),)
    policy = DataPolicy(
        *("/c", 9, ("10.0.0.0/8",), ("/a", "/b"), "/s", "http://m", result),
        uploads_url="s3://b/u",
        licensed=(LicensedModel("llama", "MIT", "a" * 64),),
    )
    for sent in (
        rank_task(spec={"name": "naïve ☂", "train": {"epochs": 3}}),
        rank_task(resume_from=refs, device="cuda", env={"A": "b\n"}),
        rank_task(data_policy=policy, init_from=refs[0]),
    ):
        text = sent.to_json()
        assert "\n" not in text  # a request to the forkserver is one line
        assert RankTask.from_json(text) == sent
        assert RankTask.from_json(json.dumps(json.loads(text))) == sent


def test_an_attempt_is_as_large_as_its_slices_and_crosses_by_pickle() -> None:
    slices = (Slice("node-a", 2), Slice("node-b", 3))
    spec = attempt_spec(spec={"name": "x"}, slices=slices)
    assert spec.world_size == 5
    assert pickle.loads(pickle.dumps(spec)) == spec


CROSS = [
    *(
        AttemptSpec,
        RankTask,
        PollReply,
        Outcome,
        contracts.Frame,
        *get_args(commands.Command),
    ),
    *(DataPolicy, EnvironmentPolicy, CodeRef, RemoteCodeRef, NodeNeeds, NodeEnvironment),
    *(CodeProblem, FolderPlan, FilesKept, Activity),
    *(contracts.SilentProcess, AttemptResidue, NodeReport, RankExit),
    *(ClusterNode, ClusterSnapshot, AttemptRef, GatewayConfig, *Report.__subclasses__()),
]


@pytest.mark.parametrize("kind", CROSS, ids=lambda kind: kind.__name__)
def test_nothing_that_crosses_is_left_to_a_default(kind: type) -> None:
    kept = [f.name for f in fields(kind) if (f.default, f.default_factory) != (MISSING, MISSING)]
    assert kept == []


def test_a_rank_gets_every_field_of_its_attempt() -> None:
    ref = CheckpointRef("file:///c/9", 9, "a" * 64)
    attempt = attempt_spec(
        job_id="job-7",
        attempt=4,
        spec={"name": "x"},
        slices=(Slice("a", 2), Slice("b", 3)),
        bundle={"CPU": 1.0, "GPU": 1.0},
        storage_url="file:///s/",
        resume_from=(ref,),
        init_from=ref,
        older_than_init_from=(ref,),
        data_policy=DataPolicy.open("/c"),
        environment_policy=EnvironmentPolicy("/s", limit_bytes=7, build_limit_s=3.0, owner="ann"),
        spool_limit_bytes=77,
        output_limit_bytes=88,
        furthest_step=12,
        worker_mtbf_s=345.0,
        array_index=5,
        scheduled_at="2026-12-01T02:30:00+01:00",
        parameters={"lr": 0.1},
    )
    own = {f.name: getattr(rank_task(), f.name) for f in fields(ProcessSpec)}
    process = ProcessSpec(
        **{**own, "rank": 3, "page_prefix": "/p", "generation": contracts.AWAITING}
    )
    task = RankTask.from_json(RankTask.of(attempt, process).to_json())
    both = {f.name for f in fields(AttemptSpec)} & {f.name for f in fields(RankTask)}
    assert both == {f.name for f in fields(RankSpec)}
    for name in both:
        assert getattr(task, name) == getattr(attempt, name), name
        if name != "attempt":
            assert getattr(task, name) != getattr(rank_task(), name), f"{name} is not told apart"
    assert {f.name: getattr(task, f.name) for f in fields(ProcessSpec)} == vars(process)
    assert (task.world_size, task.device, task.env) == (5, "cuda", {})
    assert task.checkpoint_url == "file:///s/jobs/job-7/attempts/4/checkpoints"
    assert task.artifact_url == "file:///s/jobs/job-7/attempts/4/artifacts"


def test_names_contain_their_parts_and_never_collide() -> None:
    names = [
        names_of.supervisor_name("job-1", 1),
        names_of.supervisor_name("job-1", 11),
        names_of.rank_name("job-1", 1, "worker", 1, 0),
        names_of.rank_name("job-1", 1, "worker", 11, 0),
        names_of.rank_name("job-1", 11, "worker", 1, 0),
        names_of.rank_name("job-1", 1, "worker", 1, 1),
        names_of.agent_name("job-1"),
    ]
    assert len(set(names)) == len(names)
    assert names[2] == "dray:job-1:1:worker:1:0"
    assert names_of.repr_name("a: b", names[2]) == "a: b:1:worker:1:0"
    assert names_of.repr_name("digits", names[1]) == "digits:11:supervisor"
    prefixes = {names_of.attempt_prefix("job-1", n) + "/" for n in (1, 11)}
    assert not any(a.startswith(b) for a in prefixes for b in prefixes - {a})
