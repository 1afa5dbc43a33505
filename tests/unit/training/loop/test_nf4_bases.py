"""Adapters on a base whose linear layers are held in 4 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dray.spec import JobSpec
from ray_workers import recipes
from ray_workers.recipes.models.quantised import Nf4Linear
from ray_workers.shared.node_needs import DataPolicy
from tests.marks import soak_but
from tests.unit.recipes.test_quantised_layers import NEEDS_BITSANDBYTES, rounded
from tests.unit.training.loop.test_bf16_bases import TRAIN
from tests.unit.training.loop.test_fine_tuning_runs import (
    LORA,
    artifacts,
    die_in_step_6,
    job,
    stored,
)
from tests.unit.training.ranks import checkpoint_refs, replaced, run_ranks

pytest.importorskip("bitsandbytes", reason=NEEDS_BITSANDBYTES)


def held_in(precision: str, home: Path, kind: str, num_ranks: int, **fields: Any) -> Any:
    home.mkdir(exist_ok=True)
    given = {**LORA, "base_precision": precision, **fields.pop("more", {})}
    train = {**TRAIN, **fields.pop("train", {})}
    return job(home, kind, given, num_ranks, dtype=torch.bfloat16, train=train, **fields)


def round_base(home: Path) -> int:
    """Replace the weights that are held in NF4 by their rounded values. Return their number."""
    count = 0
    for path in sorted((home / "base").glob("*.safetensors")):
        weights = load_file(path)
        for name, weight in weights.items():
            if weight.ndim == 2 and not name.startswith(("lm_head", "model.embed_tokens")):
                weights[name] = rounded(weight).to(weight.dtype)
                count += 1
        save_file(weights, path, {"format": "pt"})
    return count


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "alone": ("llama", 1, {}),
    "two ranks": ("llama", 2, {}),
    "ZeRO 1": ("llama", 2, {"parallel": {"shard": 2, "zero": 1}}),
    "Gemma, some targets": ("gemma3", 1, {"more": {"target_modules": ["q_proj", "v_proj"]}}),
    "Qwen 2, recomputed": ("qwen2", 1, {"train": {"recompute": "full"}}),
}


@pytest.mark.parametrize("case", soak_but(list(CASES), short={"two ranks"}))
def test_training_is_training_on_the_rounded_base(tmp_path: Path, case: str) -> None:
    """Compared with a base in bf16 whose files contain the rounded weights. The rounding is done by
    a loop that doesn't use bitsandbytes."""
    kind, num_ranks, fields = CASES[case]
    nf4, bf16 = tmp_path / "nf4", tmp_path / "bf16"
    document = held_in("nf4", nf4, kind, num_ranks, **fields)
    other = held_in("bf16", bf16, kind, num_ranks, **fields)
    assert round_base(bf16) > 10
    for home, given in ((nf4, document), (bf16, other)):
        assert run_ranks(home, given, world_size=num_ranks) == [0] * num_ranks
    found, expected = (
        load_file(artifacts(home) / "adapter" / "adapter_model.safetensors") for home in (nf4, bf16)
    )
    assert found.keys() == expected.keys()
    moved = max(one.abs().max().item() for name, one in expected.items() if ".lora_B." in name)
    assert moved > 0
    gap = max((found[name] - one).abs().max().item() for name, one in expected.items())
    assert gap <= moved / 2**6, (gap, moved)


@pytest.mark.parametrize("case", soak_but(["killed", "resumed"], short=["killed"]))
def test_a_fault_changes_no_bit(tmp_path: Path, case: str) -> None:
    options: dict[str, Any] = {"train": {"epochs": 3}, "more": {"dropout": 0.2}}
    document = held_in("nf4", tmp_path / "one", "llama", 2, **options)
    document["checkpoint"] = {"every_steps": 4, "keep": 10}
    (tmp_path / "other").mkdir()
    assert run_ranks(tmp_path / "one", document, world_size=2) == [0, 0]
    if case == "killed":
        codes = run_ranks(
            tmp_path / "other", document, world_size=2, before=die_in_step_6, recovers=True
        )
        assert replaced(tmp_path / "other") == [1]
        attempt = 1
    else:
        refs = checkpoint_refs(tmp_path / "one")
        attempt = 2
        codes = run_ranks(
            tmp_path / "other", document, world_size=2, attempt=2, resume_from=refs[-1:]
        )
    assert codes == [0, 0]
    found, expected = stored(tmp_path / "other", attempt), stored(tmp_path / "one")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_only_linear_layers_of_the_base_are_held_in_4_bits(tmp_path: Path) -> None:
    document = held_in("nf4", tmp_path / "home", "gemma3", 1)
    work = recipes.RECIPES["fine_tuning"].build(
        JobSpec.model_validate(document), DataPolicy.open(str(tmp_path / "cache"))
    )
    layers = [name for name, one in work.model.named_modules() if isinstance(one, Nf4Linear)]
    assert layers
    assert all(name.endswith("_proj.base_layer") for name in layers)
    for name, parameter in work.model.named_parameters():
        owner = name.rpartition(".")[0]
        if owner in layers:
            assert parameter.dtype in (torch.uint8, torch.float32)
            assert not parameter.requires_grad
        elif parameter.requires_grad:
            assert parameter.dtype == torch.float32
            assert ".lora_" in name
        else:
            assert parameter.dtype == torch.bfloat16, name


def test_the_adapter_is_merged_into_the_exact_base(tmp_path: Path) -> None:
    """The merged weights are the base's own weights plus the adapter's product."""
    document = held_in("nf4", tmp_path / "home", "llama", 1)
    assert run_ranks(tmp_path / "home", document, world_size=1) == [0]
    folder = artifacts(tmp_path / "home")
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    base, merged = (
        {n: t for f in sorted(one.glob("*.safetensors")) for n, t in load_file(f).items()}
        for one in (tmp_path / "home" / "base", folder)
    )
    assert base.keys() == merged.keys()
    for name, weight in base.items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        change = 0.0
        if f"{key}A.weight" in adapter:
            change = 1.5 * (adapter[f"{key}B.weight"] @ adapter[f"{key}A.weight"])
        assert torch.equal(merged[name], (weight.float() + change).to(weight.dtype)), name
