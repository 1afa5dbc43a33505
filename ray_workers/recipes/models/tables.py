"""The network for tables: standardised numbers and an embedding for each category."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dray import spec
from ray_workers.recipes.models.images import hidden_layers

MAX_EMBEDDING = 50
UNKNOWN = 0
"""Code of a category that training did not see; those it saw count from 1."""


class TableModel(nn.Module):
    """(N, num_numeric + num_categorical) -> (N, num_outputs).

    The first columns are numbers as they are in the table; the last are codes of categories, which
    float32 holds exactly up to 2**24. Mean and deviation of the numbers are buffers, so that the
    trained model takes raw rows; for a regression those of the target are too. So is what stands in
    for NaN, a value that is missing, where the table may have some.
    """

    mean: Tensor
    deviation: Tensor
    target_mean: Tensor
    target_deviation: Tensor
    fill: Tensor | None

    def __init__(
        self,
        num_numeric: int,
        num_categorical: int,
        *,
        fills: bool = False,
        indicated: Sequence[int] = (),
    ) -> None:
        """indicated: the numbers of the numeric columns that have a 0/1 input besides, which says
        where they are missing."""
        super().__init__()
        self.num_numeric = num_numeric
        self.indicated = list(indicated)
        # Numbers also where the parameters have none yet.
        self.register_buffer("mean", torch.zeros(num_numeric, device="cpu"))
        self.register_buffer("deviation", torch.ones(num_numeric, device="cpu"))
        self.register_buffer("target_mean", torch.zeros((), device="cpu"))
        self.register_buffer("target_deviation", torch.ones((), device="cpu"))
        fill = torch.zeros(num_numeric + num_categorical, device="cpu") if fills else None
        self.register_buffer("fill", fill)

    def forward(self, rows: Tensor) -> Tensor:
        is_missing = rows.isnan()
        if self.fill is not None:
            rows = torch.where(is_missing, self.fill, rows)
        numbers = (rows[:, : self.num_numeric] - self.mean) / self.deviation
        marks = (
            is_missing[:, self.indicated].to(numbers.dtype) if self.indicated else numbers[:, :0]
        )
        outputs = self.outputs_of(numbers, rows[:, self.num_numeric :], marks)
        # In half precision a target of 70,000 would be infinite, and one of 2,049 be rounded.
        return outputs.to(self.target_mean.dtype) * self.target_deviation + self.target_mean

    def outputs_of(self, numbers: Tensor, codes: Tensor, marks: Tensor) -> Tensor:
        """(N, num_numeric) standardised numbers, (N, num_categorical) codes and (N, len(indicated))
        marks of missing values -> (N, num_outputs), in units of the target's deviation."""
        raise NotImplementedError


class TableMlp(TableModel):
    """A perceptron on the numbers and on a learned vector for each category."""

    def __init__(
        self,
        options: spec.Mlp,
        num_numeric: int,
        vocabulary_sizes: Sequence[int],
        num_outputs: int,
        *,
        fills: bool = False,
        indicated: Sequence[int] = (),
    ) -> None:
        super().__init__(num_numeric, len(vocabulary_sizes), fills=fills, indicated=indicated)
        sizes = [options.embedding_dim or _embedding_dim(size) for size in vocabulary_sizes]
        self.embeddings = nn.ModuleList(
            nn.Embedding(vocabulary + 1, size)
            for vocabulary, size in zip(vocabulary_sizes, sizes, strict=True)
        )
        num_inputs = num_numeric + sum(sizes) + len(self.indicated)
        self.body = nn.Sequential(*hidden_layers(options, num_inputs))
        self.head = nn.Linear(options.width, num_outputs)

    def outputs_of(self, numbers: Tensor, codes: Tensor, marks: Tensor) -> Tensor:
        numbered = codes.long()
        vectors = [embed(numbered[:, at]) for at, embed in enumerate(self.embeddings)]
        outputs: Tensor = self.head(self.body(torch.cat([numbers, *vectors, marks], dim=1)))
        return outputs


class OwnTableModel(TableModel):
    """A network of the user's own on (N, num_numeric + num_categorical + len(indicated)) features:
    the standardised numbers, the codes of the categories and the marks."""

    def __init__(
        self,
        network: nn.Module,
        num_numeric: int,
        num_categorical: int,
        *,
        fills: bool = False,
        indicated: Sequence[int] = (),
    ) -> None:
        super().__init__(num_numeric, num_categorical, fills=fills, indicated=indicated)
        self.network = network

    def outputs_of(self, numbers: Tensor, codes: Tensor, marks: Tensor) -> Tensor:
        outputs: Tensor = self.network(torch.cat([numbers, codes, marks], dim=1))
        return outputs


def _embedding_dim(vocabulary_size: int) -> int:
    return min(MAX_EMBEDDING, vocabulary_size // 2 + 1)
