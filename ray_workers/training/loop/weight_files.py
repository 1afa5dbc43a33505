"""The files with the weights of a divided model, which are written without gathering the model.

The tensors are divided among files in the order of the model, so that each file contains complete
tensors, as Hugging Face's libraries expect. Each file is written by one rank. In each of several
rounds, each rank sends its pieces of the next rows of every file to the ranks that write these
files.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from dray import train
from dray.train import storage_faults
from ray_workers.recipes.results import WEIGHTS
from ray_workers.training.checkpoint import safetensors_layout
from ray_workers.training.checkpoint.safetensors_layout import Layout
from ray_workers.training.core.faultpoints import FaultPoint, faultpoint
from ray_workers.training.core.workload import StoredWeights
from ray_workers.training.elastic import process_group
from ray_workers.training.parallel import Strategy
from ray_workers.training.parallel.pieces import Piece

FILE_BYTES = 64 << 20
"""The files have on average at least this number of bytes. A smaller model is one file."""
ROUND_BYTES = 16 << 20
"""Maximum number of bytes that all ranks together send in a round, except that at least one row of
each file is sent."""


class WeightBlock(NamedTuple):
    """The position of a piece in a tensor of at least one dimension."""

    dtype: torch.dtype
    offsets: Sequence[int]
    """Index of the first element of the piece in the tensor, per dimension."""
    shape: Sequence[int]
    whole: Sequence[int]
    """Shape of the whole tensor."""

    @classmethod
    def of(cls, piece: Piece, tensor: Tensor) -> Self:
        """Return the position without leading dimensions of size 1, so that the tensor has as many
        rows as possible."""
        num_left_out = 0
        while num_left_out < len(piece.whole) - 1 and piece.whole[num_left_out] == 1:
            num_left_out += 1
        sizes = (piece.offsets, tensor.shape, piece.whole)
        offsets, shape, whole = (tuple(each[num_left_out:]) for each in sizes)
        return cls(tensor.dtype, offsets or (0,), shape or (1,), whole or (1,))

    @property
    def row_bytes(self) -> int:
        """Size of a row of the whole tensor."""
        return self.dtype.itemsize * math.prod(self.whole[1:])

    def overlap(self, rows: Rows) -> range:
        """Return the rows that are in this piece."""
        first = self.offsets[0]
        return range(max(rows.start, first), min(rows.stop, first + self.shape[0]))


class Rows(NamedTuple):
    """Consecutive rows of a tensor."""

    name: str
    start: int
    stop: int


Round = Sequence[Rows]
"""The rows of a file that are sent in a round."""


@dataclass(frozen=True)
class WeightFile:
    """A file with some of the tensors."""

    name: str
    rank: int
    """The rank that writes the file."""
    tensors: Sequence[str]
    rounds: Sequence[Round]


@dataclass(frozen=True)
class Plan:
    """How the ranks write the files. The plan is the same on all ranks."""

    files: Sequence[WeightFile]
    blocks: Sequence[Mapping[str, WeightBlock]]
    """The pieces that each rank sends, indexed by rank."""
    shapes: Mapping[str, tuple[torch.dtype, torch.Size]]

    @classmethod
    def of(
        cls,
        pieces: Mapping[str, Piece],
        whole: Mapping[str, Tensor],
        *,
        max_files: int,
        world_size: int,
    ) -> Self:
        """Plan with the other ranks. A collective. pieces: the pieces that this rank has. whole:
        the shapes of all tensors, in the order of the model. Raises ValueError if the pieces of the
        ranks do not make up the whole model."""
        own = {
            name: WeightBlock.of(piece, piece.tensor)
            for name, piece in pieces.items()
            if piece.tensor is not None and piece.tensor.numel()
        }
        blocks = process_group.gathered(own, world_size)
        first: dict[str, WeightBlock] = {}
        for name, tensor in whole.items():
            found = [each[name] for each in blocks if name in each]
            if len({(one.dtype, one.whole) for one in found}) > 1 or tensor.numel() != sum(
                math.prod(one.shape) for one in found
            ):
                raise ValueError(
                    f"the parts of {name} on all ranks do not contain each element exactly once"
                )
            if found:
                first[name] = found[0]
        shapes = {
            name: (first[name].dtype if name in first else tensor.dtype, tensor.shape)
            for name, tensor in whole.items()
        }
        sizes = {name: dtype.itemsize * math.prod(shape) for name, (dtype, shape) in shapes.items()}
        groups = divided(sizes, max_files)
        num_bytes = ROUND_BYTES // len(groups)
        files = [
            WeightFile(
                name=WEIGHTS if len(groups) == 1 else _name(number, len(groups)),
                rank=number * world_size // len(groups),
                tensors=names,
                rounds=_rounds({name: first[name] for name in names if name in first}, num_bytes),
            )
            for number, names in enumerate(groups)
        ]
        return cls(files, blocks, shapes)

    @property
    def num_rounds(self) -> int:
        return max(len(file.rounds) for file in self.files)

    @property
    def stored(self) -> StoredWeights:
        num_bytes = sum(t.itemsize * math.prod(shape) for t, shape in self.shapes.values())
        file_of = {name: file.name for file in self.files for name in file.tensors}
        return StoredWeights(file_of, num_bytes)

    def layout(self, file: WeightFile) -> Layout:
        empty = {}
        for name in file.tensors:
            dtype, shape = self.shapes[name]
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            empty[name] = Piece(tensor, (0,) * tensor.ndim, tensor.shape)
        return safetensors_layout.lay_out(empty)


def divided(sizes: Mapping[str, int], max_files: int) -> list[list[str]]:
    """Divide tensors with these sizes in bytes into consecutive groups of similar total size."""
    total = sum(sizes.values())
    num = max(1, min(max_files, total // FILE_BYTES))
    groups: list[list[str]] = [[] for _ in range(num)]
    start = 0
    for name, size in sizes.items():
        middle = (start + size / 2) / max(total, 1)
        groups[min(int(middle * num), num - 1)].append(name)
        start += size
    return [group for group in groups if group] or [[]]


def _name(number: int, num_files: int) -> str:
    return f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"


def _rounds(blocks: Mapping[str, WeightBlock], num_bytes: int) -> list[Round]:
    """Divide the rows of a file's tensors into rounds of at most `num_bytes`, or of a single row if
    the row is larger."""
    rounds: list[list[Rows]] = [[]]
    left = num_bytes
    for name, block in blocks.items():
        start = 0
        while start < block.whole[0]:
            if left < block.row_bytes and rounds[-1]:
                rounds.append([])
                left = num_bytes
            stop = min(block.whole[0], start + max(1, left // block.row_bytes))
            rounds[-1].append(Rows(name, start, stop))
            left -= (stop - start) * block.row_bytes
            start = stop
    return list(rounds)


def store(strategy: Strategy, max_files: int, *, waiting: Callable[[], None]) -> StoredWeights:
    """Store the weights of a divided model as artifacts of the job, in at most `max_files` files,
    and wait until all ranks have stored their files. A collective.

    If a rank's disk or the storage is full, all ranks wait for free space. `waiting` is called
    regularly, so that the rank is not considered hung.
    """
    dtypes = strategy.given.workload.result_dtypes
    pieces = {
        name: piece._replace(tensor=piece.tensor.to(dtypes.get(name, piece.tensor.dtype)))
        if piece.tensor is not None
        else piece
        for name, piece in strategy.trained_pieces().items()
    }
    rank, world_size = strategy.rank, strategy.world_size
    plan = Plan.of(pieces, strategy.whole(), max_files=max_files, world_size=world_size)
    with TemporaryDirectory(prefix="dray-result-") as folder:
        exchange = Exchange(plan, pieces, rank, strategy.device, waiting)
        write = functools.partial(exchange.write, Path(folder))
        storage_faults.wait_for_space("the result", write, waiting=waiting)

        def copy() -> None:
            for path in Path(folder).iterdir():
                train.store_artifact(path)

        storage_faults.wait_for_space("the result", copy, waiting=waiting)
    faultpoint(FaultPoint.WEIGHTS_STORED)
    process_group.wait_for_all(strategy.device, world_size)
    return plan.stored


class Exchange:
    """This rank's part in writing the files."""

    def __init__(
        self,
        plan: Plan,
        pieces: Mapping[str, Piece],
        rank: int,
        device: torch.device,
        waiting: Callable[[], None],
    ) -> None:
        self._plan, self._rank, self._waiting = plan, rank, waiting
        self._blocks = plan.blocks[rank]
        self._tensors = {
            name: piece.tensor.view(*self._blocks[name].shape)
            for name, piece in pieces.items()
            if piece.tensor is not None and name in self._blocks
        }
        # gloo exchanges only tensors on the CPU
        self._device = device if dist.get_backend() != "gloo" else torch.device("cpu")
        self._own = next((file for file in plan.files if file.rank == rank), None)

    def write(self, folder: Path) -> None:
        """Write this rank's file to the folder. A collective. After a storage fault on any rank,
        all ranks raise an error."""
        fault: Exception | None = None
        writer: FileWriter | None = None
        try:
            if self._own is not None:
                writer = FileWriter(folder / self._own.name, self._plan, self._own)
        except OSError as error:
            fault = error
        for number in range(self._plan.num_rounds):
            received = self._exchanged(number)
            self._waiting()
            try:  # after an error, this rank still has to send its pieces
                if writer is not None and fault is None:
                    writer.write(number, received)
            except OSError as error:
                fault = error
        try:
            if writer is not None:
                writer.close()
        except OSError as error:
            fault = fault or error
        text = None if fault is None else f"rank {self._rank}: {fault}"
        faults = process_group.gathered(text, len(self._plan.blocks))
        if fault is not None:
            raise fault
        for text in faults:
            if text is not None:
                raise storage_faults.StorageError(text)

    def _exchanged(self, number: int) -> Sequence[Tensor]:
        """Send the pieces of a round, and return what each rank sent to this rank, as bytes in host
        memory."""
        num_ranks = len(self._plan.blocks)
        parts: list[Tensor] = []
        sent = [0] * num_ranks
        for file in self._plan.files:
            for rows in _round_of(file, number):
                if (block := self._blocks.get(rows.name)) and (found := block.overlap(rows)):
                    own = self._tensors[rows.name]
                    part = own.narrow(0, found.start - block.offsets[0], len(found))
                    parts.append(part.reshape(-1).view(torch.uint8).to(self._device))
                    sent[file.rank] += parts[-1].numel()
        mine = () if self._own is None else _round_of(self._own, number)
        got = [
            sum(_num_bytes(blocks[rows.name], rows) for rows in mine if rows.name in blocks)
            for blocks in self._plan.blocks
        ]
        empty = torch.empty(sum(got), dtype=torch.uint8, device=self._device)
        flat = torch.cat(parts) if parts else empty.new_empty(0)
        del parts
        dist.all_to_all_single(empty, flat, output_split_sizes=got, input_split_sizes=sent)
        return torch.split(empty.cpu(), got)


