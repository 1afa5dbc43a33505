"""Validation across parts: the group's GPUs and sizes, and the ranks that other parts refer to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dray.spec.checks.recovery import why_not_on_gpus
from dray.spec.fields import wrong
from dray.spec.training.parallel import MAX_WORKERS

if TYPE_CHECKING:
    from dray.spec.job import JobSpec


def check_gpus(spec: JobSpec) -> None:
    share, accepts = spec.resources.gpus_per_worker, spec.resources.share_gpus
    if 0 < share < 1 and not accepts:
        at = "/resources/share_gpus"
        raise wrong(
            at,
            f"must be true if gpus_per_worker is {share:g}: other jobs can use the rest of the GPU",
        )
    if accepts and share in (0, 1):
        at = "/resources/share_gpus"
        raise wrong(at, "requires a fraction of a GPU: set gpus_per_worker to a value such as 0.5")


def check_roles(spec: JobSpec) -> None:
    """If a role has its own resources, reject options that require equal slots. The assignment of
    slots of different sizes does not support these options."""
    found = spec.roles_with_resources
    if not found:
        return
    role = found[0].role
    what = "sync.server_resources" if spec.script is None else f"script.roles.{role}.resources"
    if 0 < spec.resources.gpus_per_worker < 1:
        at = "/resources/gpus_per_worker"
        raise wrong(at, f"must be 0 or 1 with {what}: fractions of a GPU require equal slots")
    if spec.resources.required_topology is not None:
        raise wrong(
            "/resources/required_topology",
            f"must be unset with {what} in this version: a topology requires slots of equal size",
        )


def check_elastic(spec: JobSpec) -> None:
    if spec.elastic is None:
        return
    least, most = spec.elastic.min_workers, spec.resources.num_workers
    if least is None and not spec.num_spares:
        raise wrong("/elastic", "must set min_workers, spares or both")
    if spec.num_slots > MAX_WORKERS:
        raise wrong(
            "/elastic/spares",
            f"must be at most {MAX_WORKERS - most}: spares and resources.num_workers together are "
            f"at most {MAX_WORKERS}",
        )
    if spec.script is not None and spec.script.roles:
        raise wrong("/elastic", "can't be combined with roles, whose sizes are fixed")
    if spec.script is not None and spec.elastic.exact:
        raise wrong(
            "/elastic/exact", "is only for recipes: dray does not know which loss a script uses"
        )
    rule = spec.train.early_stopping
    if spec.elastic.exact and rule is not None and rule.metric != "val/loss":
        raise wrong(
            "/train/early_stopping/metric",
            "must be val/loss with elastic.exact: other metrics are summed in an order that "
            "depends on the world size, so training could stop at a different step",
        )
    if least is None:
        return
    if least > most:
        raise wrong(
            "/elastic/min_workers",
            f"is {least}, but must be at most resources.num_workers, which is {most}",
        )
    if spec.resources.gpus_per_worker:
        why_not = why_not_on_gpus(spec)
        if spec.script is not None:
            why_not = "a script whose ranks have GPUs can't be resized"
        if why_not is not None:
            raise wrong("/elastic", f"requires gpus_per_worker 0: {why_not}")
    if spec.parallel.data != "auto":
        raise wrong("/parallel/data", "must be auto: an elastic job has no fixed world size")


def check_profile(spec: JobSpec) -> None:
    if spec.profile is None:
        return
    if spec.script is not None:
        raise wrong("/profile", "is only for recipes: a script can call torch.profiler")
    num_workers = spec.resources.num_workers
    if max(spec.profile.ranks) >= num_workers:
        message = f"must be below resources.num_workers, which is {num_workers}"
        raise wrong("/profile/ranks", message)


def check_metrics(spec: JobSpec) -> None:
    if spec.metrics and spec.script is None:
        raise wrong("/metrics", "is only for scripts: a recipe reports its own metrics")
    num_workers = spec.resources.num_workers
    for number, metric in enumerate(spec.metrics):
        if metric.rank != "all" and metric.rank >= num_workers:
            message = f"must be below resources.num_workers, which is {num_workers}"
            raise wrong(f"/metrics/{number}/rank", message)
