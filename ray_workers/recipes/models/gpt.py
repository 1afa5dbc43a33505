"""A decoder-only transformer: pre-norm blocks of causal attention and a two-layer perceptron, as in
GPT-2 (Radford et al. 2019), with rotary position embeddings (Su et al. 2021, arXiv:2104.09864), so
that attention depends on the distance between tokens rather than on their positions in the
sample."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F  # noqa: N812

from dray import spec
from ray_workers.training.data.sampler import share
from ray_workers.training.parallel.model_parallel.device_mesh import Context

INIT_STD = 0.02
ROTARY_BASE = 10_000.0


class Gpt(nn.Module):
    """(N, T) token ids -> (N, T, vocabulary_size) logits for the next token at each position, for T
    up to `context_length`.

    The model can be partitioned in three ways, in any combination: its layers into stages, which
    exchange tensors of shape (N, T, width); its matrices by rows or columns; and its samples by
    positions.
    """

    def __init__(self, options: spec.Gpt, vocabulary_size: int) -> None:
        super().__init__()
        self.head_size = options.width // options.num_heads
        self.tokens: nn.Embedding | None = Tokens(vocabulary_size, options.width)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleDict({str(n): Block(options) for n in range(options.num_layers)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(options.width)
        self.head: Linear | None = Linear(options.width, vocabulary_size, bias=False)
        self.num_sequence_parts = 1
        """Number of ranks in a tensor group. Outside of the blocks, each of these ranks holds a
        part of the positions."""
        self.context: Context | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, length = inputs, inputs.shape[1]
        if self.tokens is not None:
            hidden = self.dropout(self.tokens(inputs))
        else:
            length *= self.num_sequence_parts
        first = 0 if self.context is None else self.context.rank * length
        angles = rotations(first, length, self.head_size, inputs.device)
        for block in self.blocks.values():
            hidden = block(hidden, angles)
        if self.head is None or self.norm is None:
            return hidden
        return cast(Tensor, self.head(self.norm(hidden)))

    def keep_stage(self, stage: int, num_stages: int) -> None:
        """Remove the layers of other stages. The first stage keeps the embedding, and the last
        stage keeps the head."""
        start, stop = share(len(self.blocks), stage, num_stages)
        for number in range(len(self.blocks)):
            if not start <= number < stop:
                del self.blocks[str(number)]
        if stage > 0:
            self.tokens = None
        if stage < num_stages - 1:
            self.norm = self.head = None

    def divide_sequence(self, context: Context) -> None:
        self.context = context
        for block in self.blocks.values():
            cast(Block, block).attention.context = context

    def divide_matrices(self, mesh: DeviceMesh) -> None:
        """Shard the matrices as in Megatron (Shoeybi et al. 2019, arXiv:1909.08053). Parallelize
        the layers between the matrices along the sequence (sequence parallelism, Korthikanti et al.
        2022, arXiv:2205.05198)."""
        self.num_sequence_parts = mesh.size()
        sharded, replicated = Shard(1), Replicate()
        plan: dict[str, ParallelStyle] = {}
        if self.tokens is not None:
            plan["tokens"] = RowwiseParallel(input_layouts=replicated, output_layouts=sharded)
        if self.head is not None:
            plan["norm"] = _by_sequence()
            plan["head"] = ColwiseParallel(input_layouts=sharded, output_layouts=replicated)
        for number in self.blocks:
            of_block: dict[str, ParallelStyle] = {
                "attention_norm": _by_sequence(),
                "attention": _gathered(1),
                "attention.qkv": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=sharded),
                "perceptron_norm": _by_sequence(),
                "perceptron": _gathered(0),
                "perceptron.0": ColwiseParallel(),
                "perceptron.2": RowwiseParallel(output_layouts=sharded),
            }
            plan |= {f"blocks.{number}.{name}": style for name, style in of_block.items()}
        parallelize_module(self, mesh, plan)


def _gathered(num_others: int) -> PrepareModuleInput:
    """Gather all positions of the first input, which is sharded, and leave the other inputs
    unchanged."""
    others = (None,) * num_others
    return PrepareModuleInput(
        input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others)
    )


def _by_sequence() -> SequenceParallel:
    return SequenceParallel(use_local_output=True)


class Linear(nn.Linear):
    """A linear layer with small, normally distributed initial weights and an initial bias of
    zero."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, std: float = INIT_STD):
        self.std = std
        super().__init__(inputs, outputs, bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Tokens(nn.Embedding):
    """An embedding with small, normally distributed initial weights."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class Block(nn.Module):
    """Attention, then a perceptron, each added to its input."""

    def __init__(self, options: spec.Gpt) -> None:
        super().__init__()
        width = options.width
        # The deeper the model, the less each block initially adds to the residual stream.
        last_std = INIT_STD / math.sqrt(2 * options.num_layers)
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(options, last_std)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            Linear(4 * width, width, std=last_std),
            nn.Dropout(options.dropout),
        )

    def forward(self, hidden: Tensor, angles: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), angles)
        return hidden + cast(Tensor, self.perceptron(self.perceptron_norm(hidden)))


class Attention(nn.Module):
    """Each token attends to itself and to earlier tokens."""

    def __init__(self, options: spec.Gpt, last_std: float) -> None:
        super().__init__()
        self.head_size = options.width // options.num_heads
        self.dropout = options.dropout
        # The query, key and value rows of a head are adjacent, so that a contiguous slice of the
        # rows contains complete heads.
        self.qkv = Linear(options.width, 3 * options.width)
        self.out = Linear(options.width, options.width, std=last_std)
        self.context: Context | None = None

    def forward(self, hidden: Tensor, angles: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        heads = self.qkv(hidden).view(batch, length, -1, 3, self.head_size).permute(3, 0, 2, 1, 4)
        query, key, value = heads.unbind(0)  # each (N, heads, T, head_size)
        dropout = self.dropout if self.training else 0.0
        query, key = rotate(query, angles), rotate(key, angles)
        if self.context is not None:
            query, key, value = map(self.context.to_heads, (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        if self.context is not None:
            mixed = self.context.to_sequence(mixed)
        joined = mixed.transpose(1, 2).reshape(batch, length, -1)
        return F.dropout(self.out(joined), self.dropout, self.training)


def rotations(first: int, length: int, head_size: int, device: torch.device) -> Tensor:
    """Return (2, length, head_size / 2): the cosines and sines of the angles by which each pair of
    numbers of a head is rotated, for `length` positions starting at `first`."""
    speeds = ROTARY_BASE ** (-torch.arange(0, head_size, 2, device=device) / head_size)
    angles = torch.outer(torch.arange(first, first + length, device=device), speeds)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(vectors: Tensor, angles: Tensor) -> Tensor:
    """Rotate vectors: (N, heads, T, head_size) -> the same shape. Numbers i and i + head_size / 2
    form a pair."""
    cosine, sine = angles.to(vectors.dtype)
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
