"""The variables through which each framework finds the peers of a rank."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from dray.spec import JobSpec
from ray_workers.training.process.rank_main import environment
from ray_workers.training.scripts.frameworks import NO_GROUP
from ray_workers.training.scripts.script import refuse_mpi4py
from tests.wire import rank_task

PEERS = ("10.0.0.1:20001", "10.0.0.1:20002", "10.0.0.2:20001", "10.0.0.2:20002", "10.0.0.2:20003")


def variables(
    framework: str, rank: int, roles: dict[str, Any] | None = None, **task: Any
) -> dict[str, str]:
    script = {"entrypoint": "a.py", "framework": framework, "roles": roles or {}}
    document: dict[str, Any] = {"script": script}
    if not roles:
        document["resources"] = {"num_workers": 4}
    spec = JobSpec.model_validate(document)
    num = spec.resources.num_workers
    place = {"local_rank": rank % 2, "local_world_size": 2, "node_rank": rank // 2}
    fields = {"rank": rank, "world_size": num, "peers": PEERS[:num], **place, **task}
    return environment(rank_task(spec=document, **fields), spec)


def test_tensorflow_is_told_of_all_workers() -> None:
    assert json.loads(variables("tensorflow", 2)["TF_CONFIG"]) == {
        "cluster": {"worker": list(PEERS[:4])},
        "task": {"type": "worker", "index": 2},
    }


def test_tensorflow_is_told_of_its_roles_and_the_evaluator_is_not_in_the_cluster() -> None:
    roles = {"chief": {}, "worker": {"num_workers": 2}, "ps": {}, "evaluator": {}}
    cluster = {"chief": [PEERS[0]], "worker": list(PEERS[1:3]), "ps": [PEERS[3]]}
    told = [json.loads(variables("tensorflow", rank, roles)["TF_CONFIG"]) for rank in range(5)]
    assert [one["cluster"] for one in told] == [cluster] * 5
    assert [tuple(one["task"].values()) for one in told] == [
        ("chief", 0),
        ("worker", 0),
        ("worker", 1),
        ("ps", 0),
        ("evaluator", 0),
    ]
    found = variables("tensorflow", 2, roles)
    assert (found["ROLE_NAME"], found["ROLE_RANK"], found["ROLE_WORLD_SIZE"]) == (
        "worker",
        "1",
        "2",
    )


def test_jax_finds_its_coordinator_and_takes_the_rest_from_open_mpi() -> None:
    found = variables("jax", 3)
    assert found["JAX_COORDINATOR_ADDRESS"] == found["JAX_COORDINATOR_BIND_ADDRESS"] == PEERS[0]
    assert (found["JAX_PROCESS_ID"], found["JAX_NUM_PROCESSES"]) == ("3", "4")
    # jax/_src/clusters/ompi_cluster.py reads these.
    assert found["OMPI_MCA_orte_hnp_uri"] == f"0.0;tcp://{PEERS[0]}"
    assert (found["OMPI_COMM_WORLD_RANK"], found["OMPI_COMM_WORLD_SIZE"]) == ("3", "4")
    assert found["OMPI_COMM_WORLD_LOCAL_RANK"] == "1"
    assert variables("jax", 3, device="cuda")["OMPI_COMM_WORLD_LOCAL_RANK"] == "0"


def test_mxnet_gets_a_scheduler_servers_and_workers() -> None:
    roles = {"worker": {"num_workers": 2}, "scheduler": {}, "server": {"num_workers": 2}}
    found = [variables("mxnet", rank, roles) for rank in range(5)]
    assert [one["DMLC_ROLE"] for one in found] == [
        *("worker", "worker", "scheduler", "server", "server")
    ]
    for one in found:
        assert (one["DMLC_PS_ROOT_URI"], one["DMLC_PS_ROOT_PORT"]) == ("10.0.0.2", "20001")
        assert (one["DMLC_NUM_SERVER"], one["DMLC_NUM_WORKER"]) == ("2", "2")
    assert [one["DMLC_NODE_HOST"] for one in found] == ["10.0.0.1"] * 2 + ["10.0.0.2"] * 3


def test_a_script_that_reads_open_mpis_variables_has_its_rank() -> None:
    found = variables("mpi", 3)
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "NODE_RANK")
    assert [found[f"OMPI_COMM_WORLD_{name}"] for name in names] == ["3", "4", "1", "2", "1"]
    assert not {name for name in found if name.startswith("OMPI_MCA")}


def test_deepspeed_gets_what_its_launcher_sets() -> None:
    found = variables("deepspeed", 3)
    assert (found["LOCAL_SIZE"], found["CROSS_RANK"]) == ("2", "1")
    assert found["DS_ACCELERATOR"] == "cpu"
    assert "DS_ACCELERATOR" not in variables("deepspeed", 3, device="cuda")
    required = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
    assert all(found[name] for name in required), "it would ask MPI instead"


def test_ranks_of_no_framework_form_no_group() -> None:
    found, usual = variables("none", 3), variables("torch", 3)
    assert usual.keys() - found.keys() == set(NO_GROUP)
    assert (found["RANK"], found["WORLD_SIZE"]) == ("3", "4")


def test_the_variables_that_the_task_brings_have_the_last_word() -> None:
    assert variables("jax", 1, env={"JAX_PROCESS_ID": "7"})["JAX_PROCESS_ID"] == "7"


def test_mpi4py_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    refuse_mpi4py(1)
    refuse_mpi4py(2)
    with pytest.raises(ModuleNotFoundError, match=r"be rank 0 of 1\. Use torch\.distributed"):
        __import__("mpi4py.MPI")
