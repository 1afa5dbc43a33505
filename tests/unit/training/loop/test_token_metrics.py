"""Metrics of fine-tuning are means over the tokens that count in the whole validation split."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.marks import soak_but
from tests.unit.recipes import tiny_models as tiny
from tests.unit.training.jobs import series
from tests.unit.training.loop.test_fine_tuning_runs import artifacts, in_float64
from tests.unit.training.ranks import run_ranks

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "micro-batches, packed": (1, {"train": {"micro_batch_size": 2}, "method": {"packing": True}}),
    "two ranks": (2, {"train": {"micro_batch_size": 1}}),
    "sharded": (2, {"parallel": {"shard": 2}}),
    "two ranks, exact": (2, {"elastic": {"exact": True, "min_workers": 1}}),
}


def uneven() -> list[dict[str, Any]]:
    """Return seven completions of 1 to 25 words, so that a mean over examples, batches or ranks
    differs from the mean over tokens."""
    return [
        {"prompt": "the cat", "completion": " sees" + " the red dog and" * (2 * n % 7)}
        for n in range(7)
    ]


@pytest.mark.parametrize("case", soak_but(CASES, short={"two ranks"}))
def test_metrics_are_means_over_the_tokens_that_count(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    num_ranks, fields = CASES[case]
    base = tiny.make_base(tmp_path / "base", dtype=torch.float64)
    (tmp_path / "data").mkdir()
    tiny.write_lines(tmp_path / "data" / "train.jsonl", uneven() * 3)
    tiny.write_lines(tmp_path / "data" / "validation.jsonl", uneven())
    more = {"format": "jsonl"}
    document = tiny.document(
        *(base, tmp_path / "data"), data=more, resources={"num_workers": num_ranks}, **fields
    )
    document["train"]["epochs"] = 4
    document["checkpoint"] = {"best": "val/accuracy"}
    codes = run_ranks(tmp_path, document, world_size=num_ranks, before=in_float64)
    assert codes == [0] * num_ranks

    model: Any = AutoModelForCausalLM.from_pretrained(artifacts(tmp_path), dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(artifacts(tmp_path))
    losses, rights = [], []
    for line in uneven():
        start = len(tokenizer(line["prompt"])["input_ids"])
        ids = torch.tensor(tokenizer(line["prompt"] + line["completion"])["input_ids"] + [2])
        with torch.no_grad():
            logits = model.eval()(ids[None]).logits[0, start - 1 : -1]
        losses += F.cross_entropy(logits, ids[start:], reduction="none").tolist()
        rights += (logits.argmax(dim=1) == ids[start:]).tolist()
    mean = sum(losses) / len(losses)
    expected = {
        "val/loss": mean,
        "val/perplexity": math.exp(mean),
        "val/accuracy": sum(rights) / len(rights),
    }
    assert 0 < expected["val/accuracy"] < 1
    for name, value in expected.items():
        *_, last = series(tmp_path, name).values()
        assert last == pytest.approx(value, rel=1e-6), name
