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
from safetensors.torch import load_file, save_file

import dray
from dray.spec import JobSpec
from ray_workers import recipes
from ray_workers.recipes import fine_tuning, measures
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError, ModelError
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


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2"])
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


@pytest.mark.parametrize("targets", ["all-linear", ["c_proj"]])
def test_transposed_weights_are_merged(tmp_path: Path, targets: Any) -> None:
    """GPT-2 stores the weights of its linear layers as (inputs, outputs)."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tiny.make_base(tmp_path / "base", "gpt2")
    tiny.write_lines(tmp_path / "data.jsonl", tiny.conversations(10))
    adapter = {**LORA, "target_modules": targets}
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


def refused(home: Path, **fields: Any) -> str:
    with pytest.raises((DataError, ModelError)) as raised:
        build(job(home, **fields), home)
    return str(raised.value)


def config_with(own: Path, **fields: Any) -> None:
    path = own / "base" / "config.json"
    kept = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: one for name, one in kept.items() if one is not None}))


def test_a_base_with_missing_files_is_refused(own: Path) -> None:
    base = own / "base"
    index = base / "model.safetensors.index.json"
    one = sorted(base.glob("*.safetensors"))[1]
    one.rename(own / "away")
    assert f"names the file {one.name}, which is missing" in refused(own)
    index.unlink()
    assert "has no weights" in refused(own)
    for path in base.glob("*.safetensors"):
        path.unlink()
    (base / "pytorch_model.bin").write_bytes(b"x")
    assert "has only pickled weights" in refused(own)
    (base / "tokenizer.json").rename(own / "tokenizer.json")
    (own / "away").rename(base / "model.safetensors")
    assert "has no tokenizer" in refused(own)
    (base / "config.json").unlink()
    assert "has no config.json" in refused(own)


def test_a_base_that_is_a_file_or_absent_is_refused(own: Path) -> None:
    shutil.rmtree(own / "base")
    assert "does not exist on this node" in refused(own)
    (own / "base").write_text("x")
    assert "is a file: give the folder of the model" in refused(own)


def test_an_unfit_config_is_refused(own: Path) -> None:
    kept = (own / "base" / "config.json").read_text()
    for fields, message in (
        ({"architectures": None}, "names no architecture"),
        ({"architectures": ["BertForMaskedLM"]}, "is of a BertForMaskedLM"),
        ({"model_type": "no_such_model"}, "is of the architecture 'no_such_model'"),
        (
            {"model_type": "no_such_model", "auto_map": {"AutoConfig": "a.B"}},
            "brings its own Python code",
        ),
        ({"quantization_config": {"bits": 4}}, "is of a quantized model"),
        ({"max_position_embeddings": 32}, "method.max_length is 64: set it to 32 or less"),
        ({"num_attention_heads": "many"}, "is of a model that can't be created"),
        ({"num_hidden_layers": 3}, "lacks the weights 'model.layers.2."),
        ({"intermediate_size": 25}, "according to config.json it is [25, 16]"),
    ):
        (own / "base" / "config.json").write_text(kept)
        config_with(own, **fields)
        assert message in refused(own), fields
    (own / "base" / "config.json").write_text("{")
    assert "is not a JSON document" in refused(own)


def test_weights_that_are_damaged_or_of_another_type_are_refused(tmp_path: Path) -> None:
    tiny.make_base(tmp_path / "base")
    tiny.write_lines(tmp_path / "data.jsonl", tiny.texts(10))
    path = tmp_path / "base" / "model.safetensors"
    weights = load_file(path)
    save_file({n: t.to(torch.int8) for n, t in weights.items()}, path, {"format": "pt"})
    assert "is stored as I8" in refused(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    assert "is not a safetensors file" in refused(tmp_path)


def test_layers_that_would_mix_examples_are_refused(own: Path) -> None:
    """Before any weights are read, so there is no need for weights that fit."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 320}
    path = own / "base" / "config.json"
    layers = {"layer_types": ["conv"], "intermediate_size": 16, "num_attention_heads": 2}
    lfm = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", **sizes, **layers}
    path.write_text(json.dumps({**lfm, "num_key_value_heads": 2}))
    assert "set method.packing to false" in refused(own, method={"packing": True})
    assert "lacks the weights" in refused(own)
    bloom = {"architectures": ["BloomForCausalLM"], "model_type": "bloom", **sizes, "n_head": 2}
    path.write_text(json.dumps(bloom))
    assert "takes no positions" in refused(own)
    bert = {"num_attention_heads": 2, "intermediate_size": 16, **sizes}
    for name, kind in (("BertLMHeadModel", "bert"), ("OpenAIGPTLMHeadModel", "openai-gpt")):
        path.write_text(json.dumps({"architectures": [name], "model_type": kind, **bert}))
        assert f"is of a {name}, whose attention does not depend" in refused(own)