def _round_of(file: WeightFile, number: int) -> Round:
    return file.rounds[number] if number < len(file.rounds) else ()


def _num_bytes(block: WeightBlock, rows: Rows) -> int:
    return len(block.overlap(rows)) * block.dtype.itemsize * math.prod(block.shape[1:])


class FileWriter:
    """Writes one file."""

    def __init__(self, path: Path, plan: Plan, file: WeightFile) -> None:
        layout = plan.layout(file)
        self._starts = {each.name: each.start for each in layout.locations}
        self._plan, self._file = plan, file
        self._target = path.open("wb")
        self._target.write(layout.header)

    def write(self, number: int, received: Sequence[Tensor]) -> None:
        """Write the rows of a round. received: the bytes that each rank sent."""
        for rows, found in self._put_together(_round_of(self._file, number), received):
            content = found.view(-1).view(torch.uint8).numpy()
            row_bytes = content.nbytes // (rows.stop - rows.start)
            self._target.seek(self._starts[rows.name] + rows.start * row_bytes)
            self._target.write(content.data)

    def _put_together(
        self, wanted: Round, received: Sequence[Tensor]
    ) -> Iterator[tuple[Rows, Tensor]]:
        ends = [0] * len(received)
        for rows in wanted:
            holders = [
                (rank, blocks[rows.name])
                for rank, blocks in enumerate(self._plan.blocks)
                if rows.name in blocks and blocks[rows.name].overlap(rows)
            ]
            _, any_block = holders[0]
            shape = (rows.stop - rows.start, *any_block.whole[1:])
            whole = torch.empty(shape, dtype=any_block.dtype)
            for rank, block in holders:
                start, found = ends[rank], block.overlap(rows)
                ends[rank] += _num_bytes(block, rows)
                # A clone begins at an address that is a multiple of the type's size.
                part = received[rank][start : ends[rank]].clone().view(block.dtype)
                target = whole.narrow(0, found.start - rows.start, len(found))
                for dim in range(1, whole.ndim):
                    target = target.narrow(dim, block.offsets[dim], block.shape[dim])
                target.copy_(part.view(target.shape))
            yield rows, whole

    def close(self) -> None:
        self._target.close()
