"""DPO and reward models compute the same weights and metrics as a plain loop with transformers and
peft, which processes one answer at a time, without padding, and knows nothing of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from ray_workers.training.data.sampler import epoch_order
from tests.fakes import pretend_gpu
from tests.marks import soak_but
from tests.unit.recipes import tiny_models as tiny
from tests.unit.training.jobs import series
from tests.unit.training.loop.test_fine_tuning_runs import (
    ALPHA,
    BATCH_SIZE,
    EPOCHS,
    LORA,
    NUM_TRAINING,
    RANK,
    RATE,
    artifacts,
    assert_close,
    die_in_step_6,
    in_float64,
    initial_adapter,
    stored,
)
from tests.unit.training.ranks import frames, replaced, run_ranks

BETA = 0.3
DORA = {**LORA, "kind": "dora"}


def job(
    home: Path, kind: str, method: dict[str, Any], adapter: Any, num_ranks: int, **fields: Any
) -> dict[str, Any]:
    """Write a base and pairs, and return a job that uses them."""
    dtype = fields.pop("dtype", torch.float64)
    tiny.make_base(home / "base", kind, dtype=dtype, template=tiny.MARKED, shard="20KB")
    make = tiny.text_pairs if fields.pop("texts", False) else tiny.pairs
    (home / "data").mkdir()
    tiny.write_lines(home / "data" / "train.jsonl", make(NUM_TRAINING, seed=1))
    tiny.write_lines(home / "data" / "validation.jsonl", make(5, seed=2))
    document = tiny.document(
        home / "base",
        home / "data",
        model={"adapter": adapter},
        data={"format": "jsonl"},
        resources={"num_workers": num_ranks},
        train={
            "global_batch_size": BATCH_SIZE,
            "epochs": EPOCHS,
            "optimizer": {"name": "adamw", "lr": RATE, "weight_decay": 0.0},
            "schedule": {"name": "constant"},
            **fields.pop("train", {}),
        },
        **fields,
    )
    return {**document, "method": {"max_length": 64, **method}}


class Answer(NamedTuple):
    ids: torch.Tensor
    start: int
    """Index of the first token after the prompt."""


def answers_of(tokenizer: Any, line: str) -> list[Answer]:
    """Return the chosen and the rejected answer of a line."""
    pair = json.loads(line)
    prompt = pair["prompt"]
    found = []
    for name in ("chosen", "rejected"):
        if isinstance(prompt, str):
            before = tokenizer(prompt)["input_ids"]
            ids = [*tokenizer(prompt + pair[name])["input_ids"], tokenizer.eos_token_id]
        else:
            options = {"return_dict": True, "add_generation_prompt": True}
            before = tokenizer.apply_chat_template(prompt, **options)["input_ids"]
            whole = tokenizer.apply_chat_template(prompt + pair[name], return_dict=True)
            ids = whole["input_ids"]
        assert ids[: len(before)] == before
        found.append(Answer(torch.tensor(ids), len(before)))
    return found


def log_probability(model: Any, answer: Answer) -> torch.Tensor:
    logits = model(answer.ids[None]).logits[0, answer.start - 1 : -1]
    return logits.log_softmax(-1).gather(-1, answer.ids[answer.start :, None]).sum()


def dpo_of(model: Any, reference: Any, answers: list[Answer], method: dict[str, Any]) -> Any:
    """Return the loss of a pair, and its metrics."""
    ratios = []
    for answer in answers:
        with torch.no_grad():
            expected = log_probability(reference, answer)
        ratios.append(log_probability(model, answer) - expected)
    if method.get("loss") == "ipo":
        means = [r / (len(a.ids) - a.start) for r, a in zip(ratios, answers, strict=True)]
        loss = (means[0] - means[1] - 1 / (2 * BETA)) ** 2
    else:
        z, e = BETA * (ratios[0] - ratios[1]), method.get("label_smoothing", 0.0)
        loss = (1 - e) * torch.log1p(torch.exp(-z)) + e * torch.log1p(torch.exp(z))
    chosen, rejected = (BETA * ratio.item() for ratio in ratios)
    return loss, {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": float(chosen > rejected),
    }


def reward_of(model: Any, answers: list[Answer]) -> Any:
    chosen, rejected = (model(answer.ids[None]).logits[0, 0] for answer in answers)
    margin = chosen - rejected
    metrics = {"accuracy": float(margin > 0), "margin": margin.item()}
    return torch.log1p(torch.exp(-margin)), metrics


class Plain(NamedTuple):
    model: Any
    """The trained model of transformers or peft."""
    steps: list[dict[str, float]]
    """The mean loss and metrics of each step."""
    held_out: dict[str, float]


def plain(
    home: Path, method: dict[str, Any], adapter: Any, initial: dict[str, torch.Tensor]
) -> Plain:
    """Train with a plain loop. initial: the initial values of the trained tensors."""
    import peft
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    is_dpo = method["name"] == "dpo"
    tokenizer = AutoTokenizer.from_pretrained(home / "base")
    options: dict[str, Any] = {"dtype": torch.float64}
    kind = AutoModelForCausalLM
    if not is_dpo:
        kind, options = AutoModelForSequenceClassification, {**options, "num_labels": 1}
    model: Any = kind.from_pretrained(home / "base", **options)
    reference = kind.from_pretrained(home / "base", **options).eval() if is_dpo else None
    if adapter is not None:
        given: dict[str, Any] = {"r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
        task = "CAUSAL_LM" if is_dpo else "SEQ_CLS"
        dora = adapter["kind"] == "dora"
        model = peft.get_peft_model(model, peft.LoraConfig(**given, task_type=task, use_dora=dora))
    names = {n.removeprefix("base_model.model."): p for n, p in model.named_parameters()}
    for name, value in initial.items():
        other = "score.modules_to_save.default.weight"
        names[other if name == "score.weight" and other in names else name].data = value.clone()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == len(initial)
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)

    def of_lines(lines: list[str]) -> tuple[torch.Tensor, dict[str, float]]:
        found = []
        for line in lines:
            answers = answers_of(tokenizer, line)
            found.append(
                dpo_of(model, reference, answers, method) if is_dpo else reward_of(model, answers)
            )
        loss = torch.stack([loss for loss, _ in found]).mean()
        means = {k: sum(m[k] for _, m in found) / len(found) for k in found[0][1]}
        return loss, {"loss": loss.item(), **means}

    steps = []
    lines = (home / "data" / "train.jsonl").read_text().splitlines()
    for epoch in range(EPOCHS):
        order = epoch_order(NUM_TRAINING, 0, epoch).tolist()
        for start in range(0, NUM_TRAINING, BATCH_SIZE):
            loss, means = of_lines([lines[n] for n in order[start : start + BATCH_SIZE]])
            steps.append(means)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        _, held_out = of_lines((home / "data" / "validation.jsonl").read_text().splitlines())
    return Plain(model, steps, held_out)


DPO = {"name": "dpo", "beta": BETA}
SMOOTH = {**DPO, "label_smoothing": 0.1}
IPO = {**DPO, "loss": "ipo"}
REWARD = {"name": "reward"}
TEXTS = {"texts": True}
SHARD = {"parallel": {"shard": 2}}
SMALL = {"train": {"micro_batch_size": 1}}
CASES: dict[str, tuple[str, dict[str, Any], Any, int, dict[str, Any]]] = {
    "dpo, LoRA": ("llama", DPO, LORA, 1, {}),
    "dpo, LoRA, two ranks": ("llama", SMOOTH, LORA, 2, SMALL),
    "dpo, LoRA, sharded": ("llama", DPO, LORA, 2, SHARD),
    "dpo, LoRA, recomputed": ("llama", DPO, LORA, 2, {**SHARD, "train": {"recompute": "full"}}),
    "dpo, all weights": ("llama", DPO, None, 1, SMALL),
    "dpo, all weights, two ranks": ("llama", DPO, None, 2, TEXTS),
    "dpo, all weights, sharded": ("llama", SMOOTH, None, 2, SHARD),
    "dpo, all weights, ZeRO 1": ("llama", DPO, None, 2, {"parallel": {"shard": 2, "zero": 1}}),
    "dpo, exact": ("llama", DPO, LORA, 2, {"elastic": {"exact": True, "min_workers": 1}}),
    "ipo": ("llama", IPO, LORA, 2, {**SHARD, **TEXTS}),
    "ipo, all weights": ("llama", IPO, None, 1, {}),
    "dpo, Qwen": ("qwen3", DPO, None, 2, SHARD),
    "dpo, Gemma": ("gemma3", DPO, LORA, 2, SHARD),
    "dpo, Gemma, all weights": ("gemma3", DPO, None, 2, SHARD),
    "dpo, DoRA": ("llama", DPO, DORA, 2, SHARD),
    "reward, all weights": ("llama", REWARD, None, 1, TEXTS),
    "reward, two ranks": ("llama", REWARD, None, 2, SMALL),
    "reward, sharded": ("llama", REWARD, None, 2, SHARD),
    "reward, LoRA": ("llama", REWARD, LORA, 1, {}),
    "reward, LoRA, sharded": ("qwen3", REWARD, LORA, 2, SHARD),
    "reward, DoRA": ("llama", REWARD, DORA, 2, {}),
    "reward, Gemma": ("gemma3", REWARD, LORA, 2, SHARD),
}
SHORT = {"dpo, LoRA, sharded", "ipo", "reward, LoRA, sharded"}


@pytest.mark.parametrize("case", soak_but(list(CASES), short=SHORT))
def test_weights_and_metrics_are_those_of_a_plain_loop(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    kind, method, adapter, num_ranks, fields = CASES[case]
    document = job(tmp_path, kind, method, adapter, num_ranks, **fields)
    initial = initial_adapter(document)
    codes = run_ranks(tmp_path, document, world_size=num_ranks, before=in_float64)
    assert codes == [0] * num_ranks
    expected = plain(tmp_path, method, adapter, initial)
    for name, value in expected.held_out.items():
        *_, last = series(tmp_path, f"val/{name}").values()
        assert last == pytest.approx(value, rel=1e-9, abs=1e-12), name
        found = list(series(tmp_path, f"train/{name}").values())
        steps = [means[name] for means in expected.steps]
        # A vector with the loss and other metrics passes through DDP and through FSDP.
        assert found == pytest.approx(steps, rel=1e-9, abs=1e-12), name
        assert num_ranks == 1 or not series(tmp_path, f"train/{name}", rank=1)
    if adapter is None:
        tensors = {name: p.detach() for name, p in expected.model.named_parameters()}
        assert_close(load_file(artifacts(tmp_path) / "model.safetensors"), tensors, 1e-10)
        return
    from peft import get_peft_model_state_dict

    trained = load_file(artifacts(tmp_path) / "adapter" / "adapter_model.safetensors")
    assert_close(trained, get_peft_model_state_dict(expected.model), 1e-10)


@pytest.mark.parametrize("name", soak_but(["dpo", "reward"], short=["dpo"]))
def test_a_device_measures_the_same(tmp_path: Path, name: str) -> None:
    """The metrics of a step are copied from the device with its loss."""
    method = {"dpo": DPO, "reward": REWARD}[name]
    here, there = tmp_path / "cpu", tmp_path / "pretend"
    told = []
    for home, given in (
        (here, {}),
        (there, {"device": pretend_gpu.NAME, "before": pretend_gpu.install}),
    ):
        document = job(home, "llama", method, LORA, 1, dtype=torch.float32, train={"epochs": 1})
        assert run_ranks(home, document, world_size=1, **given) == [0]
        values = [m["values"] for m in frames(home, kind="metrics")]
        told.append({k for one in values for k in one if not k.startswith("perf/")})
    assert told[0] == told[1]
    assert len([key for key in told[0] if key.startswith("train/")]) in (5, 7)
    for key in told[0]:  # attention is computed by another function there
        assert series(there, key) == pytest.approx(series(here, key), rel=1e-3, abs=1e-4), key


KILLED: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "dpo, LoRA": (DPO, LORA, {}),
    "dpo, LoRA, sharded": (DPO, LORA, {"shard": 2}),
    "dpo, all weights": (DPO, None, {}),
    "reward": (REWARD, None, {}),
    "reward, DoRA, sharded": (REWARD, DORA, {"shard": 2}),
}


@pytest.mark.parametrize("case", soak_but(KILLED, short={"dpo, all weights"}))
def test_a_killed_rank_changes_no_bit_of_preferences(tmp_path: Path, case: str) -> None:
    """In float32, with dropout; the base, which is also the reference, is read again by the
    replacement."""
    method, adapter, parallel = KILLED[case]
    if adapter is not None:
        adapter = {**adapter, "dropout": 0.2}
    options: dict[str, Any] = {"dtype": torch.float32, "parallel": parallel, "train": {"epochs": 3}}
    document = job(tmp_path / "one", "llama", method, adapter, 2, **options)
    (tmp_path / "other").mkdir()
    for home, fault in ((tmp_path / "one", None), (tmp_path / "other", die_in_step_6)):
        codes = run_ranks(home, document, world_size=2, before=fault, recovers=True)
        assert codes == [0, 0]
    assert replaced(tmp_path / "one") == []
    assert replaced(tmp_path / "other") == [1]
    found, expected = stored(tmp_path / "other"), stored(tmp_path / "one")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
