"""The training and validation examples of one or several sources, and a report about them."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dray import spec
from ray_workers.datasets.core.errors import broken, printable
from ray_workers.datasets.formats.examples import Encoder, Examples, joined, open_examples
from ray_workers.datasets.sources.source import location_of
from ray_workers.recipes import splits
from ray_workers.recipes.chat_encoding import SIDES
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.data.device_dataset import Rows
from ray_workers.training.data.sampler import derive_seed

NUM_SHOWN = 3
MAX_SHOWN_TOKENS = 400
"""Number of tokens of an example that the log shows."""
MAX_LISTED_TOKENS = 20_000
"""Number of tokens of an example that the report lists one by one."""


@dataclass(frozen=True)
class SourceExamples:
    """The examples of one source."""

    location: str
    """URL of the source, without its query."""
    form: str
    is_recognised: bool
    """Whether the form was recognised by the fields, and not given in the document."""
    samples: Rows
    """(N,): numbers of its samples among the samples of all sources."""
    repeat: float = 1.0


@dataclass(frozen=True)
class ExampleSets:
    """The samples of all sources. A sample is an example, or a preference pair: two consecutive
    examples."""

    examples: Examples
    """The examples of all sources."""
    num_each: int
    """Number of examples of a sample."""
    has_counted_tokens: bool
    """Whether the loss is computed from single tokens, and not from the reward of an answer."""
    training: Rows
    """Numbers of the samples of an epoch, in ascending order. A sample that an epoch contains twice
    is listed twice."""
    validation: Rows
    parts: Sequence[SourceExamples]
    """The sources, of which the last can contain the validation examples."""

    @property
    def num_known(self) -> int:
        """Number of validation samples whose tokens are equal to a training sample's tokens."""
        digests = self.examples.digests[:: self.num_each]
        return int(np.isin(digests[self.validation], digests[self.training]).sum())

    @property
    def first(self) -> list[int]:
        """The numbers of the first training samples, from each source in turn."""
        used = np.unique(self.training)
        of_parts = [np.intersect1d(part.samples, used)[:NUM_SHOWN] for part in self.parts]
        rounds = itertools.zip_longest(*(part.tolist() for part in of_parts))
        return [one for each in rounds for one in each if one is not None][:NUM_SHOWN]


