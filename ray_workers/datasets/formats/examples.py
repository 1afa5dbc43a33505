"""Examples for fine-tuning a language model: each is a sequence of tokens, some of which count."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dray import spec
from ray_workers.datasets.core.errors import broken
from ray_workers.datasets.formats import json_lines
from ray_workers.datasets.formats.prepared import ArrayWriter, Workshop, prepare
from ray_workers.datasets.formats.text import files_of_splits
from ray_workers.shared.node_needs import DataPolicy

EXAMPLES_VERSION = 1
"""Part of the cache key. Change this version whenever the tokens of an example change."""


_BETWEEN = b"\xff\xff\xff\xff"
"""Separates the examples of a line in their hash; no token has this number."""


class Encoded(NamedTuple):
    """An example as the model sees it."""

    ids: list[int]
    counts: list[bool]
    """Whether each token counts in the loss."""


Encode = Callable[[str, dict[str, Any]], Encoded | list[Encoded]]
"""A function (location, record) that returns the example of a line, or the two answers of a
preference pair. Raises DataError for records that are not examples."""


@dataclass(frozen=True)
class Examples:
    ids: npt.NDArray[np.uint32]
    """(T,): the tokens of all examples, one after another; a read-only memory map."""
    counts: npt.NDArray[np.bool_]
    """(T,): whether the prediction of the token counts."""
    ends: npt.NDArray[np.int64]
    """(N,): the index after the last token of each example."""
    digests: npt.NDArray[np.int64]
    """(N,): equal for the examples of lines with equal tokens."""
    fingerprint: str
    num_training: int | None
    """Number of training examples, which come first; None if the files don't define a split."""
    num_truncated: int
    num_dropped: int
    """Number of examples that were left out because of their length."""
    num_left_out: int
    """Number of test files."""

    def __len__(self) -> int:
        return len(self.ends)

    def tokens(self, number: int) -> slice:
        """Return where the tokens of an example are."""
        return slice(int(self.ends[number - 1]) if number else 0, int(self.ends[number]))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """(N,): the number of tokens of each example."""
        return np.diff(self.ends, prepend=0)

    @property
    def num_counted(self) -> npt.NDArray[np.int64]:
        """(N,): the number of tokens of each example that count."""
        sums = np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])
        found: npt.NDArray[np.int64] = np.diff(sums[self.ends], prepend=0)
        return found


def open_examples(
    data: spec.Data,
    policy: DataPolicy,
    options: spec.AnyMethod,
    encode: Encode,
    how: Mapping[str, Any],
) -> Examples:
    """Open examples in JSON lines. how: what determines the results of `encode`, as JSON data.
    Raises DataError."""
    keyed = {"kind": "examples", "version": EXAMPLES_VERSION, **how}

    def build(shop: Workshop) -> Mapping[str, Any]:
        training, validation, num_left_out = files_of_splits(shop)
        builder = _Builder(shop, options, encode)
        with builder:
            num_training = builder.add(training, "training" if validation else None)
            builder.add(validation, "validation" if validation else None)
        return {
            "num_training": num_training if validation else None,
            "num_truncated": builder.num_truncated,
            "num_dropped": builder.num_dropped,
            "num_left_out": num_left_out,
        }

    prepared = prepare(data, policy, keyed, build, suffixes=json_lines.SUFFIXES)
    ids, counts, ends, digests = map(prepared.array, ("ids", "counts", "ends", "digests"))
    return Examples(ids, counts, ends, digests, prepared.fingerprint, **prepared.meta)


class _Builder:
    """Writes the arrays of all examples."""

    def __init__(self, shop: Workshop, options: spec.AnyMethod, encode: Encode) -> None:
        self._options = options
        self._shop, self._encode = shop, encode
        types = {"ids": np.uint32, "counts": np.bool_, "ends": np.int64, "digests": np.int64}
        self._arrays = {
            name: ArrayWriter(shop.output, name, (), dtype, shop.budget)
            for name, dtype in types.items()
        }
        self.num_truncated = self.num_dropped = 0

    def __enter__(self) -> None:
        for array in self._arrays.values():
            array.__enter__()

    def __exit__(self, *error: Any) -> None:
        for array in self._arrays.values():
            array.__exit__(*error)

    def add(self, files: Any, what: str | None) -> int:
        """Add the examples of the files, and return the number of all examples so far. Raises
        DataError if there are none. what: name of the split, if there are several."""
        ends = self._arrays["ends"]
        before, num_dropped = ends.num_rows, self.num_dropped
        for file in files:
            for location, record in json_lines.records(file, self._shop):
                found = self._encode(location, record)
                self._add(location, [found] if isinstance(found, Encoded) else found)
        if ends.num_rows == before and (what is not None or not before):
            if self.num_dropped == num_dropped:
                fault = "contains no examples"
            elif self._options.truncation == "drop":
                fault = (
                    f"contains only examples of more than {self._options.max_length:,} tokens: "
                    "increase method.max_length, or set method.truncation to keep_start"
                )
            else:
                fault = (
                    f"contains no example of which a counted token is among the first "
                    f"{self._options.max_length:,} tokens: increase method.max_length"
                )
            where = self._shop.location if what is None else f"{what} part of {self._shop.location}"
            if files or what is None:
                raise broken(where, fault)
        return ends.num_rows

    def _add(self, location: str, parts: Sequence[Encoded]) -> None:
        longest = self._options.max_length
        length = max(len(part.ids) for part in parts)
        kept = [Encoded(part.ids[:longest], part.counts[:longest]) for part in parts]
        can_learn = all(any(part.counts[1:]) for part in kept)
        if length > longest:
            if self._options.truncation == "error":
                raise broken(
                    location,
                    f"has {length:,} tokens, more than method.max_length ({longest:,}): shorten "
                    "it, increase method.max_length, or set method.truncation to keep_start",
                )
            are_equal = len(kept) > 1 and kept[0].ids == kept[1].ids
            if self._options.truncation == "drop" or not can_learn or are_equal:
                self.num_dropped += 1
                return
            self.num_truncated += 1
        if not can_learn:
            raise broken(location, "has no token that the model could learn to predict")
        numbers = [np.array(part.ids, np.uint32) for part in kept]
        digest = hashlib.blake2b(_BETWEEN.join(one.tobytes() for one in numbers), digest_size=8)
        for ids, part in zip(numbers, kept, strict=True):
            self._arrays["ids"].append(ids)
            # No token predicts the first one.
            self._arrays["counts"].append(np.array([False, *part.counts[1:]]))
            self._arrays["ends"].append(np.array([self._arrays["ids"].num_rows]))
            self._arrays["digests"].append(np.frombuffer(digest.digest(), np.int64))
