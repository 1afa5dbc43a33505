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
    """Ranks of the job: processes that train together. Parameter servers are among them."""
    gpus_per_worker: GpuShare = 0
    """0 trains on CPU; 1 gives each rank a GPU of its own; a part such as 0.5 shares each GPU with
    other jobs, and needs `share_gpus`. Two ranks of one job never share a GPU."""
    share_gpus: StrictBool = False
    """Accept that other jobs run on the same GPUs. Each process may take its part of a GPU's
    memory, and its speed depends on what the others do."""
    cpus_per_worker: Annotated[Int, Field(ge=1, le=1024)] = 1
    """CPU cores of each worker."""
    memory_bytes: Size | None = None
    """Memory of each worker, as Ray accounts for it; a number, or a size such as `8GiB`."""
    accelerator: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = None
    """Ray's accelerator type, such as `H100`."""
    node_labels: Annotated[dict[LabelKey, NodeLabelValue], Field(max_length=8)] = {}
    """Labels of Ray's that the nodes of its workers have. `{ray.io/market-type: on-demand}` keeps a
    job off spot nodes, where these are labelled."""
    required_topology: LabelKey | None = None
    """Level of the cluster's topology, such as `rack`, of which one domain must hold all workers;
    `node` puts them on one node. Unset, they are as near each other as there is room."""


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
    """The group may be smaller than `resources.num_workers`: it starts with the free slots, goes on
    without lost workers, and grows again when slots are free. The batch size and the order of the
    samples do not change. For recipes on CPU, and scripts on CPU that call `train.prepare`."""

    min_workers: Annotated[Int, Field(ge=1, le=MAX_WORKERS)]
    """Least number of workers to start and to go on with; at most `resources.num_workers`."""
    exact: StrictBool = False
    """Makes the weights equal to the last bit at any size, at some cost: gradients are computed in
    `resources.num_workers` shares and added in their order, on any number of workers."""
    by_speed: StrictBool = True
    """Whether the size of a recipe is chosen by the step times that it reports: it gives slots up,
    or leaves for a while, where other elastic jobs gain more by them. If false, it gets free slots
    and leaves them as jobs do that are not elastic."""
