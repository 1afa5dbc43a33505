"""The number of tokens that ranks report for each step, compared with the tokens of each line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_workers.training.data.sampler import epoch_order
from tests.unit.recipes import tiny_models as tiny
from tests.unit.training.jobs import series
from tests.unit.training.loop.test_fine_tuning_runs import BATCH_SIZE, NUM_TRAINING, job
from tests.unit.training.ranks import run_ranks

TOKENS = "perf/tokens"


def lengths_of(path: Path) -> list[list[int]]:
    """Return the numbers of tokens of each line's conversation, or of both answers of a pair."""
    tokenizer = tiny.tokenizer()
    found = []
    for line in map(json.loads, path.read_text().splitlines()):
        if "messages" in line:
            whole = tokenizer.apply_chat_template(line["messages"], tokenize=False)
            found.append([len(tokenizer(whole, add_special_tokens=False)["input_ids"])])
            continue
        both = (line["prompt"] + line[side] for side in ("chosen", "rejected"))
        found.append([len(tokenizer(text)["input_ids"]) + 1 for text in both])  # with its end
    return found


def tuned(home: Path, num_ranks: int, **fields: Any) -> dict[str, Any]:
    train = {"epochs": 1, **fields.pop("train", {})}
    return job(home, "llama", None, num_ranks, dtype=torch.float32, train=train, **fields)


def batches(lengths: list[list[int]]) -> list[list[list[int]]]:
    order = epoch_order(NUM_TRAINING, 0, 0).tolist()
    every = [lengths[number] for number in order]
    return [every[start : start + BATCH_SIZE] for start in range(0, NUM_TRAINING, BATCH_SIZE)]


def test_tokens_of_all_ranks_are_the_tokens_of_the_batch(tmp_path: Path) -> None:
    """Without padding, because each micro-batch has one example."""
    document = tuned(tmp_path, 2, train={"micro_batch_size": 1})
    assert run_ranks(tmp_path, document, world_size=2) == [0, 0]
    expected = batches(lengths_of(tmp_path / "data" / "train.jsonl"))
    found = [series(tmp_path, TOKENS, rank=rank) for rank in (0, 1)]
    totals = [found[0][step] + found[1][step] for step in sorted(found[0])]
    assert totals == [sum(map(sum, batch)) for batch in expected]


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_padding_is_counted(tmp_path: Path, method: str) -> None:
    document = tuned(tmp_path, 1, method={"name": method, "max_length": 128})
    path = tmp_path / "data" / "train.jsonl"
    if method == "dpo":
        for name, num in (("train", NUM_TRAINING), ("validation", 4)):
            tiny.write_lines(path.with_stem(name), tiny.text_pairs(num, seed=num))
    assert run_ranks(tmp_path, document, world_size=1) == [0]
    found = series(tmp_path, TOKENS)
    rows = [[length for one in batch for length in one] for batch in batches(lengths_of(path))]
    assert [found[step] for step in sorted(found)] == [len(one) * max(one) for one in rows]