def open_sets(
    data: spec.Data,
    policy: DataPolicy,
    method: spec.AnyMethod,
    encoder_of: Callable[[spec.Data], Encoder],
    how: Mapping[str, Any],
    seed: int,
) -> ExampleSets:
    """Open all sources of a job. encoder_of: returns the encoder of a source. how: what determines
    the results of the encoders, as JSON data. Raises DataError."""
    sources = data.mixed if data.held_out is None else [*data.mixed, data.held_out]
    opened = [open_examples(one, policy, method, encoder_of(one), how) for one in sources]
    repeats = [1.0] if data.sources is None else [one.repeat for one in data.sources]
    num_each = 1 if isinstance(method, spec.Sft) else 2
    nums = [len(one) // num_each for one in opened]
    starts = np.cumsum([0, *nums])
    parts = [
        SourceExamples(
            *(location_of(one.source), found.form, num_each == 1 and one.examples is None),
            start + np.arange(num),
        )
        for one, found, start, num in zip(sources, opened, starts, nums, strict=False)
    ]
    training, validation = _divided(data, opened, parts, seed)
    if data.sources is not None:
        training, parts = _repeated(parts, training, repeats, seed)
    fingerprint = opened[0].fingerprint
    if data.sources is not None or data.validation is not None:
        text = json.dumps([[one.fingerprint for one in opened], repeats])
        fingerprint = hashlib.sha256(text.encode()).hexdigest()
    has_counted_tokens = not isinstance(method, spec.Reward)
    examples = joined(opened, fingerprint)
    return ExampleSets(examples, num_each, has_counted_tokens, training, validation, parts)


def _divided(
    data: spec.Data, opened: Sequence[Examples], parts: Sequence[SourceExamples], seed: int
) -> tuple[Rows, Rows]:
    """Return the numbers of the training and of the validation examples. The examples of all
    sources that have no split of their own are split together."""
    training: list[Rows] = []
    validation: list[Rows] = []
    undivided: list[Rows] = []
    for number, (examples, part) in enumerate(zip(opened, parts, strict=True)):
        is_held_out = data.validation is not None and number == len(parts) - 1
        count = examples.num_training and examples.num_training * len(part.samples) // len(examples)
        if data.validation is not None and count is not None:
            fault = "has files that are named like a split, but data.validation is set"
            raise broken(part.location, f"{fault}: leave it out, or rename the files")
        if is_held_out:
            validation.append(part.samples)
        elif data.validation is not None:
            training.append(part.samples)
        elif count is None:
            undivided.append(part.samples)
        else:
            training.append(part.samples[:count])
            validation.append(part.samples[count:])
    if undivided:
        rows = np.concatenate(undivided)
        kept, held_out = splits.at_random(len(rows), data.validation_fraction, seed)
        training.append(rows[kept])
        validation.append(rows[held_out])
    return np.sort(np.concatenate(training)), np.sort(np.concatenate(validation))


def _repeated(
    parts: Sequence[SourceExamples], training: Rows, repeats: Sequence[float], seed: int
) -> tuple[Rows, list[SourceExamples]]:
    """Return the examples of an epoch, and the parts with their repeats."""
    rows: list[Rows] = []
    found = [*parts]
    for number, (part, repeat) in enumerate(zip(parts, repeats, strict=False)):
        own = np.intersect1d(part.samples, training)
        whole = int(repeat)
        generator = np.random.default_rng(derive_seed("repeat", seed, number))
        more = generator.permutation(own)[: round((repeat - whole) * len(own))]
        if whole == len(more) == 0:
            raise broken(
                part.location,
                f"has {len(own):,} training examples, of which repeat {repeat:g} leaves none: "
                f"increase data.sources/{number}/repeat, or leave the source out",
            )
        rows += [np.tile(own, whole), more]
        found[number] = SourceExamples(
            part.location, part.form, part.is_recognised, part.samples, repeat
        )
    return np.sort(np.concatenate(rows)), found


def report(sets: ExampleSets, tokenizer: Any) -> dict[str, Any]:
    """Return everything that is known about the examples before the first step, as JSON data."""
    examples, (training, validation) = sets.examples, (sets.training, sets.validation)
    lengths = examples.lengths.reshape(-1, sets.num_each).sum(axis=1)
    num_counted = examples.num_counted.reshape(-1, sets.num_each).sum(axis=1)
    sides: list[dict[str, str]] = [{}] if sets.num_each == 1 else [{"side": one} for one in SIDES]
    return {
        "what": "examples" if sets.num_each == 1 else "pairs",
        "training": len(training),
        "validation": len(validation),
        "tokens": int(lengths[training].sum()),
        "counted_tokens": int(num_counted[training].sum()) if sets.has_counted_tokens else None,
        "truncated": examples.num_truncated,
        "dropped": examples.num_dropped,
        "ignored_test_files": examples.num_left_out,
        "validation_examples_equal_to_training": sets.num_known,
        "sources": [
            {
                "source": part.location,
                "form": part.form,
                "form_is_recognised": part.is_recognised,
                "examples": len(part.samples),
                "training": int(np.isin(training, part.samples).sum()),
                "validation": int(np.isin(validation, part.samples).sum()),
                "tokens": int(lengths[training[np.isin(training, part.samples)]].sum()),
                "repeat": part.repeat,
            }
            for part in sets.parts
        ],
        "first": [
            {
                "number": number + 1,
                **side,
                **shown(sets, sets.num_each * number + at, tokenizer),
            }
            for number in sets.first
            for at, side in enumerate(sides)
        ],
    }


def shown(sets: ExampleSets, number: int, tokenizer: Any) -> dict[str, Any]:
    """Return an example as the model sees it: its tokens, and its text as spans that are marked as
    counting in the loss or not."""
    examples = sets.examples
    at = examples.tokens(number)
    ids = examples.ids[at].tolist()
    counts = examples.counts[at].tolist() if sets.has_counted_tokens else [False] * len(ids)
    spans: list[dict[str, Any]] = []
    start = 0
    for counted, group in itertools.groupby(counts):
        end = start + len(list(group))
        text = tokenizer.decode(ids[start:end], skip_special_tokens=False)
        spans.append({"text": text, "counts": counted, "tokens": end - start})
        start = end
    return {
        "is_truncated": bool(examples.is_cut[number]),
        "num_tokens": len(ids),
        "num_counted": sum(counts) if sets.has_counted_tokens else None,
        "spans": spans,
        "tokens": [
            {"id": one, "text": tokenizer.decode([one]), "counts": counted}
            for one, counted in zip(ids[:MAX_LISTED_TOKENS], counts, strict=False)
        ],
    }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences for the job's log from a report."""
    what = found["what"]
    yield (
        f"{found['training']:,} training {what} with {found['tokens']:,} tokens"
        f"{_counted(found['counted_tokens'])}; {found['validation']:,} validation {what}"
    )
    for part in found["sources"]:
        how = ", recognised by the names of its fields" if part["form_is_recognised"] else ""
        line = f"{part['source']} has examples of the form {part['form']}{how}"
        if len(found["sources"]) > 1:
            line += (
                f": an epoch contains {part['training']:,} ({part['tokens']:,} tokens, repeat "
                f"{part['repeat']:g}); {part['validation']:,} are for validation"
            )
        yield printable(line)
    for name, words in (
        ("truncated", f"{what} were cut to method.max_length tokens"),
        ("dropped", f"{what} were left out because of their length"),
        ("ignored_test_files", "files for testing are ignored"),
        (
            "validation_examples_equal_to_training",
            f"validation {what} are equal to a training {what[:-1]}",
        ),
    ):
        if found[name]:
            yield f"{found[name]:,} {words}"
    for one in found["first"]:
        yield _line(one)


def _counted(number: int | None) -> str:
    return "" if number is None else f", of which {number:,} count in the loss"


def _line(one: Mapping[str, Any]) -> str:
    """Return an example as one line, with the tokens that count between « and »."""
    total, counted = one["num_tokens"], one["num_counted"]
    name = ", ".join([f"example {one['number']:,}", *([one["side"]] if "side" in one else [])])
    parts = []
    left = MAX_SHOWN_TOKENS
    for span in one["spans"]:
        if left <= 0:
            break
        text = span["text"] if span["tokens"] <= left else f"{span['text'][: 4 * left]}…"
        parts.append(f"«{text}»" if span["counts"] else text)
        left -= span["tokens"]
    cut = ", cut to method.max_length" if one["is_truncated"] else ""
    rest = f" (of {total:,} tokens)" if left < 0 else ""
    marked = "" if counted is None else f"{_counted(counted)} (marked with «»)"
    return printable(f"{name}: {total:,} tokens{cut}{marked}: {''.join(parts)}{rest}")
