"""Conversion of preference pairs to tokens, and of tokens to the inputs of a model of pairs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dray import spec
from ray_workers.datasets.core.errors import broken, listed
from ray_workers.datasets.formats.examples import Encoded, Examples
from ray_workers.recipes.chat_encoding import FORMS, OPENAI, SIDES, ExampleEncoder
from ray_workers.recipes.measures import IGNORED
from ray_workers.training.data.device_dataset import Rows, Samples

HELP = "{prompt: ..., chosen: ..., rejected: ...} or {chosen: [messages], rejected: [messages]}"


class PairEncoder:
    """Encodes the pairs of one data set."""

    def __init__(self, tokenizer: Any, method: spec.Dpo | spec.Reward) -> None:
        """tokenizer: a fast tokenizer of transformers."""
        self._method = method.name
        # A reward depends on no token alone, so templates need no marks of answers.
        loss: Any = "all" if isinstance(method, spec.Reward) else "answers"
        self._examples = ExampleEncoder(tokenizer, spec.Sft(loss=loss))

    @property
    def form(self) -> str | None:
        """`pairs`; None before the first pair."""
        return self._examples.form and "pairs"

    def encode(self, location: str, record: Mapping[str, Any]) -> list[Encoded]:
        """Return the tokens of the chosen and of the rejected answer, each with the prompt. Raises
        DataError."""
        found = [
            self._examples.encode(f"{location}, {name}", one)
            for name, one in zip(SIDES, self._apart(location, record), strict=True)
        ]
        if found[0].ids == found[1].ids:
            raise broken(location, "has equal answers: `chosen` and `rejected` are the same")
        return found

    def _apart(self, location: str, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return two examples for supervised fine-tuning, which have only the prompt in common."""
        record = {key: value for key, value in record.items() if value is not None}
        record = _in_trls_format(location, record)
        if not record.keys() >= set(SIDES):
            is_example = any(record.keys() >= set(keys) for keys in FORMS.values())
            if is_example and not record.keys() & set(SIDES):
                raise broken(
                    location,
                    f"is an example without a rejected answer, but the method {self._method} "
                    f"learns from pairs, {HELP}: set method.name to sft, or give pairs",
                )
            raise broken(location, f"has the keys {listed(record)}; a pair is {HELP}")
        prompt, answers = record.get("prompt"), [record[name] for name in SIDES]
        for name, answer in zip(SIDES, answers, strict=True):
            if not isinstance(answer, str | list) or not answer:
                raise broken(location, f"has a `{name}` that is empty or of another type: {HELP}")
        if prompt is None:
            prompt, answers = _shared_prompt(location, *answers)
        if len({type(one) for one in (prompt, *answers)}) > 1:
            raise broken(
                location,
                "mixes strings and messages in one pair: give `prompt`, `chosen` and `rejected` as "
                "three strings, or as three lists of messages. If the answers contain the prompt, "
                "leave out `prompt`",
            )
        rest = {"tools": record["tools"]} if record.get("tools") else {}
        return [{"prompt": prompt, "completion": answer, **rest} for answer in answers]


def _in_trls_format(location: str, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a pair in OpenAI's format with the names of TRL, and other pairs unchanged."""
    if not record.keys() & set(OPENAI):
        return record
    given = _input_of(record)
    if not isinstance(given, Mapping) or "messages" not in given or not record.keys() >= {*OPENAI}:
        raise broken(
            location,
            "is not a pair in OpenAI's format, which is {input: {messages: [...]}, "
            "preferred_output: [messages], non_preferred_output: [messages]}",
        )
    answers = {name: record[other] for name, other in zip(SIDES, OPENAI, strict=True)}
    return {"prompt": given["messages"], "tools": given.get("tools"), **answers}


def _input_of(record: Mapping[str, Any]) -> Any:
    """Return `input`, which is JSON in a cell of a table."""
    given = record.get("input")
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return None


def _shared_prompt(location: str, chosen: Any, rejected: Any) -> tuple[Any, list[Any]]:
    """Divide two conversations into their prompt and their answers: all messages except the last
    are the prompt."""
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise broken(location, "has no `prompt`, which only pairs of conversations can omit")
    if chosen[:-1] != rejected[:-1]:
        at = next(
            (n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
            min(len(chosen), len(rejected)),
        )
        raise broken(
            location,
            f"has different prompts: message {at + 1} of `chosen` differs from message {at + 1} of "
            "`rejected`, and is not the last message of both. Give the messages that both "
            "have in common as `prompt`, and only the others as `chosen` and `rejected`",
        )
    return chosen[:-1], [chosen[-1:], rejected[-1:]]


def samples(examples: Examples, pairs: Rows) -> Samples:
    """Return some pairs. Their answers are consecutive examples."""

    def fetch(at: Rows) -> tuple[Tensor, Tensor]:
        return _padded(examples, at)

    return Samples(pairs, fetch, is_ragged=True)


def _padded(examples: Examples, pairs: Rows) -> tuple[Tensor, Tensor]:
    """Return the inputs of a model of pairs (see `models.paired`), and the numbers of tokens that
    count in each answer, int64 (N, 2). The position of padding is 0, so that padding does not
    belong to the sequence before it."""
    numbers = (2 * pairs[:, None] + np.arange(2)).flatten()
    width = int(examples.lengths[numbers].max())
    rows = torch.zeros(len(numbers), 3, width, dtype=torch.int64)
    rows[:, 2] = IGNORED
    for row, number in zip(rows, numbers, strict=True):
        tokens = examples.tokens(int(number))
        ids = torch.from_numpy(examples.ids[tokens].astype(np.int64))
        counts = torch.from_numpy(examples.counts[tokens].copy())
        row[0, : len(ids)] = ids
        row[1, : len(ids)] = torch.arange(len(ids))
        row[2, : len(ids) - 1] = ids[1:].where(counts[1:], IGNORED)
    lengths = (rows[:, 2] != IGNORED).sum(dim=1)
    return rows.view(-1, 2, 3, width), lengths.view(-1, 2)
