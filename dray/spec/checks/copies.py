"""Validation across parts: how the ranks keep their copies of the model in sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dray.spec.fields import wrong
from dray.spec.training.sync import AllReduce, AutoSync, Gossip, ParameterServer

if TYPE_CHECKING:
    from dray.spec.job import JobSpec


def check(spec: JobSpec) -> None:
    compression = spec.compression
    if spec.sync is not None and spec.script is not None:
        raise wrong("/sync", "is only for recipes: a script exchanges its own gradients")
    continues = spec.init_from is not None and spec.init_from.take == "everything"
    if isinstance(spec.sync, AutoSync) and continues:
        raise wrong(
            "/sync",
            "must not be auto if init_from.take is everything: use the same sync as the job that "
            "this job continues",
        )
    if spec.copies_differ:
        _check_differing_copies(spec)
    if spec.sync is not None:
        spec.sync.check(spec.resources.num_workers)
    if isinstance(spec.sync, Gossip):
        _check_asynchronous(spec, spec.sync)
    if isinstance(spec.sync, ParameterServer):
        _check_servers(spec, spec.sync)
    if compression is None:
        return
    if spec.is_exact:
        raise wrong(
            "/sync/compression",
            "can't be combined with elastic.exact, because each rank leaves different values "
            "unsent",
        )
    optimizer = spec.train.optimizer
    if spec.train.on_divergence == "skip_step" and compression.name in ("topk", "powersgd"):
        raise wrong(
            "/train/on_divergence",
            f"must not be skip_step with {compression.name}, which keeps unsent values for later "
            "steps, including non-finite gradients. Use rollback",
        )
    if spec.train.precision == "fp16" and compression.name in ("topk", "powersgd"):
        raise wrong(
            "/train/precision",
            f"must be fp32 or bf16 with {compression.name}, which keeps unsent values for later "
            "steps, including gradients that have overflowed",
        )
    if compression.name == "topk" and optimizer.nesterov:
        raise wrong(
            "/train/optimizer/nesterov",
            "must be false with topk, because topk applies the momentum itself",
        )
    if compression.name == "topk" and optimizer.name == "lars":
        raise wrong("/sync/compression/name", "must not be topk with lars: use sgd or lamb")


def check_comparison(spec: JobSpec) -> None:
    """Check that the job has replicas of the model that are equal after every step."""
    if spec.check is None:
        return
    at = "/check/replicas_every"
    if spec.script is not None and (spec.is_divided or spec.parallel.auto):
        raise wrong(at, "is not supported for scripts that divide a model: leave check out")
    if spec.federated is not None:
        raise wrong(at, "can't be combined with federated, whose clients train different copies")
    if spec.sync is not None and not isinstance(spec.sync, AllReduce):
        kinds = f"sync.kind {spec.sync.kind}"
        why = (
            "might choose copies that differ"
            if isinstance(spec.sync, AutoSync)
            else "has no copies of the model that are equal after every step"
        )
        raise wrong(at, f"can't be combined with {kinds}, which {why}: use sync.kind all_reduce")
    if spec.takes_local_steps:
        raise wrong(at, "requires sync.every 1: with local steps, the ranks' weights differ")
    if spec.parallel.auto:
        raise wrong(
            at,
            "requires numbers as the sizes of the axes, because `auto` might choose a division "
            "without replicas: set parallel.data to 2 or more",
        )
    if spec.num_replicas < 2:
        how = "parallel.data" if spec.is_divided else "resources.num_workers"
        raise wrong(at, f"requires at least two replicas of the model: set {how} to 2 or more")


def why_no_state_in_memory(spec: JobSpec) -> str | None:
    """Return the reason why the ranks can't keep copies of their shares of the state in each
    other's memory, or why they don't need such copies; None if the ranks can keep copies."""
    if spec.script is not None:
        return "is only for recipes: scripts resume from a checkpoint"
    if spec.parallel.auto:
        return "requires explicit sizes for the axes of parallel, instead of parallel: auto"
    if not spec.is_divided:
        return (
            "is only for models that are divided among workers (parallel.shard, tensor, context or "
            "pipeline above 1): in other jobs, every worker has the complete model"
        )
    if spec.num_replicas > 1:
        return (
            "is not needed with replicas of the model (parallel.data above 1), which hold the "
            "state of the latest step: leave it out"
        )
    if spec.compression is not None:
        return "can't be combined with sync.compression, whose unsent values are not copied"
    return None


def check_in_memory(spec: JobSpec) -> None:
    """Check that explicit copies of the state in memory are possible."""
    asked = spec.checkpoint.in_memory
    if isinstance(asked, str):
        return
    at, num_workers = "/checkpoint/in_memory", spec.resources.num_workers
    if num_workers == 1:
        raise wrong(at, "requires resources.num_workers 2 or more: another worker keeps the copy")
    if (why := why_no_state_in_memory(spec)) is not None:
        raise wrong(at, f"{why}, or set it to auto or off")
    if asked.copies >= num_workers:
        raise wrong(
            f"{at}/copies",
            f"is {asked.copies}, but the number of other workers, which keep a worker's copies, is "
            f"{num_workers - 1}: set it to {num_workers - 1} or less",
        )


def _check_servers(spec: JobSpec, sync: ParameterServer) -> None:
    """Reject options that parameter servers can't support. Servers store flat vectors and have no
    access to tensors, samples or losses."""
    train = spec.train
    chosen = "with sync.kind parameter_server"
    if spec.is_divided or spec.parallel.auto:
        raise wrong("/parallel", f"must be unset {chosen}: each worker has the complete model")
    if spec.elastic is not None:
        raise wrong("/elastic", f"must be unset {chosen}, whose group has a fixed size")
    gpus = spec.resources.gpus_per_worker
    if gpus and sync.server_resources is None:
        raise wrong(
            "/sync/server_resources",
            "is required with gpus_per_worker, because servers have no GPU: use for example "
            "`{cpus: 2}`, or set gpus_per_worker to 0",
        )
    if train.precision == "fp16":
        raise wrong(
            "/train/precision",
            f"must be fp32 or bf16 {chosen}: parameter servers do not scale the loss",
        )
    if train.ema is not None:
        raise wrong(
            "/train/ema", f"must be unset {chosen}: servers don't average weights over time"
        )
    if train.on_divergence == "skip_step":
        raise wrong(
            "/train/on_divergence",
            f"must not be skip_step {chosen}: servers add every gradient that they receive. Use "
            "rollback",
        )
    if spec.profile is not None:
        raise wrong("/profile", f"must be unset {chosen}: workers don't take the same steps")
    optimizer = train.optimizer
    if optimizer.name not in ("adamw", "sgd"):
        raise wrong(
            "/train/optimizer/name",
            f"must be adamw or sgd {chosen}: {optimizer.name} needs complete layers, which "
            "servers don't have",
        )
    if optimizer.state_dtype != "fp32":
        raise wrong("/train/optimizer/state_dtype", f"must be fp32 {chosen}")
    if spec.data.loader_workers and sync.mode != "synchronous":
        raise wrong(
            "/data/loader_workers",
            f"must be 0 with sync.mode {sync.mode}: a worker is assigned its samples just before "
            "each step",
        )
    if train.max_grad_norm is not None and sync.mode == "synchronous":
        raise wrong(
            "/train/max_grad_norm",
            "must be unset with synchronous parameter servers, because no server has the "
            "complete gradient: leave it out, or set sync.mode to asynchronous or bounded",
        )


def _check_asynchronous(spec: JobSpec, sync: Gossip) -> None:
    if sync.mode != "ad_psgd":
        return
    if spec.resources.gpus_per_worker:
        raise wrong(
            "/resources/gpus_per_worker",
            "must be 0 with ad_psgd, which averages weights on the CPU in this version. On GPUs, "
            "use d_psgd or sgp",
        )
    if spec.data.loader_workers:
        raise wrong(
            "/data/loader_workers",
            "must be 0 with ad_psgd: samples are assigned to ranks only during the step, so they "
            "can't be prefetched",
        )


def _check_differing_copies(spec: JobSpec) -> None:
    assert spec.sync is not None
    chosen = "sync.every above 1" if spec.takes_local_steps else f"sync.kind {spec.sync.kind}"
    why = f"with {chosen}, the ranks' weights differ until they are averaged"
    if spec.changes_size:
        raise wrong("/elastic", f"must be unset: {why}, so the group can't change its size")
    if spec.train.ema is not None:
        raise wrong(
            "/train/ema", f"must be unset: {why}, so there is no model to average over time"
        )
    if spec.checkpoint.every_steps == "auto":
        raise wrong(
            "/checkpoint/every_steps",
            f"must be a number: {why}, so a checkpoint can't be saved at an arbitrary step",
        )
