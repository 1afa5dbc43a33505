"""Environment variables that a script's framework uses to find the other ranks. Pure functions.

`adapted` adds the framework's variables to the variables set by torchrun. `RankTask.peers` contains
the addresses of the ranks in a group.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from dray.spec import Script
from dray.spec.program.roles import first_rank, role_of
from ray_workers.shared.contracts import RankTask

NO_GROUP = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
)
"""Variables that are removed if the framework is `none`, because torch would use them to form a
group."""


def adapted(variables: Mapping[str, str], task: RankTask, script: Script) -> dict[str, str]:
    """Return the variables of a rank of the script. variables: the variables that torchrun sets."""
    found = {**variables, **_of_role(task, script)}
    match script.framework:
        case "torch":
            return found
        case "none":
            return {name: value for name, value in found.items() if name not in NO_GROUP}
        case "tensorflow":
            return {**found, "TF_CONFIG": json.dumps(tf_config(task, script))}
        case "jax":
            return {**found, **_jax(task, found["LOCAL_RANK"])}
        case "mxnet":
            return {**found, **_mxnet(task, script)}
        case "deepspeed":
            return {**found, **_deepspeed(task)}
        case "mpi":
            return {**found, **_open_mpi(task, found["LOCAL_RANK"])}


def _of_role(task: RankTask, script: Script) -> dict[str, str]:
    if not script.roles:
        return {}
    name, number = role_of(script.roles, task.rank)
    return {
        "ROLE_NAME": name,
        "ROLE_RANK": str(number),
        "ROLE_WORLD_SIZE": str(script.roles[name].num_workers),
        "DRAY_ROLE_SIZES": json.dumps({each: r.num_workers for each, r in script.roles.items()}),
    }


def tf_config(task: RankTask, script: Script) -> dict[str, object]:
    """Return TensorFlow's description of the cluster. The description does not include the
    evaluator, which only reads files written by other ranks."""
    if not script.roles:
        return {
            "cluster": {"worker": list(task.peers)},
            "task": {"type": "worker", "index": task.rank},
        }
    cluster = {}
    for name, role in script.roles.items():
        first = first_rank(script.roles, name)
        if name != "evaluator":
            cluster[name] = list(task.peers[first : first + role.num_workers])
    name, number = role_of(script.roles, task.rank)
    return {"cluster": cluster, "task": {"type": name, "index": number}}


def _jax(task: RankTask, local_rank: str) -> dict[str, str]:
    """Return the variables for JAX. `jax.distributed.initialize()` without arguments reads the
    coordinator from JAX's own variable. Versions of JAX that have no variables for the other
    arguments read Open MPI's variables, provided that the address of Open MPI's launcher is set."""
    return {
        "JAX_COORDINATOR_ADDRESS": task.peers[0],
        "JAX_COORDINATOR_BIND_ADDRESS": task.peers[0],
        "JAX_NUM_PROCESSES": str(task.world_size),
        "JAX_PROCESS_ID": str(task.rank),
        "OMPI_MCA_orte_hnp_uri": f"0.0;tcp://{task.peers[0]}",
        **_open_mpi(task, local_rank),
    }


def _open_mpi(task: RankTask, local_rank: str) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(task.rank),
        "OMPI_COMM_WORLD_SIZE": str(task.world_size),
        "OMPI_COMM_WORLD_LOCAL_RANK": local_rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(task.local_world_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(task.local_rank),
        "OMPI_UNIVERSE_SIZE": str(task.world_size),
    }


def _mxnet(task: RankTask, script: Script) -> dict[str, str]:
    roles = script.roles
    host, _, port = task.peers[first_rank(roles, "scheduler")].rpartition(":")
    name, _ = role_of(roles, task.rank)
    return {
        "DMLC_ROLE": name,
        "DMLC_PS_ROOT_URI": host,
        "DMLC_PS_ROOT_PORT": port,
        "DMLC_NUM_SERVER": str(roles["server"].num_workers),
        "DMLC_NUM_WORKER": str(roles["worker"].num_workers),
        "DMLC_NODE_HOST": task.peers[task.rank].rpartition(":")[0],
    }


def _deepspeed(task: RankTask) -> dict[str, str]:
    """Return the variables that DeepSpeed's own launcher sets in addition to those set by
    torchrun."""
    return {
        "LOCAL_SIZE": str(task.local_world_size),
        "CROSS_RANK": str(task.node_rank),
        **({"DS_ACCELERATOR": "cpu"} if task.device == "cpu" else {}),
    }
