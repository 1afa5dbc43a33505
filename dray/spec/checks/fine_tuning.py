"""Validation across parts: options that fine-tuning does not support."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dray.spec.fields import wrong
from dray.spec.program.model import Lora, Pretrained
from dray.spec.training.method import Dpo, Sft
from dray.spec.training.sync import AllReduce

if TYPE_CHECKING:
    from dray.spec.job import JobSpec


def check(spec: JobSpec) -> None:
    if spec.recipe != "fine_tuning":
        if spec.method is not None:
            raise wrong("/method", "is only for the recipe fine_tuning")
        if spec.samples is not None:
            raise wrong("/samples", "is only for the recipe fine_tuning: leave it out")
        return
    train = spec.train
    options = {
        "/federated": spec.federated is not None,
        "/sync": spec.sync not in (None, AllReduce()),
        "/parallel/balance": spec.parallel.balance != "even",
        "/train/measure_noise": train.measure_noise,
        "/train/ema": train.ema is not None,
        "/train/compile": train.compile,
    }
    for pointer, is_set in options.items():
        if is_set:
            raise wrong(pointer, "is not supported by the recipe fine_tuning: leave it out")
    if spec.method is not None and not isinstance(spec.method, Sft):
        _refuse_options_of_sft(spec, spec.method.name)
    _check_own_metrics(spec)
    if spec.samples is not None and spec.method is not None:
        longest = spec.method.max_length
        if spec.samples.max_tokens >= longest:
            raise wrong(
                "/samples/max_tokens",
                f"must be less than method.max_length, which is {longest:,}: the prompt also needs "
                "space",
            )
    adapter = spec.model.adapter if isinstance(spec.model, Pretrained) else None
    if adapter is not None and adapter.base_precision != "fp32":
        _check_precision(spec, adapter)
    if isinstance(spec.method, Dpo) and spec.init_from is not None:
        raise wrong(
            "/init_from",
            "is not supported by the method dpo, which compares the model with its base: set "
            "model.base to the result of the other job",
        )


def _check_own_metrics(spec: JobSpec) -> None:
    has_metrics = isinstance(spec.method, Sft) and bool(spec.method.metrics)
    if has_metrics and spec.changes_size:
        raise wrong(
            "/method/metrics",
            "can't be used with elastic.min_workers: nodes that join later don't have the code",
        )
    if spec.code is not None and not has_metrics:
        raise wrong("/model/code", "is only for the classes of method.metrics: leave it out")


def _check_precision(spec: JobSpec, adapter: Lora) -> None:
    """Check the options that a base in 16 or 4 bits restricts."""
    pointer, held = "/model/adapter/base_precision", adapter.base_precision
    if spec.train.precision != "bf16":
        raise wrong(
            pointer,
            f"is {held}, but train.precision is {spec.train.precision}: set train.precision to "
            "bf16",
        )
    if held == "nf4" and adapter.kind == "dora":
        raise wrong(
            pointer,
            "is nf4, but adapter.kind is dora, which needs the lengths of exact weights: use bf16, "
            "or set adapter.kind to lora",
        )
    if held == "nf4" and spec.parallel.is_sharded and spec.parallel.zero > 1:
        raise wrong(
            pointer,
            "is nf4, but blocks of 4-bit weights can't be divided by parallel.shard: use bf16, or "
            "set parallel.zero to 1",
        )


def _refuse_options_of_sft(spec: JobSpec, method: str) -> None:
    """Refuse texts, which reward models don't generate, and forms, which pairs don't have."""
    if method == "reward" and spec.samples is not None:
        raise wrong(
            "/samples",
            "is for the methods sft and dpo, but the method is reward, whose model generates no "
            "texts: leave it out",
        )
    given: dict[str, object] = {"/data/examples": spec.data.examples}
    for number, one in enumerate(spec.data.sources or ()):
        given[f"/data/sources/{number}/examples"] = one.examples
    for pointer, value in given.items():
        if value is not None:
            raise wrong(pointer, f"is for the method sft, but the method is {method}: leave it out")
