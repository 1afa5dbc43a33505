"""What crosses the boundary arrives as it was sent."""

from __future__ import annotations

import json
import pickle

from dray import views
from dray.checkpoints import CheckpointRef
from ray_workers import contracts, pages
from ray_workers.contracts import AttemptSpec, DataPolicy, RankTask, Slice
from service.domain.ledger import SlotClass


def task(**more: object) -> RankTask:
    fields: dict[str, object] = {
        "job_id": "job-1",
        "attempt": 2,
        "rank": 1,
        "incarnation": 0,
        "world_size": 3,
        "local_rank": 1,
        "local_world_size": 2,
        "node_rank": 0,
        "master_addr": "10.0.0.1",
        "master_port": 29500,
        "spec": {"name": "naïve ☂", "train": {"epochs": 3}},
        "spool_dir": "/tmp/spool",
        "checkpoint_url": "file:///c",
        "artifact_url": "file:///a",
    }
    return RankTask(**{**fields, **more})  # type: ignore[arg-type]


def test_a_rank_task_comes_back_from_json_as_it_was() -> None:
    refs = (CheckpointRef("file:///c/9", 9, "a" * 64), CheckpointRef("file:///c/6", 6, "b" * 64))
    policies = [DataPolicy(), DataPolicy("/c", 9, ("10.0.0.0/8",), ("/a", "/b"), "/s", "http://m")]
    for sent in (
        task(data_policy=policies[0]),
        task(resume_from=refs, device="cuda", env={"A": "b\n"}),
        task(data_policy=policies[1], init_from=refs[0]),
    ):
        text = sent.to_json()
        assert "\n" not in text  # a request to the forkserver is one line
        assert RankTask.from_json(text) == sent
        assert RankTask.from_json(json.dumps(json.loads(text))) == sent


def test_an_attempt_is_as_large_as_its_slices_and_crosses_by_pickle() -> None:
    slices = (Slice("node-a", 2), Slice("node-b", 3))
    spec = AttemptSpec("d", "job-1", 1, {"name": "x"}, slices, {"CPU": 1.0}, "file:///s")
    assert spec.world_size == 5
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_names_say_what_they_name_and_never_meet() -> None:
    names = [
        contracts.supervisor_name("job-1", 1),
        contracts.supervisor_name("job-1", 11),
        contracts.rank_name("job-1", 1, "worker", 1, 0),
        contracts.rank_name("job-1", 1, "worker", 11, 0),
        contracts.rank_name("job-1", 11, "worker", 1, 0),
        contracts.rank_name("job-1", 1, "worker", 1, 1),
        contracts.agent_name("job-1"),
    ]
    assert len(set(names)) == len(names)
    assert names[2] == "dray:job-1:1:worker:1:0"
    prefixes = {contracts.attempt_prefix("job-1", n) + "/" for n in (1, 11)}
    assert not any(a.startswith(b) for a in prefixes for b in prefixes - {a})


def test_the_workers_and_the_users_words_for_drills_are_the_same() -> None:
    assert [*contracts.DrillKind] == [*views.DrillKind]
    assert [*contracts.DrillState] == [*views.DrillState]


def test_the_workers_book_slot_seconds_by_the_services_classes() -> None:
    assert {use.value for use in pages.USES} == {one.value for one in SlotClass}
