"""The memory that the planner computes for a base model is the memory that fine-tuning uses."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.planner import rank as measuring
from benchmarks.step_time.rank import rank_task
from dray.spec import JobSpec, Lora
from dray.train.prepared.dtensor import local
from ray_workers.recipes import RECIPES
from ray_workers.recipes.models import compat_transformers
from ray_workers.shared.heartbeat import HeartbeatPage, RankAssignment
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.loop.trainer import Trainer
from ray_workers.training.parallel.optim.optimizer_step import OptimizerStep
from ray_workers.training.process import rank_main
from service.planning import base_config
from service.planning.model.base_model import Targets, TokenRows, record
from service.planning.model.base_shapes import ARCHITECTURES, base_shape
from service.planning.model.memory import Memory, elements_of, frozen_elements_of, memory_of
from service.planning.model.shapes import shapes_of
from service.planning.model.unknown import Unknown
from tests.marks import soak_but
from tests.unit.recipes import tiny_models as tiny
from tests.unit.service.planning import fitting_table
from tests.unit.training.ranks import run_in_group

WITHIN = 0.15
LENGTH = 48
LORA = {"kind": "lora", "rank": 4}
"""Like the other sizes, divisible by two: otherwise, one rank has a row more than the other."""
WIDE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def write_examples(path: Path, *, is_ragged: bool, are_pairs: bool = False) -> Path:
    """Write examples that fill `method.max_length`. is_ragged: half of them are shorter; of a pair,
    the rejected answer."""
    generator = random.Random(0)

    def text(number: int) -> str:
        num_words = 4 if is_ragged and number % 2 else 3 * LENGTH
        return " ".join(generator.choices(tiny.WORDS, k=num_words))

    def record(number: int) -> dict[str, str]:
        if not are_pairs:
            return {"text": text(number)}
        return {"prompt": "the cat ", "chosen": text(0), "rejected": f"over {text(number)}"}

    return tiny.write_lines(path, list(map(record, range(40))))


def job(
    home: Path, kind: str, adapter: Any, num_ranks: int, *, is_ragged: bool = False, **fields: Any
) -> JobSpec:
    base = tiny.make_base(home / "base", kind, **{**WIDE, **fields.pop("sizes", {})})
    method = {"max_length": LENGTH, "truncation": "keep_start", **fields.pop("method", {})}
    are_pairs = method.get("name", "sft") != "sft"
    path = home / "examples.jsonl"
    document = tiny.document(
        base,
        write_examples(path, is_ragged=is_ragged, are_pairs=are_pairs),
        model={"adapter": adapter},
        method=method,
        train={"global_batch_size": 4 * num_ranks, "max_steps": 5, **fields.pop("train", {})},
        resources={"num_workers": num_ranks},
        checkpoint={"in_memory": "off"},
        **fields,
    )
    document["train"].pop("epochs")
    return JobSpec.model_validate(document)


def planned(spec: JobSpec) -> Memory:
    config = base_config.read(spec, DataPolicy.open())
    return memory_of(spec, shapes_of(spec, config=config))


def measured(spec: JobSpec, folder: Path) -> int:
    """Return the highest peak of the job's ranks, which this machine runs."""
    num_ranks = spec.resources.num_workers
    run_in_group(_measure, num_ranks, num_ranks, spec.model_dump_json(), str(folder))
    return max(json.loads(path.read_text()) for path in folder.glob("rank-*.json"))


def _measure(rank: int, num_ranks: int, document: str, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # the group exists already
    found = measuring.peak_bytes(document, rank, num_ranks, Path(folder))
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(found))