def test_a_base_does_not_choose_how_attention_is_computed(own: Path) -> None:
    config_with(own, attn_implementation="flash_attention_2")
    lm: Any = build(job(own), own).model.lm
    assert lm.config._attn_implementation == "sdpa"
    config_with(own, attn_implementation="someone/kernels")
    build(job(own), own)


def test_a_buffer_with_another_value_is_refused(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result would not contain it."""
    from transformers import LlamaForCausalLM

    create = LlamaForCausalLM.__init__

    def with_buffer(lm: Any, *rest: Any) -> None:
        create(lm, *rest)
        lm.model.layers[0].register_buffer("scale", torch.ones(1))

    monkeypatch.setattr(LlamaForCausalLM, "__init__", with_buffer)
    path = sorted((own / "base").glob("*.safetensors"))[0]
    weights = load_file(path)
    for value in (1.0, 2.0):
        stored = {**weights, "model.layers.0.scale": torch.tensor([value])}
        save_file(stored, path, {"format": "pt"})
        if value == 1.0:
            build(job(own), own)
        else:
            assert "the buffer model.layers.0.scale" in refused(own)


def test_a_single_file_comes_before_an_index(own: Path) -> None:
    """transformers reads them in this order."""
    base = own / "base"
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(base.glob("*.safetensors")):
        weights |= load_file(path)
        path.unlink()
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    work = build(job(own, model={"adapter": "lora"}), own)
    (own / "result").mkdir()
    work.write_results(work.model, {}, 7, own / "result")
    assert not (own / "result" / "model.safetensors.index.json").exists()


def test_a_token_without_an_embedding_is_named(own: Path) -> None:
    path = own / "base" / "tokenizer.json"
    kept = json.loads(path.read_text())
    number = 5000
    kept["added_tokens"].append({**kept["added_tokens"][0], "id": number, "content": "<new>"})
    kept["model"]["vocab"]["<new>"] = number
    path.write_text(json.dumps(kept))
    tiny.write_lines(own / "data.jsonl", [{"text": "the <new> cat"}, *tiny.texts(9)])
    assert "has the token '<new>' with the id 5,000, but the model has only 3" in refused(own)


def test_a_target_module_that_is_not_there_is_named(home: Path) -> None:
    def message(*targets: str) -> str:
        return refused(home, model={"adapter": {**LORA, "target_modules": list(targets)}})

    assert "has no module 'query'; its linear layers are 'down_proj'" in message("q_proj", "query")
    assert "'embed_tokens' is a Embedding" in message("embed_tokens")


def test_an_adapter_of_a_shared_weight_is_refused(tmp_path: Path) -> None:
    tiny.make_base(tmp_path / "base", tie_word_embeddings=True)
    tiny.write_lines(tmp_path / "data.jsonl", tiny.texts(10))
    adapter = {**LORA, "target_modules": ["lm_head"]}
    found = refused(tmp_path, model={"adapter": adapter})
    assert "'lm_head' shares its weight with another layer" in found


def test_a_missing_package_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fine_tuning, "PACKAGES", ("transformers", "no_such_package"))
    assert "require the package no_such_package" in refused(home)
    (home / "dray.json").write_text('{"recipe": "fine_tuning"}')
    with pytest.raises(ImportError, match="require the package no_such_package"):
        dray.load(home)
    (home / "dray.json").unlink()
