"""Validation across parts: batches, and options that require a certain model or optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dray.spec.fields import wrong
from dray.spec.program.model import Gpt, Imported, Pretrained, ResNet, Unet
from dray.spec.training.parallel import INNER
from dray.spec.training.sync import ParameterServer

if TYPE_CHECKING:
    from dray.spec.job import JobSpec


def check_batch(spec: JobSpec) -> None:
    """Check that each worker with a share of the batch gets at least one sample."""
    if set(spec.parallel.auto) & set(INNER):
        return  # the planner may choose axes that do not divide the batch
    if isinstance(spec.sync, ParameterServer) and spec.sync.mode != "synchronous":
        return  # each worker computes a complete batch
    sharing = spec.num_replicas * spec.parallel.shard
    size = spec.train.global_batch_size
    if size < sharing:
        raise wrong(
            "/train/global_batch_size",
            f"is {size}, which is less than one sample for each of the {sharing} workers: set it "
            f"to {sharing} or more, or use {size} workers or fewer",
        )


def check_noise(spec: JobSpec) -> None:
    """Check that the job can measure the noise scale. The measurement compares the gradient of each
    rank with the mean gradient, and both exist only with data parallelism."""
    if not spec.train.measure_noise:
        return
    at = "/train/measure_noise"
    if spec.script is not None:
        raise wrong(at, "is only for recipes: a script must measure its gradients itself")
    if spec.resources.num_workers == 1:
        raise wrong(
            at,
            "requires resources.num_workers 2 or more, because it compares the "
            "gradients of workers",
        )
    if spec.is_divided or spec.parallel.auto:
        raise wrong(
            at, "only applies to data parallelism, where each worker has the complete model"
        )
    if spec.is_exact or spec.parallel.balance != "even" or spec.sync is not None:
        raise wrong(
            at,
            "can't be combined with elastic.exact, with sync or with 'balance: auto' in this "
            "version",
        )
    if spec.train.precision == "fp16":
        raise wrong(at, "requires train.precision fp32 or bf16: fp16 scales the gradients")


def check_batch_range(spec: JobSpec) -> None:
    """Check that the job can use a batch range. The group must be elastic, and must measure the
    noise scale, from which the batch size is chosen."""
    if spec.train.batch_range is None:
        return
    (least, most), size = spec.train.batch_range, spec.train.global_batch_size
    at = "/train/batch_range"
    if spec.script is not None:
        raise wrong(at, "is only for recipes: a script creates its own batches")
    if not least <= size <= most:
        raise wrong(at, f"must include train.global_batch_size, which is {size}")
    if size % least or most % least:
        raise wrong(
            at,
            f"starts at {least}, which must divide both the end of the range and "
            "train.global_batch_size, but does not",
        )
    if least < spec.resources.num_workers:
        workers = spec.resources.num_workers
        raise wrong(at, f"must start at {workers} or more, one sample for each worker")
    if spec.elastic is None or not (spec.changes_size and spec.elastic.by_speed):
        raise wrong(
            at,
            "requires elastic.by_speed and elastic.min_workers, because the batch size changes "
            "with the group's size",
        )
    if spec.num_spares:
        raise wrong(
            at,
            "can't be combined with elastic.spares: the size of a job with spares does not "
            "depend on its speed",
        )
    if not spec.train.measure_noise:
        raise wrong(
            at,
            "requires train.measure_noise, because the batch size follows the gradient noise scale",
        )
    taken = {
        "train.ema": spec.train.ema is not None,
        "profile": spec.profile is not None,
        "checkpoint.every_steps: auto": spec.checkpoint.every_steps == "auto",
    }
    for name in [name for name, is_taken in taken.items() if is_taken]:
        raise wrong(at, f"can't be combined with {name}, which counts optimizer steps")


def check_imported(spec: JobSpec) -> None:
    if not isinstance(spec.model, Imported):
        return
    if spec.changes_size:
        raise wrong("/elastic", "requires one of dray's own models, whose code is on every node")
    if spec.parallel.shard > 1 and spec.parallel.zero != 1:
        raise wrong(
            "/parallel/zero",
            "must be 1 for a custom model, because dray does not know the model's blocks and can't "
            "shard it",
        )
    if spec.init_from is not None:
        raise wrong(
            "/init_from", "is only for dray's own models: load the weights in your own class"
        )
    if spec.recipe != "language_model":
        for name in ("context_length", "tokenizer"):
            if getattr(spec.model, name) is not None:
                raise wrong(f"/model/{name}", "is only for the recipe language_model")


def check_blocks(spec: JobSpec) -> None:
    if spec.train.compile and spec.parallel.schedule == "zero_bubble":
        raise wrong(
            "/train/compile",
            "must be false with the schedule zero_bubble, which runs two backward passes through "
            "each block",
        )
    if spec.train.compile and spec.parallel.tensor > 1:
        raise wrong(
            "/train/compile",
            "must be false with parallel.tensor: torch.compile loses the placement of the tensors",
        )
    if spec.train.recompute == "none":
        return
    if not isinstance(spec.model, Gpt | ResNet | Unet | Pretrained):
        raise wrong(
            "/train/recompute",
            "is only for models that consist of blocks: gpt, resnet, unet and pretrained",
        )
    if spec.parallel.schedule == "zero_bubble":
        raise wrong(
            "/train/recompute",
            "must be none with the schedule zero_bubble, which runs two backward passes through "
            "each block",
        )


def check_optimizer_state(spec: JobSpec) -> None:
    optimizer, resources = spec.train.optimizer, spec.resources
    if optimizer.offload:
        name = "offload"
    elif optimizer.state_dtype == "bf16":
        name = "state_dtype"
    else:
        return
    at = f"/train/optimizer/{name}"
    if optimizer.name == "adafactor":
        raise wrong(at, "is not useful with adafactor, whose state is small: leave it out")
    if optimizer.name == "sgd" and not optimizer.momentum:
        raise wrong(
            at, "has no effect on sgd with a momentum of 0, which has no state: leave it out"
        )
    compression = spec.compression
    if optimizer.name == "sgd" and compression is not None and compression.name == "topk":
        raise wrong(at, "has no effect with topk, because topk stores the momentum: leave it out")
    if spec.parallel.shard > 1 and spec.parallel.zero == 1:
        raise wrong(at, "requires parallel.zero 2 or 3: torch manages the state of ZeRO 1 itself")
    if optimizer.offload and not resources.gpus_per_worker:
        raise wrong(at, "requires gpus_per_worker 1: on CPU, the state is in host memory anyway")
