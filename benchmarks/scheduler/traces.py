"""The measured behaviour of an application: the duration of its steps, and the gain of a step.

For each application, the folder contains `placements.csv` and `scalability.csv` (step times by the
GPUs on each node) and `validation-B.csv` (one row per epoch, trained with global batch size B).
"""

from __future__ import annotations

import bisect
import csv
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NUM_EPOCHS = {
    "bert": 2,
    "cifar10": 100,
    "deepspeech2": 80,
    "imagenet": 90,
    "ncf": 10,
    "yolov3": 50,
}
"""Number of epochs for which each application is trained."""
MOST_LOCAL_SIZE = {"yolov3": 8}
"""Maximum samples per GPU in a micro-step, if it differs from the maximum that was measured."""

Point = tuple[float, ...]
Placement = tuple[int, ...]
"""Number of GPUs on each node that has any."""


@dataclass(frozen=True)
class Gradients:
    """Statistics of the gradients in one epoch, at the smallest batch size."""

    squared_norm: float
    variance: float

    def gain(self, scale: float) -> float:
        """Return the gain of a step with a batch of `scale` times the smallest size, in steps with
        the smallest size, according to the gradient noise scale (McCandlish et al. 2018,
        https://arxiv.org/abs/1812.06162)."""
        whole = self.variance + self.squared_norm
        return whole / (self.variance / scale + self.squared_norm)

    @property
    def noise(self) -> float:
        """The gradient noise scale, in multiples of the smallest batch size."""
        return self.variance / self.squared_norm if self.squared_norm else math.inf


class Application:
    """The traces of one application."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        validation = {
            int(path.stem.removeprefix("validation-")): _numbers(path)
            for path in folder.glob("validation-*.csv")
        }
        self.batch_sizes = sorted(validation)
        self._gradients = {
            size: [(row["grad_sqr"], row["grad_var"]) for row in rows]
            for size, rows in validation.items()
        }
        self.epoch_ends = [
            min(rows[epoch]["progress"] for rows in validation.values() if epoch < len(rows))
            for epoch in range(NUM_EPOCHS[self.name])
        ]
        """Progress at the end of each epoch, in steps with the smallest batch size."""
        self._by_placement: dict[Placement, dict[float, Point]] = {}
        with (folder / "placements.csv").open() as file:
            for text in csv.DictReader(file):
                placement = tuple(int(digit) for digit in text["placement"])
                times = float(text["step_time"]), float(text["sync_time"])
                self._by_placement.setdefault(placement, {})[float(text["local_bsz"])] = times
        self._by_scale: dict[int, dict[int, dict[float, Point]]] = {}
        for row in _numbers(folder / "scalability.csv"):
            of_nodes = self._by_scale.setdefault(int(row["num_nodes"]), {})
            of_gpus = of_nodes.setdefault(int(row["num_replicas"]), {})
            of_gpus[row["local_bsz"]] = row["step_time"], row["sync_time"]
        measured = max(self._by_placement[1,])
        self.most_local_size = MOST_LOCAL_SIZE.get(self.name, int(measured))

    @functools.cache  # noqa: B019 - an application lives as long as the process
    def gradients(self, batch_size: int, epoch: int) -> Gradients:
        """Return the gradients of an epoch, interpolated between the two neighbouring batch
        sizes."""
        of_sizes = {
            float(size): rows[min(epoch, len(rows) - 1)] for size, rows in self._gradients.items()
        }
        return Gradients(*_between(of_sizes, batch_size))

    @functools.cache  # noqa: B019 - an application lives as long as the process
    def step_time(self, placement: Placement, batch_size: int) -> tuple[float, int]:
        """Return (seconds per optimizer step, global batch size). The batch size is as close to the
        requested size as equal micro-batches allow."""
        num_gpus = sum(placement)
        local_size = math.ceil(batch_size / num_gpus)
        micro_steps = math.ceil(local_size / self.most_local_size)
        if num_gpus == 1 and batch_size > self.batch_sizes[0]:
            micro_steps = max(2, micro_steps)  # gradient noise can be measured from two micro-steps
        per_gpu = num_gpus * micro_steps
        size = min(math.ceil(local_size / micro_steps), self.batch_sizes[-1] // per_gpu)
        step_s, exchange_s = self._times(placement, size)
        return step_s + (micro_steps - 1) * (step_s - exchange_s), size * per_gpu

    def _times(self, placement: Placement, size: int) -> Point:
        """Return the seconds of a micro-step including its exchange, and of the exchange."""
        for order in itertools.permutations(placement) if len(placement) <= 4 else ():
            if order in self._by_placement:
                return _between(self._by_placement[order], size)
        of_nodes = {
            float(nodes): _between(
                {float(gpus): _between(sizes, size) for gpus, sizes in of_gpus.items()},
                sum(placement),
            )
            for nodes, of_gpus in self._by_scale.items()
        }
        return _between(of_nodes, len(placement))


def _numbers(path: Path) -> list[dict[str, float]]:
    with path.open() as file:
        return [{key: float(text) for key, text in row.items()} for row in csv.DictReader(file)]


def _between(points: Mapping[float, Point], at: float) -> Point:
    """Interpolate linearly between the two points around `at`. Beyond the ends, return the end
    point."""
    places = sorted(points)
    at = min(max(at, places[0]), places[-1])
    right = bisect.bisect_left(places, at)
    if places[right] == at:
        return points[places[right]]
    low, high = places[right - 1], places[right]
    share = (at - low) / (high - low)
    return tuple(a + (b - a) * share for a, b in zip(points[low], points[high], strict=True))


def load(folder: Path, names: Sequence[str] = tuple(NUM_EPOCHS)) -> dict[str, Application]:
    """Load the applications with these names, from a folder with a subfolder for each."""
    return {name: Application(folder / name) for name in names}
