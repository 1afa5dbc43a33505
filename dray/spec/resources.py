"""The resources of a job's group, and the limits on the group's size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field, StrictBool, StringConstraints, model_validator

from dray.spec.fields import Document, GpuShare, Int, LabelKey, NodeLabelValue, Size
from dray.spec.training.parallel import MAX_WORKERS


class Resources(Document):
    """Resources of the group. Either all workers start, or none do."""

    num_workers: Annotated[Int, Field(ge=1, le=MAX_WORKERS)] = 1
    """Number of ranks, the processes that train together. Parameter servers count as ranks."""
    gpus_per_worker: GpuShare = 0
    """0 trains on CPU, and 1 gives each rank its own GPU. A fraction such as 0.5 shares each GPU
    with other jobs and requires `share_gpus`. Two ranks of the same job never share a GPU."""
    share_gpus: StrictBool = False
    """Whether other jobs can run on the same GPUs. Each process is limited to its share of the
    GPU's memory, but its speed depends on how much the other processes use the GPU."""
    cpus_per_worker: Annotated[Int, Field(ge=1, le=1024)] = 1
    """CPU cores of each worker."""
    memory_bytes: Size | None = None
    """Memory that Ray reserves for each worker. A number of bytes, or a size such as `8GiB`."""
    accelerator: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = None
    """Ray's accelerator type, such as `H100`."""
    node_labels: Annotated[dict[LabelKey, NodeLabelValue], Field(max_length=8)] = {}
    """Ray labels that the workers' nodes must have. For example, `{ray.io/market-type: on-demand}`
    keeps a job off spot nodes if the nodes are labelled."""
    required_topology: LabelKey | None = None
    """Level of the cluster's topology, such as `rack`. All workers run within one domain of this
    level; with `node`, they run on one node. If unset, workers are placed as close together as the
    free slots allow."""


class RoleResources(Document):
    """Resources of each rank of one role. These ranks have no GPU."""

    cpus: Annotated[Int, Field(ge=1, le=1024)] = 1
    """CPU cores."""
    memory_bytes: Size | None = None
    """Memory that Ray reserves. A number of bytes, or a size such as `8GiB`."""

    @model_validator(mode="before")
    @classmethod
    def _names_of_the_jobs_resources(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and "cpus_per_worker" in given:
            raise ValueError("has no field cpus_per_worker: use cpus")
        if isinstance(given, Mapping) and "gpus_per_worker" in given:
            raise ValueError(
                "has no field gpus_per_worker: roles with their own resources can't use GPUs. "
                "Leave out the resources of a role that needs GPUs: its ranks then use the job's "
                "resources"
            )
        return given


class RoleRanks(NamedTuple):
    """The ranks of a role with its own resources."""

    role: str
    ranks: range
    resources: RoleResources


class Elastic(Document):
    """Allows the number of slots to change while the job runs, by `min_workers`, `spares` or both.

    With `min_workers`, the group can be smaller than `resources.num_workers`: it starts on the
    slots that are free, continues without lost workers, and grows again when slots become free. The
    batch size and the order of the samples do not change. `min_workers` is supported for recipes on
    CPU, for recipes on GPUs whose groups recover in place, and for scripts on CPU that call
    `train.prepare`."""

    min_workers: Annotated[Int, Field(ge=1, le=MAX_WORKERS)] | None = None
    """Minimum number of workers to start or continue with. Must not exceed
    `resources.num_workers`. If the workers divide a model (`parallel`), the group's size is always
    a multiple of the number of workers that hold one replica, and so must this number be. If unset,
    the group always has `resources.num_workers` workers."""
    spares: Annotated[Int, Field(ge=0, le=MAX_WORKERS)] = 0
    """Number of additional workers that hold a slot each and take the place of a lost worker. A
    spare has loaded the code and the data and has built the model, but does not train. Supported
    for jobs whose lost workers are replaced while the other workers keep their state."""
    exact: StrictBool = False
    """Whether the weights are bitwise identical for every size of the group, at some cost in speed.
    If true, gradients are always computed in `resources.num_workers` shares and added in a fixed
    order, even while the group has fewer workers."""
    by_speed: StrictBool = True
    """Whether the size of a recipe's group depends on its reported step times. If true, the job
    gives up slots or pauses when other elastic jobs would gain more from its slots. If false, the
    job acquires and gives up slots by the same rules as jobs that are not elastic. Has no effect
    without `min_workers`, or with `spares`."""
