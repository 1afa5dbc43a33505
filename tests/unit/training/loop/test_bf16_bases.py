"""Adapters on a frozen base that is held in bfloat16, alone, on two ranks, and sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dray.spec import JobSpec
from ray_workers import recipes
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.data.sampler import epoch_order
from tests.marks import SOAK, soak_but
from tests.unit.recipes import tiny_models as tiny
from tests.unit.training.loop.test_fine_tuning_runs import (
    ALPHA,
    BATCH_SIZE,
    LORA,
    NUM_TRAINING,
    RANK,
    artifacts,
    die_in_step_6,
    initial_adapter,
    job,
    losses_of,
    stored,
)
from tests.unit.training.ranks import replaced, run_ranks

RATE = 0.1
TRAIN = {
    "precision": "bf16",
    "micro_batch_size": 1,  # otherwise, padding could change the last bit of a row
    "epochs": 1,
    "optimizer": {"name": "sgd", "lr": RATE, "momentum": 0.0},
}


def held_in_bf16(home: Path, kind: str, adapter: str, num_ranks: int, **fields: Any) -> Any:
    given = {**LORA, "kind": adapter, "base_precision": "bf16", **fields.pop("more", {})}
    train = {**TRAIN, **fields.pop("train", {})}
    return job(home, kind, given, num_ranks, dtype=torch.bfloat16, train=train, **fields)


def plain(home: Path, adapter: str, initial: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Train the adapter with a plain loop, and return its weights with peft's names."""
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(home / "base")
    model: Any = AutoModelForCausalLM.from_pretrained(home / "base", dtype=torch.bfloat16)
    given: dict[str, Any] = {"r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
    model = peft.get_peft_model(
        model, peft.LoraConfig(**given, task_type="CAUSAL_LM", use_dora=adapter == "dora")
    )
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        assert parameter.dtype == torch.float32
        parameter.data = initial[name.removeprefix("base_model.model.")].clone()
    optimizer = torch.optim.SGD(trained.values(), lr=RATE)
    lines = (home / "data" / "train.jsonl").read_text().splitlines()
    order = epoch_order(NUM_TRAINING, 0, 0).tolist()
    for start in range(0, NUM_TRAINING, BATCH_SIZE):
        numbers = order[start : start + BATCH_SIZE]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = [losses_of(model, tokenizer, lines[number]).float() for number in numbers]
        optimizer.zero_grad()
        torch.cat(losses).mean().backward()
        optimizer.step()
    found: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(model)
    return found


SHARD = {"parallel": {"shard": 2}}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "two ranks": (2, {}),
    "ZeRO 1": (2, {"parallel": {"shard": 2, "zero": 1}}),
    "sharded": (2, SHARD),
}
CASES = {
    "LoRA": ("llama", "lora", ("alone", "sharded")),
    "every way": ("llama", "lora", tuple(WAYS)),
    "DoRA": ("llama", "dora", ("alone", "sharded")),
    "Qwen": ("qwen3", "lora", ("two ranks", "sharded")),
    "Gemma": ("gemma3", "lora", ("alone", "sharded")),
}


@pytest.mark.parametrize("case", soak_but(CASES, short={"LoRA"}))
def test_every_division_trains_the_adapter_of_a_plain_loop(tmp_path: Path, case: str) -> None:
    kind, adapter, ways = CASES[case]
    found = []
    for way in ways:
        num_ranks, fields = WAYS[way]
        home = tmp_path / way
        home.mkdir()
        document = held_in_bf16(home, kind, adapter, num_ranks, **fields)
        initial = initial_adapter(document, torch.float32)
        assert run_ranks(home, document, world_size=num_ranks) == [0] * num_ranks
        found.append(load_file(artifacts(home) / "adapter" / "adapter_model.safetensors"))
    expected = plain(tmp_path / ways[0], adapter, initial)
    # Gradients pass through bfloat16, which has 8 bits; with a base in float32, gaps are as large.
    moved = max(one.abs().max().item() for name, one in expected.items() if ".lora_B." in name)
    for trained in found:
        assert trained.keys() == expected.keys()
        gap = max((trained[name] - one).abs().max().item() for name, one in expected.items())
        assert gap < moved / 2**5, (gap, moved)
        assert all(torch.equal(trained[name], found[0][name]) for name in trained)


def test_only_the_base_is_held_in_bf16(tmp_path: Path) -> None:
    document = held_in_bf16(tmp_path, "gemma3", "dora", 1)
    work = recipes.RECIPES["fine_tuning"].build(
        JobSpec.model_validate(document), DataPolicy.open(str(tmp_path / "cache"))
    )
    for name, parameter in work.model.named_parameters():
        trained = parameter.requires_grad
        assert trained == (".lora_" in name), name
        assert parameter.dtype == (torch.float32 if trained else torch.bfloat16), name
    output, embedding = (
        work.model.get_parameter(f"lm.{name}.weight") for name in ("lm_head", "model.embed_tokens")
    )
    assert output is embedding


@SOAK
@pytest.mark.parametrize("case", ["", "dora"])
def test_a_killed_rank_changes_no_bit_on_a_bf16_base(tmp_path: Path, case: str) -> None:
    options = {"train": {"epochs": 3}, "more": {"dropout": 0.2}, **SHARD}
    document = held_in_bf16(tmp_path / "one", "llama", case or "lora", 2, **options)
    (tmp_path / "other").mkdir()
    for home, fault in ((tmp_path / "one", None), (tmp_path / "other", die_in_step_6)):
        codes = run_ranks(home, document, world_size=2, before=fault, recovers=True)
        assert codes == [0, 0]
    assert replaced(tmp_path / "other") == [1]
    found, expected = stored(tmp_path / "other"), stored(tmp_path / "one")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_result_of_a_bf16_base_can_be_loaded(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    document = held_in_bf16(tmp_path, "llama", "dora", 1)
    assert run_ranks(tmp_path, document, world_size=1) == [0]
    model = AutoModelForCausalLM.from_pretrained(artifacts(tmp_path), dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert tiny.MARKED in (artifacts(tmp_path) / "chat_template.jinja").read_text()