CASES: dict[str, tuple[str, Any, int, dict[str, Any]]] = {
    "llama": ("llama", None, 1, {}),
    "llama, ragged": ("llama", None, 1, {"is_ragged": True}),
    "llama, bf16": ("llama", None, 1, {"train": {"precision": "bf16"}}),
    "llama, recomputed": ("llama", None, 1, {"train": {"recompute": "full"}}),
    "llama, selective": ("llama", None, 1, {"train": {"recompute": "selective"}}),
    "llama, micro-batches": ("llama", None, 1, {"train": {"micro_batch_size": 1}}),
    "llama, LoRA": ("llama", LORA, 1, {}),
    "llama, LoRA, dropout, bf16": (
        *("llama", {**LORA, "dropout": 0.1}, 1),
        {"train": {"precision": "bf16"}, "is_ragged": True},
    ),
    "llama, LoRA, bf16, recomputed": (
        *("llama", LORA, 1),
        {"train": {"precision": "bf16", "recompute": "full"}},
    ),
    "llama, LoRA, bf16, shard 2, recomputed": (
        *("llama", LORA, 2),
        {"train": {"precision": "bf16", "recompute": "full"}, "parallel": {"shard": 2}},
    ),
    "llama, LoRA, bf16 gathered, recomputed": (
        *("llama", LORA, 2),
        {
            "train": {"precision": "bf16", "recompute": "full"},
            "parallel": {"shard": 2, "param_dtype": "bf16"},
        },
    ),
    "qwen3, bf16 gathered, recomputed": (
        *("qwen3", None, 2),
        {
            "train": {"precision": "bf16", "recompute": "full"},
            "parallel": {"shard": 2, "param_dtype": "bf16"},
        },
    ),
    "llama, LoRA, recomputed": ("llama", LORA, 1, {"train": {"recompute": "full"}}),
    "llama, LoRA, some": ("llama", {**LORA, "target_modules": ["q_proj", "v_proj"]}, 1, {}),
    "llama, data 2": ("llama", None, 2, {}),
    "llama, shard 2": ("llama", None, 2, {"parallel": {"shard": 2}}),
    "llama, LoRA, data 2": ("llama", LORA, 2, {}),
    "llama, LoRA, shard 2": ("llama", LORA, 2, {"parallel": {"shard": 2}}),
    "qwen3": ("qwen3", None, 1, {}),
    "qwen3, LoRA, shard 2": ("qwen3", LORA, 2, {"parallel": {"shard": 2}}),
    "gemma3": ("gemma3", None, 1, {}),
    "gemma3, bf16": ("gemma3", None, 1, {"train": {"precision": "bf16"}}),
    "gemma3, LoRA": ("gemma3", LORA, 1, {}),
    "gemma3, shard 2": ("gemma3", None, 2, {"parallel": {"shard": 2}}),
    "gemma3, LoRA, shard 2": ("gemma3", LORA, 2, {"parallel": {"shard": 2}}),
}


@pytest.mark.parametrize("case", soak_but(CASES, short={"llama, ragged", "gemma3, LoRA, shard 2"}))
def test_the_peak_is_what_torch_counts_for_a_base(tmp_path: Path, case: str) -> None:
    kind, adapter, num_ranks, fields = CASES[case]
    if kind == "gemma3":
        layers = ["sliding_attention"] * 5 + ["full_attention"]
        fields = {**fields, "sizes": {"layer_types": layers}}
    spec = job(tmp_path, kind, adapter, num_ranks, **fields)
    assert planned(spec).total == pytest.approx(measured(spec, tmp_path), rel=WITHIN)


