"""Bases that can't be fine-tuned are refused, and the errors name what is wrong."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dray
from dray.spec import JobSpec, Pretrained
from ray_workers.datasets.formats.base_models import open_base
from ray_workers.recipes import fine_tuning
from ray_workers.shared.node_needs import DataPolicy, LicensedModel
from ray_workers.training.core.errors import DataError, ModelError
from tests.unit.recipes import tiny_models as tiny
from tests.unit.recipes.test_fine_tuning import LORA, build, job
from tests.unit.recipes.test_fine_tuning import home as home
from tests.unit.recipes.test_fine_tuning import own as own


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


def test_a_copy_of_a_model_whose_licence_is_not_accepted_is_refused(own: Path) -> None:
    """Whatever its address is: a copy has the same hash."""
    given = JobSpec.model_validate(job(own)).model
    assert isinstance(given, Pretrained)
    policy = DataPolicy.open(str(own / "cache"))
    sha256 = open_base(given, policy, 64).sha256
    shutil.copytree(own / "base", own / "mine")
    copy = given.model_copy(update={"base": (own / "mine").as_uri()})
    for hashes, is_refused in (([sha256], True), (["0" * 64, sha256], True), (["0" * 64], False)):
        licensed = tuple(LicensedModel("llama", "Community License", one) for one in hashes)
        limited = replace(policy, licensed=licensed)
        if is_refused:
            with pytest.raises(DataError, match=r"set model\.accept_licence to 'Community"):
                open_base(copy, limited, 64)
        else:
            open_base(copy, limited, 64)
    (own / "mine" / "generation_config.json").write_text("{}")
    limited = replace(policy, licensed=(LicensedModel("llama", "Community License", sha256),))
    open_base(copy, limited, 64)  # a changed copy is another model


def test_an_unfit_config_is_refused(own: Path) -> None:
    kept = (own / "base" / "config.json").read_text()
    for fields, message in (
        ({"architectures": None}, "names no architecture"),
        ({"architectures": ["BertForMaskedLM"]}, "belongs to a BertForMaskedLM"),
        ({"model_type": "no_such_model"}, "belongs to a model of the architecture 'no_such_model'"),
        (
            {"model_type": "no_such_model", "auto_map": {"AutoConfig": "a.B"}},
            "belongs to a model with its own Python code",
        ),
        ({"quantization_config": {"bits": 4}}, "belongs to a quantized model"),
        ({"max_position_embeddings": 32}, "method.max_length is 64: set it to 32 or less"),
        ({"num_attention_heads": "many"}, "belongs to a model that can't be created"),
        ({"num_hidden_layers": 3}, "lacks the weights 'model.layers.2."),
        ({"intermediate_size": 25}, "according to config.json the shape is [25, 16]"),
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
    assert "has no input for positions" in refused(own)
    bert = {"num_attention_heads": 2, "intermediate_size": 16, **sizes}
    for name, kind in (("BertLMHeadModel", "bert"), ("OpenAIGPTLMHeadModel", "openai-gpt")):
        path.write_text(json.dumps({"architectures": [name], "model_type": kind, **bert}))
        assert f"belongs to a {name}, whose attention does not depend" in refused(own)


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
    assert "requires the package no_such_package" in refused(home)
    (home / "dray.json").write_text('{"recipe": "fine_tuning"}')
    with pytest.raises(ImportError, match="requires the package no_such_package"):
        dray.load(home)
    (home / "dray.json").unlink()
