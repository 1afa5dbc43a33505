"""The workloads of dpo and reward: losses, metrics, and results that others can load."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import dray
from dray import spec
from ray_workers.recipes import preferences
from ray_workers.recipes.models.paired import last_tokens
from tests.unit.recipes import tiny_models as tiny
from tests.unit.recipes.test_fine_tuning import LORA, build, changed

DORA = {**LORA, "kind": "dora"}


def job(home: Path, method: str, **fields: Any) -> dict[str, Any]:
    document = tiny.document(home / "base", home / "data.jsonl", **fields)
    return {**document, "method": {"name": method, "max_length": 64}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("preferences")
    tiny.make_base(home / "base", shard="10KB")
    tiny.write_lines(home / "data.jsonl", tiny.pairs(20))
    return home


def test_the_losses_and_metrics_are_those_of_their_formulas() -> None:
    """Compare with plain Python, one pair at a time."""
    generator = random.Random(3)
    for _ in range(20):
        n, beta, e = generator.randint(1, 5), generator.uniform(0.05, 3), generator.uniform(0, 0.4)
        values = [[[generator.uniform(-60, 0) for _ in "cr"] for _ in "pr"] for _ in range(n)]
        lengths = [[generator.randint(1, 9) for _ in "cr"] for _ in range(n)]
        ratios = [[p[0] - r[0], p[1] - r[1]] for p, r in values]
        margins = [beta * (chosen - rejected) for chosen, rejected in ratios]
        dpo = sum((1 - e) * math.log1p(math.exp(-m)) + e * math.log1p(math.exp(m)) for m in margins)
        ipo = sum(
            (chosen / own - rejected / other - 0.5 / beta) ** 2
            for (chosen, rejected), (own, other) in zip(ratios, lengths, strict=True)
        )
        outputs = torch.tensor(values, dtype=torch.float64)
        counts = torch.tensor(lengths)
        method = spec.Dpo(name="dpo", beta=beta, label_smoothing=e)
        assert preferences.loss_sum(method)(outputs, counts).item() == pytest.approx(dpo)
        other = spec.Dpo(name="dpo", beta=beta, loss="ipo")
        assert preferences.loss_sum(other)(outputs, counts).item() == pytest.approx(ipo)
        metrics = preferences.metrics(method)
        for at in range(n):
            metrics.update(outputs[at : at + 1], counts[at : at + 1])
        found = {name: float(value) for name, value in metrics.compute().items()}
        assert found == pytest.approx(
            {
                "rewards/chosen": beta * sum(chosen for chosen, _ in ratios) / n,
                "rewards/rejected": beta * sum(rejected for _, rejected in ratios) / n,
                "rewards/margins": sum(margins) / n,
                "rewards/accuracies": sum(m > 0 for m in margins) / n,
            }
        )


def test_equal_metrics_stay_apart() -> None:
    """Before the first step, all rewards of dpo are 0."""
    metrics = preferences.metrics(spec.Dpo(name="dpo", beta=1.0))
    metrics.update(torch.zeros(1, 2, 2), torch.ones(1, 2))
    metrics.update(torch.tensor([[[3.0, 1.0], [0.0, 0.0]]]), torch.ones(1, 2))
    found = {name: float(value) for name, value in metrics.compute().items()}
    assert found == {
        "rewards/chosen": 1.5,
        "rewards/rejected": 0.5,
        "rewards/margins": 1.0,
        "rewards/accuracies": 0.5,
    }


@pytest.mark.parametrize("adapter", [None, "lora", "dora"])
def test_before_training_the_model_is_its_reference(home: Path, adapter: str | None) -> None:
    work = build(job(home, "dpo", model={"adapter": adapter}), home)
    outputs = work.model(work.train.take(torch.arange(3))[0])
    torch.testing.assert_close(outputs[:, 0], outputs[:, 1], rtol=1e-5, atol=1e-5)
    changed(work)
    again = work.model(work.train.take(torch.arange(3))[0])
    assert torch.equal(again[:, 1], outputs[:, 1])
    assert (again[:, 0] - outputs[:, 0]).abs().min() > 1e-3
    assert work.base is not None


def test_only_the_dropout_of_adapters_is_active(tmp_path: Path) -> None:
    """GPT-2 has dropout by default."""
    tiny.make_base(tmp_path / "base", "gpt2")
    tiny.write_lines(tmp_path / "data.jsonl", tiny.pairs(10))
    for adapter, is_random in ((None, False), (LORA, False), ({**LORA, "dropout": 0.5}, True)):
        for method in ("dpo", "reward"):
            work = build(job(tmp_path, method, model={"adapter": adapter}), tmp_path)
            if adapter is not None:
                changed(work)
            inputs, _ = work.train.take(torch.arange(3))
            one, other = work.model(inputs), work.model(inputs)
            assert torch.equal(one, other) != is_random
            if method == "dpo":
                assert torch.equal(one[:, 1], other[:, 1])
            work.model.eval()
            assert torch.equal(work.model(inputs), work.model(inputs))
            work.model.train()
            assert torch.equal(work.model(inputs), one) != is_random


def test_the_log_shows_both_answers(home: Path) -> None:
    about = build(job(home, "dpo", data={"validation_fraction": 0.5}), home).about
    assert about[0].startswith("10 training pairs with ")
    assert about[0].endswith("; 10 validation pairs")
    shown = [line.split(":")[0] for line in about if line.startswith("example ")]
    assert len(shown) == 6
    assert shown[0].endswith(", chosen")
    assert shown[1] == shown[0].replace("chosen", "rejected")


def test_equal_pairs_in_both_splits_are_reported(home: Path, tmp_path: Path) -> None:
    records = tiny.pairs(3)
    other = {**records[1], "chosen": records[1]["rejected"], "rejected": records[1]["chosen"]}
    tiny.write_lines(tmp_path / "train.jsonl", records)
    tiny.write_lines(tmp_path / "valid.jsonl", [records[2], other])
    data = {"source": tmp_path.as_uri(), "format": "jsonl"}
    work = build(job(home, "dpo", data=data), home)
    assert "1 validation pairs are equal to a training pair" in work.about
    assert (len(work.train), len(work.validation)) == (3, 2)


KINDS = ["llama", "qwen3", "gemma3", "gpt2"]


def test_the_log_of_a_reward_model_does_not_say_that_tokens_count(home: Path) -> None:
    """Its loss is computed from one reward for each answer."""
    work = build(job(home, "reward"), home)
    assert not any("count" in line or "«" in line for line in work.about)
    (first, *_) = work.files["examples.json"]["first"]
    assert (first["num_counted"], len(first["spans"])) == (None, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapter", [None, LORA, DORA], ids=["all", "lora", "dora"])
def test_transformers_and_peft_load_a_reward_model(tmp_path: Path, kind: str, adapter: Any) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tiny.make_base(tmp_path / "base", kind, shard="10KB", tie_word_embeddings=kind == "gemma3")
    tiny.write_lines(tmp_path / "data.jsonl", tiny.pairs(10))
    work = build(job(tmp_path, "reward", model={"adapter": adapter}), tmp_path)
    changed(work)
    (result := tmp_path / "result").mkdir()
    work.write_results(work.model, {}, 7, result)
    judge = AutoModelForSequenceClassification
    merged, info = judge.from_pretrained(result, output_loading_info=True)
    assert not any(info.values())
    assert merged.config.num_labels == 1
    models = [merged.eval()]
    if adapter is not None:
        base = judge.from_pretrained(tmp_path / "base", num_labels=1)
        base.config.pad_token_id = merged.config.pad_token_id
        models.append(PeftModel.from_pretrained(base, result / "adapter").eval())
    inputs, _ = work.train.take(torch.arange(4))
    tokenizer = AutoTokenizer.from_pretrained(result)
    ids, positions = inputs[:, :, 0].flatten(0, 1), inputs[:, :, 1].flatten(0, 1)
    used = positions > 0
    used[:, 0] = True
    given = {
        "input_ids": ids.where(used, tokenizer.pad_token_id),
        "attention_mask": used.long(),
        "use_cache": False,
    }
    with torch.no_grad():
        expected = work.model.eval()(inputs)
        for model in models:
            found = model(**given).logits
            torch.testing.assert_close(found.view(-1, 2), expected, rtol=1e-4, atol=1e-4)
    pair = json.loads((tmp_path / "data.jsonl").read_text().splitlines()[work.train.rows[0]])
    loaded = dray.load(result)
    for side, name in enumerate(("chosen", "rejected")):
        reward = loaded.predict([*pair["prompt"], *pair[name]])
        assert reward == pytest.approx(expected[0, side].item(), rel=1e-3, abs=1e-4)


def test_the_reward_is_that_of_the_last_token_which_is_not_padding() -> None:
    ids = torch.tensor([[5, 6, 7, 0, 0], [5, 6, 0, 0, 0], [0, 0, 0, 0, 0], [5, 0, 6, 0, 7]])
    positions = torch.tensor([[0, 1, 2, 0, 0], [0, 1, 2, 0, 0], [0, 1, 0, 0, 0], [0, 1, 2, 3, 4]])
    assert last_tokens(ids, positions, 0).tolist() == [2, 1, 0, 4]
    assert last_tokens(ids, positions, 9).tolist() == [2, 2, 1, 4]


def test_the_new_layer_has_no_adapter(home: Path) -> None:
    adapter = {**LORA, "target_modules": ["q_proj", "score"]}
    with pytest.raises(Exception, match="'score' is the new output layer"):
        build(job(home, "reward", model={"adapter": adapter}), home)


def test_a_reward_model_is_not_a_base_for_generation(home: Path, tmp_path: Path) -> None:
    work = build(job(home, "reward"), home)
    (result := tmp_path / "base").mkdir()
    work.write_results(work.model, {}, 7, result)
    tiny.write_lines(tmp_path / "data.jsonl", tiny.pairs(5))
    with pytest.raises(
        Exception, match="belongs to a LlamaForSequenceClassification, but only causal"
    ):
        build(job(tmp_path, "dpo"), tmp_path)