def _count(rank: int, num_ranks: int, document: str, folder: str) -> None:
    """Write the bytes of this rank's weights, gradients and optimizer state after a step."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    spec = JobSpec.model_validate_json(document)
    task = rank_task(spec, rank, num_ranks, Path(folder))
    os.environ.update(rank_main.environment(task, spec))
    workload = RECIPES["fine_tuning"].build(spec, DataPolicy.open())
    loop = Trainer(task, spec, workload, HeartbeatPage(None))
    loop.join_group(RankAssignment(0, rank, num_ranks, None))
    loop.restore()
    batch = loop.load_batch(1)
    loss = loop.forward_backward(1, batch)
    loop.strategy.gradients.wait()
    parameters = list(loop.strategy.model.parameters())
    gradients = [one.grad for one in parameters if one.grad is not None]
    found = {"parameters": _bytes(parameters), "gradients": _bytes(gradients)}
    loop.update(1, loss)
    update = loop.strategy.update
    assert isinstance(update, OptimizerStep)
    states = [one for state in update._optimizer.state.values() for one in state.values()]
    found["optimizer"] = _bytes(one for one in states if isinstance(one, torch.Tensor) and one.ndim)
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(found))
    loop.close()


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local(one).numel() * one.element_size() for one in tensors)


STATES = {
    f"{kind}{', LoRA' if adapter else ''}, {name}": (kind, adapter, num_ranks, parallel)
    for kind in ("llama", "qwen3", "gemma3")
    for adapter in (None, LORA)
    for name, num_ranks, parallel in (
        ("alone", 1, {}),
        ("data 2", 2, {}),
        ("shard 2", 2, {"shard": 2}),
    )
}


@pytest.mark.parametrize("case", soak_but(STATES, short={"llama, LoRA, shard 2", "gemma3, alone"}))
def test_the_bytes_of_the_state_are_exact(tmp_path: Path, case: str) -> None:
    kind, adapter, num_ranks, parallel = STATES[case]
    spec = job(
        tmp_path, kind, adapter, num_ranks, sizes={"num_hidden_layers": 2}, parallel=parallel
    )
    assert_state_is_exact(spec, tmp_path)


def assert_state_is_exact(spec: JobSpec, tmp_path: Path) -> None:
    num_ranks = spec.resources.num_workers
    run_in_group(_count, num_ranks, num_ranks, spec.model_dump_json(), str(tmp_path))
    memory = planned(spec)
    expected = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
    }
    for path in tmp_path.glob("rank-*.json"):
        assert json.loads(path.read_text()) == expected


def random_config(generator: random.Random, kind: str) -> dict[str, Any]:
    """Return a configuration, in which fields with a default are sometimes missing."""
    heads = generator.choice((2, 4, 8))
    config: dict[str, Any] = {
        "model_type": kind,
        "vocab_size": generator.randint(10, 999),
        "hidden_size": heads * generator.choice((4, 8, 12)),
        "intermediate_size": generator.randint(3, 99),
        "num_hidden_layers": generator.randint(1, 7),
        "num_attention_heads": heads,
        "num_key_value_heads": generator.choice((1, heads // 2, heads)),
        "head_dim": generator.choice((4, 6, 16)),
        "tie_word_embeddings": generator.random() < 0.5,
        "attention_bias": generator.random() < 0.5,
        "mlp_bias": generator.random() < 0.5,
        "use_sliding_window": generator.random() < 0.5,
    }
    for name in list(config)[6:]:
        if generator.random() < 0.25:
            del config[name]
    if generator.random() < 0.25 and kind in ("llama", "qwen2", "qwen3"):
        config["num_key_value_heads"] = None
    return config


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_weights_of_bases_are_counted_exactly(kind: str) -> None:
    """Against transformers and peft, for configurations that nobody chose."""
    generator = random.Random(7)
    for number in range(12):
        config = random_config(generator, kind)
        shape = base_shape(config)
        rank = generator.randint(1, 8)
        names = ("q_proj", "k_proj", "o_proj", "up_proj", "mlp.down_proj", "layers.0.mlp.gate_proj")
        some: list[str] | str = generator.sample(names, generator.randint(1, 5))
        targets: Any = [None, "all-linear", some][number % 3]
        adapter = None if targets is None else Lora(rank=rank, target_modules=targets)
        rows = TokenRows(2, 8, is_joined=False)
        trace = record(shape, Targets.of(adapter), rows, half=False, on_gpu=False)
        with torch.device("meta"):
            values = {name: one for name, one in config.items() if name != "model_type"}
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values))
        if adapter is not None:
            compat_transformers.add_adapter(model, adapter)
        every = list(model.parameters())
        trained = sum(one.numel() for one in every if one.requires_grad)
        assert elements_of(trace) == trained, config
        assert frozen_elements_of(trace) == sum(map(torch.numel, every)) - trained, config


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_operations_of_bases_are_counted_exactly(kind: str) -> None:
    """Against torch's counter, which counts causal attention twice."""
    generator = random.Random(3)
    for _ in range(4):
        config = random_config(generator, kind)
        shape = base_shape(config)
        rows = TokenRows(3, 10, is_joined=False)
        trace = record(shape, None, rows, half=False, on_gpu=False)
        values = {name: one for name, one in config.items() if name != "model_type"}
        made: Any = AutoModelForCausalLM.from_config
        model = made(AutoConfig.for_model(kind, **values), attn_implementation="eager")
        ids = torch.zeros(rows.count, rows.length, dtype=torch.int64)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(input_ids=ids, use_cache=False)
        heads = shape.num_layers * shape.num_heads * shape.head_dim
        attention = 2 * heads * rows.count * rows.length**2
        assert trace.count(lambda op: op.flops) + attention == counter.get_total_flops(), config


def test_what_the_planner_does_not_know_is_named() -> None:
    config = random_config(random.Random(1), "llama")
    with pytest.raises(Unknown, match="'mamba'"):
        base_shape({**config, "model_type": "mamba"})
    for name, value in (("vocab_size", None), ("hidden_size", -1), ("num_hidden_layers", 10**9)):
        with pytest.raises(Unknown, match=name):
            base_shape({**config, name: value})
    for value in (True, "64", 1.5, [64], {}, math.nan):
        with pytest.raises(Unknown, match="intermediate_size"):
            base_shape({**config, "intermediate_size": value})


def test_the_manual_has_the_table_of_models_and_gpus() -> None:
    """`python -m tests.unit.service.planning.fitting_table` prints the table."""
    page = Path(__file__).parents[4] / "docs" / "guides" / "fine-tuning.md"
    assert fitting_table.table() in page.read_text()
