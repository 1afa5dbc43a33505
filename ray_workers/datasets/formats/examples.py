"""Examples for fine-tuning a language model: each is a sequence of tokens, some of which count in
the loss."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dray import spec
from ray_workers.datasets.core.errors import broken
from ray_workers.datasets.formats import example_files
from ray_workers.datasets.formats.prepared import ArrayWriter, Workshop, prepare
from ray_workers.datasets.formats.text import files_of_splits
from ray_workers.shared.node_needs import DataPolicy

EXAMPLES_VERSION = 3
"""Part of the cache key. Change this version whenever the tokens of an example change."""


ARRAYS = ("ends", "digests", "num_counted", "is_cut")
"""Names of the arrays with an entry for each example."""
_BETWEEN = b"\xff\xff\xff\xff"
"""Separates the examples of a record in their hash; no token has this number."""


class Encoded(NamedTuple):
    """An example as the model sees it."""

    ids: list[int]
    counts: list[bool]
    """Whether each token counts in the loss."""


class Encoder(Protocol):
    """Converts the records of one source to tokens."""

    @property
    def form(self) -> str | None:
        """Form of the records so far; None if there were none."""

    def encode(self, location: str, record: Mapping[str, Any]) -> Encoded | list[Encoded]:
        """Return the tokens of a record, or of the two answers of a preference pair. Raises
        DataError for a record that is not an example."""


class TokenArray:
    """Arrays with the tokens of several sources, one after another. An index must be within one of
    these arrays."""

    def __init__(self, parts: Sequence[npt.NDArray[Any]]) -> None:
        self.parts = parts
        self._starts = np.cumsum([0, *map(len, parts)])

    def __getitem__(self, at: slice) -> npt.NDArray[Any]:
        number = int(np.searchsorted(self._starts, at.start, side="right")) - 1
        start = int(self._starts[number])
        return self.parts[number][at.start - start : at.stop - start]

    def max(self) -> Any:
        return max(part.max() for part in self.parts)


@dataclass(frozen=True)
class Examples:
    ids: TokenArray
    """(T,) uint32: the tokens of all examples, one after another; read-only memory maps."""
    counts: TokenArray
    """(T,) bool: whether the prediction of the token counts."""
    ends: npt.NDArray[np.int64]
    """(N,): the index after the last token of each example."""
    digests: npt.NDArray[np.int64]
    """(N,): equal for the examples of records with equal tokens."""
    num_counted: npt.NDArray[np.int64]
    """(N,): the number of tokens in each example that count in the loss."""
    is_cut: npt.NDArray[np.bool_]
    """(N,): whether the example was cut to the maximum length."""
    form: str
    """Form of the examples, such as `messages`."""
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
        """Return the slice of all tokens that contains the tokens of an example."""
        return slice(int(self.ends[number - 1]) if number else 0, int(self.ends[number]))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """(N,): the number of tokens of each example."""
        return np.diff(self.ends, prepend=0)


def open_examples(
    data: spec.Data,
    policy: DataPolicy,
    options: spec.AnyMethod,
    encoder: Encoder,
    how: Mapping[str, Any],
) -> Examples:
    """Open the examples of one source. how: what determines the results of the encoder, as JSON
    data. Raises DataError."""
    form = example_files.format_of(data)
    keyed = {
        "kind": "examples",
        "version": EXAMPLES_VERSION,
        "format": form,
        "examples": data.examples,
        "delimiter": data.known_delimiter,
        "encoding": data.encoding,
        **how,
    }

    def build(shop: Workshop) -> Mapping[str, Any]:
        training, validation, num_left_out = files_of_splits(shop)
        builder = _Builder(shop, data, options, encoder)
        with builder:
            num_training = builder.add(training, "training" if validation else None)
            builder.add(validation, "validation" if validation else None)
        return {
            "num_training": num_training if validation else None,
            "num_truncated": builder.num_truncated,
            "num_dropped": builder.num_dropped,
            "num_left_out": num_left_out,
            "form": encoder.form,
        }

    prepared = prepare(data, policy, keyed, build, suffixes=example_files.SUFFIXES[form])
    arrays: dict[str, Any] = {name: prepared.array(name) for name in ARRAYS}
    tokens: dict[str, Any] = {
        name: TokenArray([prepared.array(name)]) for name in ("ids", "counts")
    }
    return Examples(**tokens, **arrays, fingerprint=prepared.fingerprint, **prepared.meta)


def joined(parts: Sequence[Examples], fingerprint: str) -> Examples:
    """Return the examples of several sources, one after another, without a split."""
    if len(parts) == 1:
        return replace(parts[0], fingerprint=fingerprint)
    starts = np.cumsum([0, *(part.ends[-1] for part in parts)])
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS
    }
    arrays["ends"] = np.concatenate([p.ends + n for p, n in zip(parts, starts, strict=False)])
    numbers: dict[str, Any] = {
        name: sum(getattr(part, name) for part in parts)
        for name in ("num_truncated", "num_dropped", "num_left_out")
    }
    return Examples(
        TokenArray([one for part in parts for one in part.ids.parts]),
        TokenArray([one for part in parts for one in part.counts.parts]),
        **arrays,
        **numbers,
        form=parts[0].form,
        fingerprint=fingerprint,
        num_training=None,
    )


class _Builder:
    """Writes the arrays of all examples."""

    def __init__(
        self, shop: Workshop, data: spec.Data, options: spec.AnyMethod, encoder: Encoder
    ) -> None:
        self._options = options
        self._data = data
        self._shop, self._encoder = shop, encoder
        types = {
            "ids": np.uint32,
            "counts": np.bool_,
            "is_cut": np.bool_,
            "ends": np.int64,
            "digests": np.int64,
            "num_counted": np.int64,
        }
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
            for location, record in example_files.records(file, self._shop, self._data):
                found = self._encoder.encode(location, record)
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
                    "contains no example with a token that counts towards the loss in its first "
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
        for ids, part, whole in zip(numbers, kept, parts, strict=True):
            self._arrays["ids"].append(ids)
            # No token predicts the first one.
            self._arrays["counts"].append(np.array([False, *part.counts[1:]]))
            self._arrays["num_counted"].append(np.array([sum(part.counts[1:])]))
            self._arrays["is_cut"].append(np.array([len(whole.ids) > longest]))
            self._arrays["ends"].append(np.array([self._arrays["ids"].num_rows]))
            self._arrays["digests"].append(np.frombuffer(digest.digest(), np.int64))
