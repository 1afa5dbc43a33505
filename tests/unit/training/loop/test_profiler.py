"""Profiles of steps, and their summaries."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dray.spec import Profile
from ray_workers.training.loop.profiler import Profiler, summarise
from tests.marks import SOAK
from tests.unit.training.elastic.test_recovery import Fault
from tests.unit.training.jobs import document, series, weights
from tests.unit.training.ranks import replaced, run_ranks


def event(name: str, begin: float, end: float, category: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin * 1e6, "dur": (end - begin) * 1e6}


def step(begin: float, end: float) -> dict[str, Any]:
    return event("dray.step", begin, end, "user_annotation")


def test_each_second_is_counted_once_and_what_goes_on_at_once_is_said() -> None:
    events = [
        step(0, 10),
        {"ph": "M", "name": "process_name"},
        event("dray.data", 0, 0.5, "user_annotation"),
        event("aten::linear", 1, 3),
        event("aten::addmm", 1.5, 2.5),
        event("autograd::engine::evaluate_function", 0, 10),
        event("c10d::allreduce_", 3, 6),
        event("aten::mm", 4, 6),
        event("gloo:all_reduce", 5, 8, "user_annotation"),
        event("aten::add", 9.5, 20),
    ]
    assert summarise(events) == pytest.approx(
        {
            "wall_s": 10.0,
            "compute_s": 4.5,
            "communication_s": 3.0,
            "overlap_s": 1.0,
            "data_wait_s": 0.5,
            "other_s": 3.0,
        }
    )


def test_what_lies_between_two_steps_is_not_looked_at() -> None:
    events = [step(0, 1), step(9, 10), event("aten::mm", 0.5, 9.5), event("gloo:a", 2, 8)]
    found = summarise(events)
    assert (found["wall_s"], found["compute_s"], found["communication_s"]) == (2.0, 1.0, 0.0)
    assert found["other_s"] == 1.0


def test_what_puts_a_batch_together_is_a_wait_and_no_compute() -> None:
    events = [
        step(0, 10),
        event("dray.data", 0, 4, "user_annotation"),
        event("aten::index", 1, 3),
        event("aten::mm", 3.5, 6),
    ]
    found = summarise(events)
    assert (found["data_wait_s"], found["compute_s"], found["other_s"]) == (4.0, 2.0, 4.0)


def test_with_a_gpu_its_kernels_are_the_compute() -> None:
    events = [
        step(0, 10),
        event("aten::linear", 0, 9),
        event("gemm", 2, 5, "kernel"),
        event("aten::add", 5, 6),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 4, 7, "kernel"),
    ]
    found = summarise(events)
    assert (found["compute_s"], found["communication_s"], found["overlap_s"]) == (3.0, 3.0, 1.0)


def artifacts(home: Path) -> Path:
    return home / "attempt-1" / "artifacts" / "profile"


def test_a_job_leaves_its_trace_and_a_summary_of_it(tmp_path: Path) -> None:
    spec = document(2, epochs=2) | {"profile": {"at_step": 4, "num_steps": 3}}
    assert run_ranks(tmp_path, spec, world_size=2) == [0, 0]
    summary = json.loads((artifacts(tmp_path) / "summary.json").read_text())
    assert summary["steps"] == [4, 6]
    parts = ("compute_s", "communication_s", "data_wait_s", "other_s")
    assert all(0 < summary[part] < summary["wall_s"] for part in parts)
    # As measured by the job itself, between two other points in time.
    measured = series(tmp_path, "perf/step_time_s")
    assert summary["wall_s"] < sum(measured[n] for n in (4, 5, 6)) + 1.0
    assert any(each["name"].startswith("aten::") for each in summary["top"])
    trace = json.loads(gzip.decompress((artifacts(tmp_path) / "trace.json.gz").read_bytes()))
    names = [e.get("name") for e in trace["traceEvents"]]
    assert names.count("dray.step") == 3
    # On a busy machine, the largest operations wait for others, but all of them are in the trace.
    assert "aten::addmm" in names
    assert {each["name"] for each in summary["top"]} <= set(names)
    assert "steps 4 to 6" in (artifacts(tmp_path) / "summary.txt").read_text()


@SOAK
def test_each_rank_that_is_named_leaves_its_own(tmp_path: Path) -> None:
    model = {"name": "resnet", "depth": 8, "width": 4}
    spec = document(2) | {"model": model, "parallel": {"pipeline": 2}}
    spec |= {"profile": {"at_step": 4, "num_steps": 2, "ranks": [1]}}
    assert run_ranks(tmp_path, spec, world_size=2) == [0, 0]
    (folder,) = artifacts(tmp_path).iterdir()
    assert folder.name == "rank-1"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == [4, 5]
    assert 0 < summary["communication_s"] < summary["wall_s"]


@SOAK
def test_steps_that_are_done_again_are_recorded_again_and_learn_the_same(tmp_path: Path) -> None:
    plain, recovered = tmp_path / "plain", tmp_path / "recovered"
    spec = document(2, epochs=2)
    assert run_ranks(plain, spec, world_size=2) == [0, 0]
    profiled = spec | {"profile": {"at_step": 4, "num_steps": 3}}
    fault = Fault(1, "before the backward pass", 5)
    assert run_ranks(recovered, profiled, world_size=2, before=fault, recovers=True) == [0, 0]
    assert replaced(recovered) == [1]
    assert json.loads((artifacts(recovered) / "summary.json").read_text())["steps"] == [5, 6]
    expected = weights(plain)
    assert all(tensor.equal(expected[name]) for name, tensor in weights(recovered).items())


def test_a_job_that_ends_before_the_last_of_the_steps_leaves_those_that_came(
    tmp_path: Path,
) -> None:
    spec = document(2, epochs=2) | {"profile": {"at_step": 15, "num_steps": 9}}
    assert run_ranks(tmp_path, spec, world_size=2) == [0, 0]
    summary = json.loads((artifacts(tmp_path) / "summary.json").read_text())
    assert summary["steps"] == [15, 16]


def test_steps_that_never_come_are_said_to_be_missing(capsys: pytest.CaptureFixture[str]) -> None:
    Profiler(Profile(at_step=500), torch.device("cpu")).finish(8)
    said = "the profile was requested for steps 500 to 502, but training ended after step 8"
    assert said in capsys.readouterr().out
