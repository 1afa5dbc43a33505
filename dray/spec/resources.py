"""The resources of a job's group, and how its size may change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field, StrictBool, StringConstraints, model_validator

from dray.spec.fields import Document, GpuShare, Int, LabelKey, NodeLabelValue, Size
from dray.spec.training.parallel import MAX_WORKERS


class Resources(Document):
    """Resources of the group. All workers start together or not at all."""

    num_workers: Annotated[Int, Field(ge=1, le=MAX_WORKERS)] = 1
    """Number of ranks: processes that train together, including parameter servers."""
    gpus_per_worker: GpuShare = 0
    """0 trains on CPU; 1 gives each rank a GPU of its own; a part such as 0.5 shares each GPU with
    other jobs, and needs `share_gpus`. Two ranks of one job never share a GPU."""
    share_gpus: StrictBool = False
    """Accept that other jobs run on the same GPUs. Each process may use its part of a GPU's memory,
    and its speed depends on the load of the others."""
    cpus_per_worker: Annotated[Int, Field(ge=1, le=1024)] = 1
    """CPU cores of each worker."""
    memory_bytes: Size | None = None
    """Memory of each worker, as Ray accounts for it; a number, or a size such as `8GiB`."""
    accelerator: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = None
    """Ray's accelerator type, such as `H100`."""
    node_labels: Annotated[dict[LabelKey, NodeLabelValue], Field(max_length=8)] = {}
    """Ray labels that the workers' nodes must have. `{ray.io/market-type: on-demand}` keeps a job
    off spot nodes, if the nodes are labelled."""
    required_topology: LabelKey | None = None
    """Level of the cluster's topology, such as `rack`: all workers run within one domain of this
    level, and with `node` on one node. Unset, workers are placed as near each other as free slots
    allow."""


class RoleResources(Document):
    """Resources of each rank of one role, which has no GPU."""

    cpus: Annotated[Int, Field(ge=1, le=1024)] = 1
    """CPU cores."""
    memory_bytes: Size | None = None
    """Memory, as Ray accounts for it; a number, or a size such as `8GiB`."""

    @model_validator(mode="before")
    @classmethod
    def _names_of_the_jobs_resources(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and "cpus_per_worker" in given:
            raise ValueError("has cpus_per_worker, which is called cpus here")
        if isinstance(given, Mapping) and "gpus_per_worker" in given:
            raise ValueError(
                "has gpus_per_worker, and ranks with resources of their own have no GPU: leave "
                "the resources of roles with GPUs out, and give these as the job's resources"
            )
        return given


class RoleRanks(NamedTuple):
    """The ranks of a role that has resources of its own."""

    role: str
    ranks: range
    resources: RoleResources


class Elastic(Document):
    """Allows a group that is smaller than `resources.num_workers`: the group starts with the free
    slots, goes on without lost workers, and grows again when slots are free. The batch size and the
    order of the samples do not change. For recipes on CPU, and scripts on CPU that call
    `train.prepare`."""

    min_workers: Annotated[Int, Field(ge=1, le=MAX_WORKERS)]
    """Least number of workers to start and to go on with; at most `resources.num_workers`."""
    exact: StrictBool = False
    """Whether the weights are bitwise equal at any size of the group, at some cost in speed: on any
    number of workers, gradients are computed in `resources.num_workers` shares and added in a fixed
    order."""
    by_speed: StrictBool = True
    """Whether the size of a recipe's group is chosen by its reported step times: the job then gives
    up slots, or stops for a while, when other elastic jobs gain more from the slots. If false, the
    job gets and gives up slots by the same rules as jobs that are not elastic."""
