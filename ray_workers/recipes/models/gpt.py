"""A decoder-only transformer: pre-norm blocks of causal attention and a two-layer perceptron, as in
GPT-2 (Radford et al. 2019), with rotary positions (Su et al. 2021, arXiv:2104.09864): what a token
sees depends on how far away it is, not on where in its sample both are."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dray import spec

INIT_STD = 0.02
ROTARY_BASE = 10_000.0


class Gpt(nn.Module):
    """(N, T) token ids -> (N, T, vocabulary_size) logits of each next token; T up to
    `context_length`."""

    def __init__(self, options: spec.Gpt, vocabulary_size: int) -> None:
        super().__init__()
        self.head_size = options.width // options.num_heads
        self.tokens = nn.Embedding(vocabulary_size, options.width)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.num_layers))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, vocabulary_size, bias=False)
        self._initialise(options.num_layers)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.dropout(self.tokens(ids))
        turns = rotations(ids.shape[1], self.head_size, ids.device)
        for block in self.blocks:
            hidden = block(hidden, turns)
        return cast(Tensor, self.head(self.norm(hidden)))

    def _initialise(self, num_layers: int) -> None:
        """Small normal weights; what is added to the residual stream shrinks with its length."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            is_last = name.endswith(("attention.out.weight", "perceptron.2.weight"))
            std = INIT_STD / math.sqrt(2 * num_layers) if is_last else INIT_STD
            nn.init.normal_(parameter, std=std)


class Block(nn.Module):
    """Attention, then a perceptron, each added to what came in."""

    def __init__(self, options: spec.Gpt) -> None:
        super().__init__()
        width = options.width
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(options)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
            nn.Dropout(options.dropout),
        )

    def forward(self, hidden: Tensor, turns: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), turns)
        return hidden + cast(Tensor, self.perceptron(self.perceptron_norm(hidden)))


class Attention(nn.Module):
    """Each token attends to itself and those before it."""

    def __init__(self, options: spec.Gpt) -> None:
        super().__init__()
        self.num_heads = options.num_heads
        self.dropout = options.dropout
        self.qkv = nn.Linear(options.width, 3 * options.width)
        self.out = nn.Linear(options.width, options.width)

    def forward(self, hidden: Tensor, turns: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        heads = self.qkv(hidden).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)  # each (N, heads, T, width / heads)
        dropout = self.dropout if self.training else 0.0
        query, key = rotate(query, turns), rotate(key, turns)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        joined = mixed.transpose(1, 2).reshape(batch, length, width)
        return F.dropout(self.out(joined), self.dropout, self.training)


def rotations(length: int, head_size: int, device: torch.device) -> Tensor:
    """(2, length, head_size / 2): cosine and sine of the angle by which each pair of a head's
    numbers is turned at each place."""
    speeds = ROTARY_BASE ** (-torch.arange(0, head_size, 2, device=device) / head_size)
    angles = torch.outer(torch.arange(length, device=device), speeds)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(vectors: Tensor, turns: Tensor) -> Tensor:
    """(N, heads, T, head_size) -> the same, number i and i + head_size / 2 being a pair."""
    cosine, sine = turns.to(vectors.dtype)
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
