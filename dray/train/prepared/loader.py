"""The loader of a prepared script, which yields this rank's shares, starting with the job's current
batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from dray.train.prepared.anchor import LoaderPosition
from dray.train.prepared.batches import BatchPlan, RemainingShares, SeededDataset
from dray.train.prepared.session import TrainingSession


class PreparedLoader:
    """Iterates like the `DataLoader` that it was made from, one epoch at a time.

    Epochs that the job has completed are empty, so a restarted script reaches the job's current
    batch immediately.
    """

    def __init__(self, loader: DataLoader[Any], session: TrainingSession) -> None:
        self._loader = loader
        self._session = session
        self._plan = BatchPlan(loader, session.seed)
        self._next_epoch = 0

    @property
    def dataset(self) -> Any:
        return self._loader.dataset

    @property
    def batch_size(self) -> int | None:
        """Number of samples in a global batch."""
        return self._loader.batch_size

    def __len__(self) -> int:
        """Number of global batches in an epoch."""
        return self._plan.num_batches(self._session.position.epoch)

    def skip_to(self, epoch: int) -> None:
        """Make the next iteration over the loader yield the batches of this epoch."""
        self._next_epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        epoch = self._next_epoch
        self._next_epoch += 1
        session = self._session
        if epoch < session.position.epoch:
            session.is_skipping = True
            return
        position = session.position
        if epoch > position.epoch:
            position = LoaderPosition(epoch, 0)
        samples: Iterator[Any] | None = None
        shared_as: tuple[int, int] | None = None
        while True:
            session.at_batch(position)
            if session.is_over or position.batch >= self._plan.num_batches(epoch):
                session.ended_epoch()
                return
            shard = session.shard
            if samples is None or shared_as != shard:
                samples, shared_as = self._samples_from(position, shard), shard
            batch = next(samples)
            share = self._plan.share(epoch, position.batch, *shard)
            if session.needs_even_shares and share.num_global % shard[1]:
                raise ValueError(
                    f"a batch has {share.num_global} samples, but a sharded model needs equal "
                    f"shares for {shard[1]} ranks: make batch_size a multiple of {shard[1]}, and "
                    "set drop_last=True"
                )
            session.began_batch(share.num_counted, share.num_global)
            yield batch
            if session.is_void:
                position, samples = session.redo(), None
            else:
                position = LoaderPosition(epoch, position.batch + 1)

    def _samples_from(self, position: LoaderPosition, shard: tuple[int, int]) -> Iterator[Any]:
        loader = self._loader
        shares = RemainingShares(
            self._plan, self._session.seed, position.epoch, position.batch, *shard
        )
        options: dict[str, Any] = {}
        if loader.num_workers:
            options["multiprocessing_context"] = loader.multiprocessing_context
            options["prefetch_factor"] = loader.prefetch_factor
        return iter(
            DataLoader(
                SeededDataset(loader.dataset),
                batch_sampler=shares,
                num_workers=loader.num_workers,
                collate_fn=loader.collate_fn,
                pin_memory=loader.pin_memory,
                timeout=loader.timeout,
                worker_init_fn=loader.worker_init_fn,
                **options,
            )
        )
