"""The prompts of `samples` as tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from dray import spec
from ray_workers.datasets.core.errors import broken, reading
from ray_workers.training.core.workload import TextPrompts

CONFIGS: Final = ("config.json", "generation_config.json")
"""Files of the base that name the tokens with which a text ends."""


def prompts_of(
    options: spec.TextSamples | None, tokenizer: Any, folder: Path, longest: int
) -> TextPrompts | None:
    """Return the prompts of a document. Raises DataError if a prompt can't be used.

    folder: the base's small files. longest: maximum number of tokens of a prompt with its answer,
    so that an evaluation needs no more memory than a training step.
    """
    if options is None:
        return None
    rows = []
    for number, prompt in enumerate(options.prompts):
        location = f"samples.prompts[{number}]"
        with reading(location, "can't be converted to tokens"):
            row = _encoded(location, prompt, tokenizer)
        if not row:
            raise broken(location, "has no tokens")
        if len(row) + options.max_tokens > longest:
            raise broken(
                location,
                f"has {len(row):,} tokens: together with samples.max_tokens "
                f"({options.max_tokens:,}), this exceeds method.max_length ({longest:,})",
            )
        rows.append(row)
    return TextPrompts(
        rows=rows,
        ends=_ends(tokenizer, folder),
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        inputs_of=inputs_of,
        text_of=partial(tokenizer.decode, skip_special_tokens=True),
    )


def _encoded(location: str, prompt: str | list[spec.PromptMessage], tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        return without_end(tokenizer(prompt)["input_ids"], tokenizer)
    if not tokenizer.chat_template:
        raise broken(location, "has messages, but the tokenizer of model.base has no chat template")
    messages = [{"role": one.role, "content": one.content} for one in prompt]
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(found["input_ids"])


def without_end(ids: Sequence[int], tokenizer: Any) -> list[int]:
    """Return the tokens of a text that the model will continue, without the end token that some
    tokenizers add."""
    has_end = len(ids) > 0 and ids[-1] == tokenizer.eos_token_id
    return list(ids[:-1] if has_end else ids)


def _ends(tokenizer: Any, folder: Path) -> Set[int]:
    found = [tokenizer.eos_token_id]
    for name in CONFIGS:
        path = folder / name
        if path.is_file():
            with reading(name, "is not a JSON document"):
                given = json.loads(path.read_text()).get("eos_token_id")
            found += given if isinstance(given, list) else [given]
    return frozenset(one for one in found if isinstance(one, int))


def inputs_of(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return int64 (rows, 2, T) token ids and positions. The padding follows the tokens, which
    don't attend to it."""
    inputs = torch.zeros(len(rows), 2, max(map(len, rows)), dtype=torch.int64)
    inputs[:, 1] = torch.arange(inputs.shape[2])
    for number, row in enumerate(rows):
        inputs[number, 0, : len(row)] = torch.tensor(row)
    return inputs
