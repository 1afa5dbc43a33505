"""The workload of fine-tuning: rows of tokens, unfit bases, and results that others can load."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dray
from dray.spec import JobSpec
from ray_workers import recipes
from ray_workers.recipes import fine_tuning, measures
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.workload import Workload
from ray_workers.training.parallel.meta_init import materialise
from tests.unit.recipes import tiny_models as tiny


def build(document: dict[str, Any], home: Path, *, seed: int = 0) -> Workload:
    spec = JobSpec.model_validate(document)
    policy = DataPolicy.open(str(home / "cache"))
    work = recipes.RECIPES["fine_tuning"].build(spec, policy)
    materialise(work.model, torch.device("cpu"), seed)
    return work


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("tuning")
    tiny.make_base(home / "base", shard="10KB")
    tiny.write_lines(home / "data.jsonl", tiny.conversations(40))
    return home


def job(home: Path, **fields: Any) -> dict[str, Any]:
    return tiny.document(home / "base", home / "data.jsonl", **fields)


@pytest.fixture
def own(home: Path, tmp_path: Path) -> Path:
    """A copy of the base and the data, to be changed."""
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_examples_are_joined_to_few_rows() -> None:
    """Every example is in one row; rows are not longer than allowed, and no two rows could be
    joined."""
    generator = random.Random(1)
    for _ in range(200):
        longest = generator.randint(1, 50)
        lengths = [generator.randint(1, longest) for _ in range(generator.randint(1, 40))]
        rows = fine_tuning.best_fit(lengths, longest)
        assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
        sums = sorted(sum(lengths[number] for number in row) for row in rows)
        assert sums[-1] <= longest
        assert len(sums) == 1 or sums[0] + sums[1] > longest


def test_joined_examples_have_the_same_losses(home: Path) -> None:
    """The tokens of a row don't see other examples: the sum of the losses is the same."""
    apart, joined = build(job(home), home), build(job(home, method={"packing": True}), home)
    at = torch.arange(9)
    for work in (apart, joined):
        work.model.double().eval()
    with torch.no_grad():
        (rows, targets), (few, others) = (work.train.take(at) for work in (apart, joined))
        assert len(few) < len(rows) == 9
        losses = [
            measures.token_losses(apart.model(inputs), wanted)
            for inputs, wanted in ((rows, targets), (few, others))
        ]
        alone = sum(
            measures.token_losses(apart.model(inputs), wanted)
            for inputs, wanted in (apart.train.take(at[[n]]) for n in range(9))
        )
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
    assert losses[0].item() == pytest.approx(float(alone), rel=1e-12)
    assert apart.train.num_terms is not None
    assert int((targets >= 0).sum()) == int(apart.train.num_terms[:9].sum())


