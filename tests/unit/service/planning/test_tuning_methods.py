"""The plans of all methods and adapters of fine-tuning, for jobs that are drawn at random."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from dray.spec import JobSpec, Lora
from ray_workers.recipes.models import compat_transformers
from service.planning.model.base_model import Targets, TokenRows, record
from service.planning.model.base_shapes import ARCHITECTURES, base_shape
from service.planning.model.choice import plan_of
from service.planning.model.cost import CPU, sample_flops, sent
from service.planning.model.memory import elements_of, frozen_elements_of, memory_of
from service.planning.model.shapes import Shapes, shapes_of
from tests.marks import FRESH_SEEDS, soak_but
from tests.unit.service.planning.test_base_memory import (
    WITHIN,
    assert_state_is_exact,
    job,
    measured,
    planned,
    random_config,
)
from tests.unit.service.planning.tuning_documents import LARGE, changed

METHODS = ("sft", "dpo", "reward")
NUM_DRAWN = 40
FIRST = random.SystemRandom().randrange(1 << 30) if FRESH_SEEDS else 0


def drawn_options(seed: int) -> dict[str, Any]:
    """Return the arguments of `job`."""
    draw = random.Random(seed)
    method: dict[str, Any] = {"name": draw.choice(METHODS)}
    if method["name"] == "sft":
        method["packing"] = draw.random() < 0.5
    precision = draw.choice(("fp32", "bf16"))
    adapter: dict[str, Any] | None = None
    if draw.random() < 0.75:
        adapter = {"kind": draw.choice(("lora", "dora")), "rank": 4}
        adapter["dropout"] = draw.choice((0.0, 0.0, 0.1))
        adapter["target_modules"] = draw.choice(("all-linear", "all-linear", ["q_proj", "up_proj"]))
        if precision == "bf16":
            adapter["base_precision"] = draw.choice(("fp32", "bf16"))
    num_ranks = draw.choice((1, 2))
    parallel: dict[str, Any] = {}
    if num_ranks == 2 and draw.random() < 0.7:
        parallel = {"shard": 2, "zero": draw.choice((2, 3, 3))}
        if precision == "bf16":
            parallel["param_dtype"] = draw.choice(("fp32", "bf16"))
    recompute = draw.choice(("none", "none", "selective", "full"))
    train = {"precision": precision, "recompute": recompute}
    if draw.random() < 0.3:
        train["micro_batch_size"] = draw.choice((1, 2))
    return {
        "kind": draw.choice(("llama", "qwen2", "qwen3", "gemma3")),
        "adapter": adapter,
        "num_ranks": num_ranks,
        # The tokens of joined examples are fewer than those of rows with the maximum length.
        "is_ragged": not method.get("packing", False),
        "method": method,
        "train": train,
        "parallel": parallel,
    }


def drawn_job(folder: Path, seed: int) -> JobSpec:
    options = drawn_options(seed)
    if options["kind"] == "gemma3":
        layers = ["sliding_attention"] * 5 + ["full_attention"]
        options["sizes"] = {"layer_types": layers}
    return job(folder, **options)


@pytest.mark.parametrize("seed", soak_but(range(FIRST, FIRST + NUM_DRAWN), short={FIRST}))
def test_the_peak_of_every_method_is_what_torch_counts(tmp_path: Path, seed: int) -> None:
    spec = drawn_job(tmp_path, seed)
    assert planned(spec).total == pytest.approx(measured(spec, tmp_path), rel=WITHIN)


STATES: dict[str, tuple[str, dict[str, Any] | None, int]] = {
    "dpo, a copy": ("dpo", None, 1),
    "dpo, a copy, sharded": ("dpo", None, 2),
    "dpo, adapters off, sharded": ("dpo", {"kind": "dora", "rank": 4}, 2),
    "reward": ("reward", None, 1),
    "reward, bf16": ("reward", {"kind": "dora", "rank": 4, "base_precision": "bf16"}, 1),
    "sft, bf16, sharded": ("sft", {"kind": "lora", "rank": 4, "base_precision": "bf16"}, 2),
}


@pytest.mark.parametrize("case", soak_but(STATES, short={"dpo, a copy", "reward, bf16"}))
def test_the_state_of_every_method_is_exact(tmp_path: Path, case: str) -> None:
    method, adapter, num_ranks = STATES[case]
    spec = job(
        *(tmp_path, "llama", adapter, num_ranks),
        method={"name": method},
        sizes={"num_hidden_layers": 2},
        train={"precision": "bf16"},
        parallel={"shard": num_ranks} if num_ranks > 1 else {},
    )
    assert_state_is_exact(spec, tmp_path)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_weights_of_methods_are_counted_exactly(kind: str, method: str) -> None:
    """Against transformers and peft."""
    draw = random.Random(5)
    names = ("q_proj", "o_proj", "up_proj", "mlp.down_proj", "layers.0.mlp.gate_proj")
    classes: Any = AutoModelForCausalLM
    if method == "reward":
        classes = AutoModelForSequenceClassification
    for number in range(6):
        config = random_config(draw, kind)
        some: Any = "all-linear" if number % 3 else draw.sample(names, draw.randint(1, 4))
        adapter = Lora(kind="dora", rank=draw.randint(1, 8), target_modules=some)
        targets = Targets.of(adapter if number % 2 else None)
        rows = TokenRows(2, 8, is_joined=True)
        trace = record(base_shape(config), targets, rows, method, half=False, on_gpu=False)
        values = {name: one for name, one in config.items() if name != "model_type"}
        with torch.device("meta"):
            made = AutoConfig.for_model(kind, num_labels=1, **values)
            model = classes.from_config(made)
        if targets is not None:
            compat_transformers.add_adapter(model, adapter)
        if method == "reward":
            model.score.weight.requires_grad_(True)
        every = list(model.parameters())
        total = sum(map(torch.numel, every))
        trained = sum(one.numel() for one in every if one.requires_grad)
        copied = total if method == "dpo" and targets is None else 0
        assert elements_of(trace) == trained, config
        assert frozen_elements_of(trace) == total - trained + copied, config


def document(options: dict[str, Any]) -> dict[str, Any]:
    num_ranks = options["num_ranks"]
    return {
        "recipe": "fine_tuning",
        "model": {"base": "file:///base", "adapter": options["adapter"]},
        "data": {"source": "file:///examples.jsonl"},
        "method": {**options["method"], "max_length": 512},
        "train": {**options["train"], "global_batch_size": 4 * num_ranks},
        "resources": {"num_workers": num_ranks},
        "parallel": options["parallel"],
    }


def test_the_change_that_a_refusal_names_makes_the_job_fit() -> None:
    named: set[str] = set()
    for seed in range(FIRST, FIRST + 120):
        options = drawn_options(seed)
        if seed % 2:  # otherwise, these two would be the smallest change of nearly every job
            options["train"] |= {"micro_batch_size": 1, "recompute": "full"}
        spec = JobSpec.model_validate(document(options))
        shapes = shapes_of(spec, config=LARGE)
        available = int(random.Random(seed).uniform(0.2, 0.95) * memory_of(spec, shapes).total)
        change = plan_of(spec, shapes, CPU, available, all_of_them=False).change
        if change is not None:
            new = changed(spec, change)
            assert memory_of(new, shapes_of(new, config=LARGE)).total <= available, (seed, change)
            named |= {each.split(" ")[0] for each in change.split(" with ")}
    assert {"train.recompute", "model.adapter", "model.adapter.base_precision"} <= named


def of_method(method: str, adapter: Any = None, **fields: Any) -> tuple[JobSpec, Shapes]:
    options = {"method": {"name": method}, "adapter": adapter, "num_ranks": 2, "train": {}}
    spec = JobSpec.model_validate({**document({**options, "parallel": {"shard": 2}}), **fields})
    return spec, shapes_of(spec, config=LARGE)


def test_both_answers_of_a_pair_and_the_reference_are_counted() -> None:
    sft, dpo = sample_flops(*of_method("sft")), sample_flops(*of_method("dpo"))
    assert dpo.forward == dpo.reference == pytest.approx(2 * sft.forward)
    assert dpo.weights == pytest.approx(2 * sft.weights)
    reward = sample_flops(*of_method("reward"))
    assert reward.reference == 0.0
    heads = 2 * 512 * 1024 * 32000  # of the output layer, for the tokens of a row
    assert reward.forward == pytest.approx(2 * (sft.forward - heads + 2 * 512 * 1024))
    off, lora = sample_flops(*of_method("dpo", "lora")), sample_flops(*of_method("sft", "lora"))
    assert off.reference == pytest.approx(2 * sft.forward)
    assert off.forward == pytest.approx(2 * lora.forward)


def test_a_reference_is_gathered_for_its_forward_pass_only() -> None:
    plain, _ = sent(*of_method("sft", "lora"))
    off, _ = sent(*of_method("dpo", "lora"))
    blocks = 8 * (2 * 1024**2 + 2 * 1024 * 256 + 3 * 1024 * 4096 + 2 * 1024) * 4
    assert off - plain == pytest.approx(blocks / 2)
    half = {"kind": "lora", "base_precision": "bf16"}
    low, _ = sent(*of_method("sft", half, train={"precision": "bf16", "global_batch_size": 8}))
    roots = (2 * 32000 * 1024 + 1024) * 4
    assert plain - low == pytest.approx((blocks + roots) / 2)
