"""Activation checkpointing and compilation of the blocks of a model."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from dray import spec
from ray_workers.training.core import compat_torch

_COSTLY = frozenset(
    (
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::convolution",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "_c10d_functional::all_gather_into_tensor",
        "_c10d_functional::all_to_all_single",
        "_c10d_functional::reduce_scatter_tensor",
    )
)
"""Operations whose results `selective` keeps: matrix products, attention and communication."""


def prepare_blocks(model: nn.Module, options: spec.Train) -> None:
    """Apply recomputation and compilation to the model's blocks in place, according to the options.

    With recomputation, only the inputs of each block are kept for the backward pass (Chen et al.
    2016, arXiv:1604.06174). With `selective`, the results of costly operations are kept too. An
    element of a module list is a block if it has child modules. The recomputed pass draws the same
    random numbers as the first pass.
    """
    kept: dict[str, Any] = {"use_reentrant": False}
    if options.recompute == "selective":
        kept["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for block in blocks_of(model):
        if options.recompute != "none":
            block.forward = functools.partial(checkpoint, block.forward, **kept)
        if options.compile:
            block.compile()
    if options.compile and not any(True for _ in blocks_of(model)):
        model.compile()


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    return (part for part in listed_parts(model) if any(True for _ in part.children()))


def listed_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the elements of the module lists of the model or, if its blocks are further
    down, of its `block_holders`."""
    for holder in getattr(model, "block_holders", [model]):
        for child in holder.children():
            if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                yield from child.children()


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    costs = compat_torch.name_of(operation) in _COSTLY
    return CheckpointPolicy.MUST_SAVE if costs else CheckpointPolicy.PREFER_RECOMPUTE
