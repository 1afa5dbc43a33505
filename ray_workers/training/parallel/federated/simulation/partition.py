"""Divides the samples among clients. The result depends only on the labels and the seed, so it is
the same on every rank.

Training and validation samples are divided in the same proportions: a client with half of a class's
training samples also has half of its validation samples.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dray.spec.federated.parts import Partition
from ray_workers.training.core.errors import DataError
from ray_workers.training.data.device_dataset import Samples
from ray_workers.training.data.sampler import derive_seed
from ray_workers.training.parallel.strategy import Numbers

Shares = npt.NDArray[np.float64]
"""An array (classes, clients) with the fraction of each class that each client has. Each row sums
to 1."""


@dataclass(frozen=True)
class ClientSamples:
    """The indices of each client's samples, with one array for each client."""

    train: Sequence[Numbers]
    """No client's array is empty."""
    validation: Sequence[Numbers]


def divide(
    options: Partition, num_clients: int, train: Samples, validation: Samples, seed: int
) -> ClientSamples:
    """Assign each sample to one client. Raises DataError if there are too few samples."""
    if len(train) < num_clients:
        raise DataError(
            f"federated.clients is {num_clients}, but there are only {len(train)} training "
            "samples: each client needs at least one"
        )
    generator = np.random.default_rng(derive_seed("clients", seed))
    if options.by == "iid":
        shares = np.full((1, num_clients), 1 / num_clients)
        classes = [np.zeros(len(split), dtype=np.int64) for split in (train, validation)]
    else:
        assert train.labels is not None
        assert validation.labels is not None
        classes = [train.labels, validation.labels]
        num_classes = 1 + int(max(labels.max() for labels in classes))
        if options.by == "dirichlet":
            shares = generator.dirichlet(np.full(num_clients, options.alpha), num_classes)
            shares = _without_nan(shares, generator)
        elif options.by == "dirichlet_per_client":
            sizes = np.bincount(train.labels, minlength=num_classes)
            shares = _of_equal_clients(options.alpha, num_clients, sizes, generator)
        else:
            shares = _of_few_classes(options.classes_per_client, num_clients, num_classes)
            shares = shares[:, generator.permutation(num_clients)]
    owners = [_owners(labels, shares, generator) for labels in classes]
    may_have = shares > 0.0 if options.by == "classes" else np.full(shares.shape, True)
    _give_each_one(owners[0], classes[0], may_have)
    return ClientSamples(*(_by_client(one, num_clients) for one in owners))


def _without_nan(shares: Shares, generator: np.random.Generator) -> Shares:
    """Assign a whole class to one client if all draws for the class are 0, which happens if the
    concentration is small."""
    for row in shares:
        if not np.isfinite(row).all() or row.sum() == 0.0:
            row[:] = 0.0
            row[generator.integers(len(row))] = 1.0
    return shares


def _of_equal_clients(
    alpha: float, num_clients: int, sizes: Numbers, generator: np.random.Generator
) -> Shares:
    """Draw each client's class proportions from a Dirichlet distribution around the proportions in
    the data, and then give all clients the same number of samples, from classes that have samples
    left.

    sizes: the number of samples of each class.
    """
    num_classes, present = len(sizes), np.flatnonzero(sizes)
    wanted = np.zeros((num_clients, num_classes))
    drawn = generator.dirichlet(alpha * sizes[present] / sizes.sum(), num_clients)
    wanted[:, present] = _without_nan(drawn, generator)
    counts = np.zeros((num_classes, num_clients), dtype=np.int64)
    left = sizes.copy()
    for index, client in enumerate(generator.permutation(num_clients)):
        missing = sizes.sum() // num_clients + (index < sizes.sum() % num_clients)
        while missing:
            weights = np.where(left > 0, wanted[client], 0.0)
            if not weights.sum() > 0.0:  # all samples of the client's classes have been assigned
                weights = left.astype(np.float64)
            found = generator.multinomial(missing, weights / weights.sum())
            found = np.minimum(found, left)
            counts[:, client] += found
            left -= found
            missing -= found.sum()
    # If a class occurs only in the validation data, distribute it equally among the clients.
    shares = np.full(counts.shape, 1 / num_clients)
    shares[present] = counts[present] / sizes[present, None]
    return shares


def _of_few_classes(per_client: int, num_clients: int, num_classes: int) -> Shares:
    """Give each client equal shares of `per_client` classes, so that the numbers of clients of any
    two classes differ by at most one. Raises DataError if a class would have no client."""
    if per_client > num_classes:
        raise DataError(
            f"federated.partition.classes_per_client is {per_client}, but the data have only "
            f"{num_classes} classes"
        )
    if per_client * num_clients < num_classes:
        raise DataError(
            f"federated.partition.classes_per_client is {per_client}, so {num_clients} clients "
            f"can't cover all {num_classes} classes. Increase federated.clients or "
            "classes_per_client"
        )
    has = np.zeros((num_classes, num_clients))
    slots = np.arange(per_client * num_clients)
    has[slots % num_classes, slots // per_client] = 1.0
    has /= has.sum(axis=1, keepdims=True)
    return has


def _owners(labels: Numbers, shares: Shares, generator: np.random.Generator) -> Numbers:
    """Return the client of each sample."""
    owners = np.empty(len(labels), dtype=np.int64)
    for label, row in enumerate(shares):
        members = generator.permutation(np.flatnonzero(labels == label))
        ends = np.rint(np.cumsum(row) * len(members)).astype(np.int64)
        ends[-1] = len(members)
        owners[members] = np.searchsorted(ends, np.arange(len(members)), side="right")
    return owners


def _give_each_one(owners: Numbers, labels: Numbers, may_have: npt.NDArray[np.bool_]) -> None:
    """Give one sample to each client without samples, from a class that the client may have. The
    sample is taken from the client with the most samples of that class. Modifies `owners`.
    may_have: (classes, clients)."""
    num_classes, num_clients = may_have.shape
    sizes = np.bincount(owners, minlength=num_clients)
    order = np.lexsort((owners, labels))  # by class, then by client
    whole = labels[order] * num_clients + owners[order]
    pairs, first, counts = np.unique(whole, return_index=True, return_counts=True)
    # One heap per class. Each element is a tuple of the negated number of samples, the client, and
    # the index in `order` of the next sample that the client would give away.
    donors: list[list[tuple[int, int, int]]] = [[] for _ in range(num_classes)]
    for pair, index, count in zip(pairs.tolist(), first.tolist(), counts.tolist(), strict=True):
        label, client = divmod(pair, num_clients)
        donors[label].append((-count, client, index))
    for heap in donors:
        heapq.heapify(heap)
    for client in np.flatnonzero(sizes == 0):
        offering = []
        for label in np.flatnonzero(may_have[:, client]):
            heap = donors[label]
            while heap and (heap[0][0] == 0 or sizes[heap[0][1]] == 1):
                heapq.heappop(heap)
            if heap:
                offering.append((heap[0][0], label))
        if not offering:
            raise DataError(
                f"at least one class has too few samples for {num_clients} clients: reduce "
                "federated.clients, or increase partition.alpha or classes_per_client"
            )
        _, label = min(offering)
        count, donor, index = donors[label][0]
        heapq.heapreplace(donors[label], (count + 1, donor, index + 1))
        owners[order[index]] = client
        sizes[donor] -= 1


def _by_client(owners: Numbers, num_clients: int) -> Sequence[Numbers]:
    order = np.argsort(owners, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owners, minlength=num_clients))[:-1])
