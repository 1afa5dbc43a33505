"""The network for tables, with standardised numbers and an embedding for each category."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dray import spec
from ray_workers.recipes.models.images import hidden_layers

MAX_EMBEDDING = 50
UNKNOWN = 0
"""Code for all categories that did not occur in training. The codes of known categories start at
1."""


class TableModel(nn.Module):
    """(N, num_numeric + num_categorical) -> (N, num_outputs).

    The first columns are the table's numbers, and the last columns are codes of categories, which
    float32 represents exactly up to 2**24. The mean and deviation of the numbers and, in a
    regression, of the target are stored in buffers, so that the trained model accepts raw rows. If
    values can be missing (NaN), their replacements are also stored in a buffer.

    If the numbers of a table are large and close together, the model has `offsets`. With offsets,
    the rows are float64, the offsets are subtracted in float64, and all other buffers apply to the
    result of the subtraction.
    """

    mean: Tensor
    deviation: Tensor
    target_mean: Tensor
    target_deviation: Tensor
    fill: Tensor | None
    offset_bits: Tensor | None

    def __init__(
        self,
        num_numeric: int,
        num_categorical: int,
        *,
        fills: bool = False,
        indicated: Sequence[int] = (),
        has_offsets: bool = False,
    ) -> None:
        """`indicated` contains the indices of the numeric columns that have an additional 0/1 input
        for missing values."""
        super().__init__()
        self.num_numeric = num_numeric
        self.indicated = list(indicated)
        # Create buffers on the CPU even if the parameters are still on the meta device.
        self.register_buffer("mean", torch.zeros(num_numeric, device="cpu"))
        self.register_buffer("deviation", torch.ones(num_numeric, device="cpu"))
        self.register_buffer("target_mean", torch.zeros((), device="cpu"))
        self.register_buffer("target_deviation", torch.ones((), device="cpu"))
        fill = torch.zeros(num_numeric + num_categorical, device="cpu") if fills else None
        self.register_buffer("fill", fill)
        # Store the float64 bits as integers, since strategies don't average or round integer
        # buffers. The last element is the offset of the target.
        bits = torch.zeros(num_numeric + 1, dtype=torch.int64, device="cpu")
        self.register_buffer("offset_bits", bits if has_offsets else None)

    @property
    def offsets(self) -> Tensor | None:
        """Offsets of the numbers and the target, float64 (num_numeric + 1,); None if all are 0."""
        return None if self.offset_bits is None else self.offset_bits.view(torch.float64)

    def forward(self, rows: Tensor) -> Tensor:
        """Compute the outputs. The outputs of a regression are in units of the target's standard
        deviation; `in_units` converts them."""
        is_missing, count = rows.isnan(), self.num_numeric
        numbers = self.standardised(rows[:, :count])
        codes = rows[:, count:].to(self.mean.dtype)
        if self.fill is not None:
            codes = torch.where(is_missing[:, count:], self.fill[count:], codes)
        marks = (
            is_missing[:, self.indicated].to(numbers.dtype) if self.indicated else numbers[:, :0]
        )
        # In half precision, a target of 70,000 would become infinite, and a target of 2,049 would
        # be rounded.
        return self.outputs_of(numbers, codes, marks).to(self.mean.dtype)

    def standardised(self, numbers: Tensor) -> Tensor:
        """Standardise the numeric columns: (N, num_numeric) -> float32."""
        if self.offsets is not None:
            numbers = numbers.double() - self.offsets[:-1]
        near = numbers.to(self.mean.dtype)
        if self.fill is not None:
            near = torch.where(numbers.isnan(), self.fill[: self.num_numeric], near)
        return (near - self.mean) / self.deviation

    def in_units(self, outputs: Tensor) -> Tensor:
        """Convert a regression's outputs to float64 in the target's unit."""
        found = outputs.double() * self.target_deviation.double() + self.target_mean.double()
        return found if self.offsets is None else found + self.offsets[-1]

    def outputs_of(self, numbers: Tensor, codes: Tensor, marks: Tensor) -> Tensor:
        """Map (N, num_numeric) standardised numbers, (N, num_categorical) codes and (N,
        len(indicated)) indicators of missing values to (N, num_outputs), in units of the target's
        standard deviation."""
        raise NotImplementedError


class TableMlp(TableModel):
    """A perceptron whose inputs are the numbers and a learned vector for each category."""

    def __init__(
        self,
        options: spec.Mlp,
        num_numeric: int,
        vocabulary_sizes: Sequence[int],
        num_outputs: int,
        *,
        fills: bool = False,
        indicated: Sequence[int] = (),
        has_offsets: bool = False,
    ) -> None:
        super().__init__(
            *(num_numeric, len(vocabulary_sizes)),
            fills=fills,
            indicated=indicated,
            has_offsets=has_offsets,
        )
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
    """A user's own network with (N, num_numeric + num_categorical + len(indicated)) features: the
    standardised numbers, the codes of the categories and the indicators of missing values."""

    def __init__(
        self,
        network: nn.Module,
        num_numeric: int,
        num_categorical: int,
        *,
        fills: bool = False,
        indicated: Sequence[int] = (),
        has_offsets: bool = False,
    ) -> None:
        super().__init__(
            *(num_numeric, num_categorical),
            fills=fills,
            indicated=indicated,
            has_offsets=has_offsets,
        )
        self.network = network

    def outputs_of(self, numbers: Tensor, codes: Tensor, marks: Tensor) -> Tensor:
        outputs: Tensor = self.network(torch.cat([numbers, codes, marks], dim=1))
        return outputs


class ExportedTable(nn.Module):
    """A trained table model for export. The offsets are stored as float64 numbers instead of bits,
    since only torch's own format can reinterpret bits as numbers."""

    offsets: Tensor | None

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        (table,) = (one for one in self.model.modules() if isinstance(one, TableModel))
        self.num_numeric, offsets = table.num_numeric, table.offsets
        table.offset_bits = None
        self.register_buffer("offsets", offsets)
        self.dtype = torch.float32
        """Type of the rows."""
        if offsets is not None and _rounds(offsets, table):
            self.dtype = torch.float64

    def forward(self, rows: Tensor) -> Tensor:
        if self.offsets is None:
            outputs = self.model(rows)
        else:
            rows = rows.double()
            numbers = rows[:, : self.num_numeric] - self.offsets[:-1]
            outputs = self.model(torch.cat([numbers, rows[:, self.num_numeric :]], dim=1))
            if outputs.ndim == 1:
                outputs = outputs + self.offsets[-1]
        found: Tensor = outputs.to(self.dtype)
        return found


def _rounds(offsets: Tensor, table: TableModel) -> bool:
    """Whether float32 rounds numbers of this size by more than 1/10,000 of the standard
    deviation."""
    deviations = torch.cat([table.deviation, table.target_deviation[None]]).double()
    return bool((offsets.abs() * 2.0**-24 > 1e-4 * deviations).any())


def _embedding_dim(vocabulary_size: int) -> int:
    return min(MAX_EMBEDDING, vocabulary_size // 2 + 1)
