"""SFT, DPO, IPO and reward models train the same adapter as TRL on the same data."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ray_workers.training.data.sampler import epoch_order
from tests.unit.recipes import tiny_models as tiny
from tests.unit.training.jobs import series
from tests.unit.training.loop.test_fine_tuning_runs import (
    ALPHA,
    BATCH_SIZE,
    LORA,
    NUM_TRAINING,
    RANK,
    RATE,
    artifacts,
    assert_close,
    in_float64,
    initial_adapter,
)
from tests.unit.training.loop.test_preference_runs import BETA, DORA, DPO, IPO, REWARD, job
from tests.unit.training.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="trl is not installed (pip install trl)"
)
SGD_RATE = 1.0
SFT = {"name": "sft"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "sft": (SFT, LORA, False),
    "sft, texts": (SFT, DORA, True),
    "dpo": (DPO, LORA, False),
    "dpo, texts": (DPO, DORA, True),
    "ipo": (IPO, LORA, False),
    "reward": (REWARD, LORA, False),
    "reward, texts": (REWARD, DORA, True),
}


def train_with_trl(
    home: Path, method: dict[str, Any], adapter: dict[str, Any], initial: dict[str, torch.Tensor]
) -> tuple[Any, list[dict[str, float]]]:
    """Return TRL's model, and what it logs in each step."""
    import datasets
    import peft
    import transformers
    import trl

    lines = (home / "data" / "train.jsonl").read_text().splitlines()
    order = epoch_order(NUM_TRAINING, 0, 0).tolist()
    is_dpo = method["name"] == "dpo"
    rows = datasets.Dataset.from_list([json.loads(lines[n]) for n in order])
    options: dict[str, Any] = {
        "output_dir": str(home / "trl"),
        "per_device_train_batch_size": BATCH_SIZE,
        "num_train_epochs": 1,
        "learning_rate": RATE if method["name"] == "reward" else SGD_RATE,
        "optim": "adamw_torch" if method["name"] == "reward" else "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "max_length": 64,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    task = "SEQ_CLS" if method["name"] == "reward" else "CAUSAL_LM"
    dora = adapter["kind"] == "dora"
    given: dict[str, Any] = {"r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
    lora = peft.LoraConfig(
        **given,
        use_dora=dora,
        task_type=task,
        modules_to_save=["score"] if method["name"] == "reward" else None,
    )
    data = {
        "train_dataset": rows,
        "processing_class": transformers.AutoTokenizer.from_pretrained(home / "base"),
        "peft_config": lora,
    }
    causal = transformers.AutoModelForCausalLM
    if method["name"] == "sft":
        model: Any = causal.from_pretrained(home / "base", dtype=torch.float32)
        has_messages = "messages" in rows.column_names
        config = trl.SFTConfig(**options, assistant_only_loss=has_messages)
        trainer = trl.SFTTrainer(model=model, args=config, **data)
    elif is_dpo:
        model = causal.from_pretrained(home / "base", dtype=torch.float32)
        config = trl.DPOConfig(**options, beta=BETA, loss_type=[method.get("loss", "sigmoid")])
        trainer = trl.DPOTrainer(model=model, args=config, **data)
    else:
        judge = transformers.AutoModelForSequenceClassification
        model = judge.from_pretrained(home / "base", dtype=torch.float64, num_labels=1)
        trainer = trl.RewardTrainer(model=model, args=trl.RewardConfig(**options), **data)
    names = {n.removeprefix("base_model.model."): p for n, p in trainer.model.named_parameters()}
    for name, value in initial.items():
        other = "score.modules_to_save.default.weight" if name == "score.weight" else name
        names[other].data = value.clone()
    trainer.train()
    return trainer.model, [one for one in trainer.state.log_history if "loss" in one]


@pytest.mark.parametrize("case", CASES)
def test_the_adapter_is_trls(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import get_peft_model_state_dict

    method, adapter, texts = CASES[case]
    is_exact = method["name"] == "reward"  # TRL computes log-probabilities in float32
    if is_exact:
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    dtype = torch.float64 if is_exact else torch.float32
    train: dict[str, Any] = {"epochs": 1}
    if not is_exact:  # Adam would turn rounding errors of gradients near zero into whole steps
        train["optimizer"] = {"name": "sgd", "lr": SGD_RATE, "momentum": 0.0, "weight_decay": 0.0}
    options = {"train": train, "texts": texts, "dtype": dtype}
    document = job(tmp_path, "llama", method, adapter, 1, **options)
    if method is SFT:
        make = tiny.completions if texts else tiny.conversations
        tiny.write_lines(tmp_path / "data" / "train.jsonl", make(NUM_TRAINING, seed=1))
        tiny.write_lines(tmp_path / "data" / "validation.jsonl", make(5, seed=2))
    initial = initial_adapter(document, dtype)
    before = in_float64 if is_exact else None
    assert run_ranks(tmp_path, document, world_size=1, before=before) == [0]
    expected, logged = train_with_trl(tmp_path, method, adapter, initial)
    names = {
        "dpo": [f"rewards/{one}" for one in ("chosen", "rejected", "margins", "accuracies")],
        "reward": ["accuracy", "margin"],
        "sft": [],
    }[method["name"]]
    for name in ("loss", *names):
        found = list(series(tmp_path, f"train/{name}").values())
        # A reward of TRL is a difference of two sums in float32.
        assert found == pytest.approx([one[name] for one in logged], rel=1e-5, abs=1e-5), name
    trained = load_file(artifacts(tmp_path) / "adapter" / "adapter_model.safetensors")
    limit = 1e-10 if is_exact else 1e-6
    ups = [tensor for name, tensor in trained.items() if ".lora_B." in name]  # were zero
    assert max(one.abs().max().item() for one in ups) > 1e3 * limit
    assert_close(trained, get_peft_model_state_dict(expected), limit)