KINDS = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapter", [None, "lora"])
def test_the_first_outputs_are_those_of_transformers(
    tmp_path: Path, kind: str, adapter: str | None
) -> None:
    """With padding and joined examples on one side, and single examples on the other."""
    from transformers import AutoModelForCausalLM

    tiny.make_base(tmp_path / "base", kind)
    tiny.write_lines(tmp_path / "data.jsonl", tiny.conversations(10))
    method = {"packing": adapter is None}
    work = build(job(tmp_path, model={"adapter": adapter}, method=method), tmp_path)
    inputs, _ = work.train.take(torch.arange(4))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    with torch.no_grad():
        found = work.model.eval()(inputs)
        for row, (ids, positions) in enumerate(inputs):
            starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
            for start, end in itertools.pairwise(starts):
                expected = reference(input_ids=ids[None, start:end]).logits[0]
                torch.testing.assert_close(found[row, start:end], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_any_lengths_do_not_see_each_other(tmp_path: Path, kind: str) -> None:
    """Rows with random sequences, some longer than a sliding window, against each sequence
    alone. Gemma 2, whose softmax is in float32, needs a mask, and all other architectures compute
    each sequence by itself."""
    limits = {"rtol": 1e-3, "atol": 1e-4} if kind == "gemma2" else {}
    more = {"sliding_window": 6} if kind == "mistral" else {}
    tiny.make_base(tmp_path / "base", kind, **more)
    tiny.write_lines(tmp_path / "data.jsonl", tiny.conversations(10))
    model = build(job(tmp_path, method={"packing": True}), tmp_path).model.double().eval()
    assert model.attends_apart is (kind != "gemma2")
    draw = random.Random(5)
    for _ in range(6):
        width = draw.randint(2, 40)
        rows = torch.tensor([draw.choices(range(300), k=width) for _ in range(draw.randint(1, 3))])
        positions = torch.zeros_like(rows)
        for row in positions:
            starts = sorted({0, *draw.choices(range(width), k=draw.randint(0, 4))})
            for start in starts:
                row[start:] = torch.arange(width - start)
        with torch.no_grad():
            found = model(torch.stack((rows, positions), dim=1))
            for number, row in enumerate(positions):
                starts = [*(row == 0).nonzero().flatten().tolist(), width]
                for start, end in itertools.pairwise(starts):
                    ids = rows[number, start:end]
                    alone = torch.stack((ids, torch.arange(len(ids))))
                    expected = model(alone[None])[0]
                    torch.testing.assert_close(found[number, start:end], expected, **limits)


def test_a_packed_batch_has_no_padding(home: Path) -> None:
    work = build(job(home, method={"packing": True, "max_length": 32}), home)
    inputs, targets = work.train.take(torch.arange(9))
    alone = [work.train.take(torch.tensor([n]))[0].shape[2] for n in range(9)]
    assert inputs.shape == (1, 2, sum(alone))
    assert targets.shape == (1, sum(alone))
    assert (inputs[0, 1] == 0).sum() == 9


def test_the_log_shows_the_first_examples_and_what_counts(home: Path) -> None:
    work = build(job(home, data={"validation_fraction": 0.5}), home)
    first = json.loads((home / "data.jsonl").read_text().splitlines()[0])["messages"]
    assert work.about[0].startswith("20 training examples with ")
    shown = [line for line in work.about if line.startswith("example ")]
    assert len(shown) == 3
    answer = next(m["content"] for m in first if m["role"] == "assistant")
    whole = build(job(home, data={"validation_fraction": 0.03}), home).about
    assert any(f"«{answer}<|end|>»" in line for line in whole)


def test_equal_examples_in_both_splits_are_reported(own: Path) -> None:
    records = tiny.conversations(3)
    folder = own / "set"
    folder.mkdir()
    tiny.write_lines(folder / "train.jsonl", records)
    tiny.write_lines(folder / "valid.jsonl", [records[1], *tiny.conversations(1, seed=9)])
    data = {"source": folder.as_uri()}
    work = build(job(own, data=data), own)
    assert "1 validation examples are equal to a training example" in work.about


LORA = {"kind": "lora", "rank": 4, "alpha": 12.0}


def changed(work: Workload) -> dict[str, torch.Tensor]:
    """Change the trained weights, and return them."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in work.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return work.model.state_dict()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_weights_are_stored_as_transformers_expects(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tiny.make_base(tmp_path / "base", kind, dtype=dtype)
    tiny.write_lines(tmp_path / "data.jsonl", tiny.conversations(10))
    work = build(job(tmp_path), tmp_path)
    weights = changed(work)
    assert all(one.dtype == torch.float32 for one in weights.values())
    result = tmp_path / "result"
    result.mkdir()
    work.write_results(work.model, {"val/loss": 1.5}, 7, result)
    model, info = AutoModelForCausalLM.from_pretrained(
        result, dtype="auto", output_loading_info=True
    )
    assert not any(info.values())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name].to(dtype)), name
    tokenizer = AutoTokenizer.from_pretrained(result)
    assert tokenizer.chat_template == tiny.TEMPLATE
    card = (result / "README.md").read_text()
    assert "`val/loss` | 1.5" in card
    assert (tmp_path / "base").as_uri() in card
    assert work.fingerprint in card


@pytest.mark.parametrize(
    "adapter",
    [
        LORA,
        {**LORA, "rslora": True},
        {**LORA, "target_modules": ["q_proj", "mlp.down_proj"]},
        {**LORA, "kind": "dora"},
    ],
)
def test_the_adapter_and_the_merged_model_compute_the_same(
    home: Path, tmp_path: Path, adapter: dict[str, Any]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    work = build(job(home, model={"adapter": adapter}), home)
    changed(work)
    work.write_results(work.model, {}, 7, tmp_path)
    inputs, _ = work.train.take(torch.arange(4))
    base = AutoModelForCausalLM.from_pretrained(home / "base")
    assert_frozen(work, base)
    one = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = work.model.eval()(inputs)
        for model in (one, merged):
            given = {"input_ids": inputs[:, 0], "position_ids": inputs[:, 1], "use_cache": False}
            found = model(**given).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    files = {path.name for path in tmp_path.glob("*.safetensors")}
    assert files == {path.name for path in (home / "base").glob("*.safetensors")}


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("targets", ["all-linear", ["c_proj"]])
def test_transposed_weights_are_merged(tmp_path: Path, targets: Any, kind: str) -> None:
    """GPT-2 stores the weights of its linear layers as (inputs, outputs)."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tiny.make_base(tmp_path / "base", "gpt2")
    tiny.write_lines(tmp_path / "data.jsonl", tiny.conversations(10))
    adapter = {**LORA, "kind": kind, "target_modules": targets}
    work = build(job(tmp_path, model={"adapter": adapter}), tmp_path)
    changed(work)
    (result := tmp_path / "result").mkdir()
    work.write_results(work.model, {}, 7, result)
    inputs, _ = work.train.take(torch.arange(1))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    one = PeftModel.from_pretrained(base, result / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(result).eval()
    with torch.no_grad():
        expected = work.model.eval()(inputs)
        for model in (one, merged):
            found = model(input_ids=inputs[:, 0]).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def assert_frozen(work: Workload, base: Any) -> None:
    kept = {
        name.removeprefix("lm.").replace(".base_layer", ""): p
        for name, p in work.model.named_parameters()
        if not p.requires_grad
    }
    for name, parameter in base.named_parameters():
        assert torch.equal(kept[name], parameter)


def test_an_adapter_names_the_path_of_its_base(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "the base"
    shutil.copytree(home / "base", folder)
    document = tiny.document(folder, home / "data.jsonl", model={"adapter": LORA})
    work = build(document, home)
    (tmp_path / "result").mkdir()
    work.write_results(work.model, {}, 7, tmp_path / "result")
    config = json.loads((tmp_path / "result" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)


def test_an_adapter_can_be_stored_alone(home: Path, tmp_path: Path) -> None:
    work = build(job(home, model={"adapter": {**LORA, "merge": False}}), home)
    work.write_results(work.model, {}, 7, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    assert not (tmp_path / "config.json").exists()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    with pytest.raises(FileNotFoundError, match="contains only an adapter"):
        dray.load(tmp_path)


def test_a_loaded_result_answers(home: Path, tmp_path: Path) -> None:
    work = build(job(home, model={"adapter": "lora"}), home)
    work.write_results(work.model, {}, 7, tmp_path)
    loaded = dray.load(tmp_path)
    prompt = [{"role": "user", "content": "the cat"}]
    answers = {loaded.predict(prompt, num_tokens=6) for _ in range(2)}
    assert len(answers) == 1
    drawn = [loaded.predict("the", num_tokens=20, temperature=1.0, seed=s) for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(ValueError, match="prompt is empty"):
        loaded.predict("")


def test_a_text_is_continued_before_the_end_token(home: Path, tmp_path: Path) -> None:
    """Some tokenizers add the end token to each text."""
    work = build(job(home, model={"adapter": "lora"}), home)
    work.write_results(work.model, {}, 7, tmp_path)
    expected = dray.load(tmp_path).predict("the", num_tokens=5)
    path = tmp_path / "tokenizer.json"
    kept = json.loads(path.read_text())
    end = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    kept["post_processor"]["single"].append(end)
    kept["post_processor"]["special_tokens"]["</s>"] = {
        "id": "</s>",
        "ids": [2],
        "tokens": ["</s>"],
    }
    path.write_text(json.dumps(kept))
    loaded = dray.load(tmp_path)
    assert loaded.tokenizer("the")["input_ids"][-1] == 2
    assert loaded.predict("the", num_tokens=5) == expected


def test_a_change_of_the_configuration_converts_the_examples_again(own: Path) -> None:
    """transformers chooses the class of the tokenizer by `config.json`."""
    before = build(job(own), own).fingerprint
    assert build(job(own), own).fingerprint == before
    path = own / "base" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "comment": "changed"}))
    assert build(job(own), own).fingerprint != before


def test_weights_in_subfolders_are_merged(own: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = own / "base"
    plain = AutoModelForCausalLM.from_pretrained(base)
    index = base / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    (base / "parts" / "last").mkdir(parents=True)
    for number, file in enumerate(sorted(set(content["weight_map"].values()))):
        folder = ("parts", "parts/last")[number % 2]
        (base / file).rename(base / folder / file)
        for key, name in content["weight_map"].items():
            if name == file:
                content["weight_map"][key] = f"{folder}/{file}"
    index.write_text(json.dumps(content))
    work = build(job(own, model={"adapter": LORA}), own)
    changed(work)
    (result := own / "result").mkdir()
    work.write_results(work.model, {}, 7, result)
    inputs, _ = work.train.take(torch.arange(2))
    one = PeftModel.from_pretrained(plain, result / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(result).eval()
    with torch.no_grad():
        given = {"input_ids": inputs[:, 0], "position_ids": inputs[:, 1], "use_cache": False}
        torch.testing.assert_close(merged(**given).logits, one(**given).logits)
