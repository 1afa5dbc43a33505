"""Checks of a whole document: batches, and options that need a certain model or optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dray.spec.fields import wrong
from dray.spec.program.model import Gpt, Imported, ResNet, Unet
from dray.spec.training.parallel import INNER
from dray.spec.training.sync import ParameterServer

if TYPE_CHECKING:
    from dray.spec.job import JobSpec


def check_batch(spec: JobSpec) -> None:
    """Check that each worker with a share of the batch gets at least one sample."""
    if set(spec.parallel.auto) & set(INNER):
        return  # the planner may choose axes that do not divide the batch
    if isinstance(spec.sync, ParameterServer) and spec.sync.mode != "synchronous":
        return  # a worker computes a whole batch
    sharing = spec.num_replicas * spec.parallel.shard
    size = spec.train.global_batch_size
    if size < sharing:
        raise wrong(
            "/train/global_batch_size",
            f"is {size}, fewer than one sample for each of {sharing} workers: make it "
            f"{sharing} or more, or take {size} workers or fewer",
        )


def check_noise(spec: JobSpec) -> None:
    """Check that the job can measure the noise scale: the gradient of each rank is compared with
    the mean gradient, and only data parallelism has both."""
    if not spec.train.measure_noise:
        return
    at = "/train/measure_noise"
    if spec.script is not None:
        raise wrong(at, "is for recipes; a script measures its gradients itself")
    if spec.resources.num_workers == 1:
        raise wrong(at, "needs resources.num_workers 2 or more, whose gradients it compares")
    if spec.is_divided or spec.parallel.auto:
        raise wrong(at, "is for data parallelism, where each worker has the whole model")
    if spec.is_exact or spec.parallel.balance != "even" or spec.sync is not None:
        raise wrong(at, "is not for elastic.exact, sync and balance: auto in this version")
    if spec.train.precision == "fp16":
        raise wrong(at, "needs train.precision fp32 or bf16: fp16 scales the gradients")


def check_batch_range(spec: JobSpec) -> None:
    """Check that the job can use a batch range: its group must be elastic, and measure the noise
    scale by which the batch is chosen."""
    if spec.train.batch_range is None:
        return
    (least, most), size = spec.train.batch_range, spec.train.global_batch_size
    at = "/train/batch_range"
    if spec.script is not None:
        raise wrong(at, "is for recipes; a script makes its batches itself")
    if not least <= size <= most:
        raise wrong(at, f"must hold train.global_batch_size, which is {size}")
    if size % least or most % least:
        raise wrong(at, f"must have global_batch_size and its end as multiples of {least}")
    if least < spec.resources.num_workers:
        workers = spec.resources.num_workers
        raise wrong(at, f"must begin with {workers} or more, a sample for each worker")
    if spec.elastic is None or not spec.elastic.by_speed:
        raise wrong(at, "needs elastic with by_speed: the batch changes with the group's size")
    if not spec.train.measure_noise:
        raise wrong(at, "needs train.measure_noise: the batch is chosen by the noise scale")
    taken = {
        "train.ema": spec.train.ema is not None,
        "profile": spec.profile is not None,
        "checkpoint.every_steps: auto": spec.checkpoint.every_steps == "auto",
    }
    for name in [name for name, is_taken in taken.items() if is_taken]:
        raise wrong(at, f"is not for {name}, which counts the optimizer's steps")


def check_imported(spec: JobSpec) -> None:
    if not isinstance(spec.model, Imported):
        return
    if spec.elastic is not None:
        raise wrong("/elastic", "is for the models of dray, which every node has")
    if spec.parallel.shard > 1 and spec.parallel.zero != 1:
        raise wrong(
            "/parallel/zero",
            "must be 1 for a model of your own, which is whole on every rank: dray does not "
            "know its blocks",
        )
    if spec.init_from is not None:
        raise wrong("/init_from", "is for the models of dray; load weights in your own class")
    if spec.recipe != "language_model":
        for name in ("context_length", "tokenizer"):
            if getattr(spec.model, name) is not None:
                raise wrong(f"/model/{name}", "is for language_model")


def check_blocks(spec: JobSpec) -> None:
    if spec.train.compile and spec.parallel.schedule == "zero_bubble":
        raise wrong(
            "/train/compile",
            "must be false with the schedule zero_bubble, which goes backward through a block "
            "twice",
        )
    if spec.train.compile and spec.parallel.tensor > 1:
        raise wrong(
            "/train/compile",
            "must be false with parallel.tensor: torch loses track of which rank has what",
        )
    if spec.train.recompute == "none":
        return
    if not isinstance(spec.model, Gpt | ResNet | Unet):
        raise wrong("/train/recompute", "is for models made of blocks: gpt, resnet, unet")
    if spec.parallel.schedule == "zero_bubble":
        raise wrong(
            "/train/recompute",
            "must be none with the schedule zero_bubble, which goes backward through a block twice",
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
        raise wrong(at, "is for state as large as the weights: adafactor's is small")
    if optimizer.name == "sgd" and not optimizer.momentum:
        raise wrong(at, "is for what an optimizer remembers: sgd without momentum has nothing")
    compression = spec.compression
    if optimizer.name == "sgd" and compression is not None and compression.name == "topk":
        raise wrong(at, "is for what an optimizer remembers: topk keeps the momentum itself")
    if spec.parallel.shard > 1 and spec.parallel.zero == 1:
        raise wrong(at, "needs parallel.zero 2 or 3: torch's ZeRO 1 keeps its state itself")
    if optimizer.offload and not resources.gpus_per_worker:
        raise wrong(at, "needs gpus_per_worker 1: on CPU the state is in this memory anyway")
