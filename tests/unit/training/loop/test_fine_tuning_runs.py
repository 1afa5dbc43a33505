"""Fine-tuning computes the same weights as a plain loop with transformers and peft, which processes
one example at a time, without padding, and knows nothing of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.nn import functional as F  # noqa: N812

from dray.spec import JobSpec
from ray_workers import recipes
from ray_workers.recipes.models import pretrained
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.checkpoint import checkpoint_files
from ray_workers.training.core.faultpoints import FaultPoint, arm
from ray_workers.training.data.sampler import epoch_order
from ray_workers.training.parallel.meta_init import materialise
from tests.marks import soak_but
from tests.unit.recipes import tiny_models as tiny
from tests.unit.training.elastic.test_recovery import die
from tests.unit.training.jobs import series
from tests.unit.training.ranks import checkpoint_refs, frames, replaced, run_ranks

NUM_TRAINING, BATCH_SIZE, EPOCHS = 20, 6, 2
"""The last batch of an epoch has two examples."""
RATE, DECAY, RANK, ALPHA = 0.01, 0.1, 4, 6.0
LORA = {"kind": "lora", "rank": RANK, "alpha": ALPHA}


def in_float64(task: RankTask) -> None:
    """Compute everything in float64, including Gemma's normalisation, for which transformers calls
    `float()`. Otherwise, differences of the last bit are sometimes rounded up to 1e-8."""
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]


def write_data(folder: Path) -> Path:
    """Write a split, so that every training line is a training example."""
    folder.mkdir()
    tiny.write_lines(folder / "train.jsonl", tiny.conversations(NUM_TRAINING, seed=1))
    tiny.write_lines(folder / "validation.jsonl", tiny.conversations(5, seed=2))
    return folder


def job(home: Path, kind: str, adapter: Any, num_ranks: int, **fields: Any) -> dict[str, Any]:
    """Write a base and data, unless they exist, and return a job that uses them."""
    base = home / "base"
    if not base.exists():
        dtype = fields.pop("dtype", torch.float64)
        tiny.make_base(base, kind, dtype=dtype, template=tiny.MARKED, shard="20KB")
        write_data(home / "data")
    train = {
        "global_batch_size": BATCH_SIZE,
        "epochs": EPOCHS,
        "optimizer": {"name": "adamw", "lr": RATE, "weight_decay": DECAY},
        "schedule": {"name": "constant"},
        **fields.pop("train", {}),
    }
    return tiny.document(
        base,
        home / "data",
        model={"adapter": adapter},
        data={"format": "jsonl"},
        train=train,
        resources={"num_workers": num_ranks},
        **fields,
    )


def losses_of(model: Any, tokenizer: Any, line: str) -> torch.Tensor:
    """Return the losses of the tokens in the answers of a conversation."""
    encoded = tokenizer.apply_chat_template(
        json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
    )
    ids = torch.tensor(encoded["input_ids"])
    counts = torch.tensor(encoded["assistant_masks"])[1:].bool()
    logits = model(ids[None]).logits[0, :-1]
    return F.cross_entropy(logits[counts], ids[1:][counts], reduction="none")


def plain(home: Path, initial: dict[str, torch.Tensor] | None) -> tuple[Any, float]:
    """Train with a plain loop; return the model of transformers or peft, and its mean loss over the
    tokens of the validation split.

    initial: the initial values of the adapters; None to train all weights.
    """
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(home / "base", dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(home / "base")
    if initial is not None:
        config = peft.LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, config)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data = initial[name.removeprefix("base_model.model.")].clone()
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=RATE)
    lines = (home / "data" / "train.jsonl").read_text().splitlines()
    for epoch in range(EPOCHS):
        order = epoch_order(NUM_TRAINING, 0, epoch).tolist()
        for start in range(0, NUM_TRAINING, BATCH_SIZE):
            numbers = order[start : start + BATCH_SIZE]
            losses = [losses_of(model, tokenizer, lines[number]) for number in numbers]
            optimizer.zero_grad()
            torch.cat(losses).mean().backward()
            optimizer.step()
    held_out = (home / "data" / "validation.jsonl").read_text().splitlines()
    with torch.no_grad():
        losses = [losses_of(model.eval(), tokenizer, line) for line in held_out]
    return model, torch.cat(losses).mean().item()


def initial_adapter(
    document: dict[str, Any], dtype: torch.dtype = torch.float64
) -> dict[str, torch.Tensor]:
    torch.set_default_dtype(dtype)
    try:
        spec = JobSpec.model_validate(document)
        model = recipes.RECIPES["fine_tuning"].build(spec, DataPolicy.open()).model
        materialise(model, torch.device("cpu"), spec.train.seed)
    finally:
        torch.set_default_dtype(torch.float32)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], limit: float
) -> None:
    assert found.keys() == expected.keys()
    gaps = {name: (found[name] - tensor).abs().max().item() for name, tensor in expected.items()}
    assert max(gaps.values()) < limit, max(gaps.items(), key=lambda item: item[1])


def artifacts(home: Path, attempt: int = 1) -> Path:
    return home / f"attempt-{attempt}" / "artifacts"


def stored(home: Path, attempt: int = 1) -> dict[str, torch.Tensor]:
    """Return the weights of a result, and of its adapter."""
    files = sorted(artifacts(home, attempt).rglob("*.safetensors"))
    return {f"{f.parent.name}/{n}": t for f in files for n, t in load_file(f).items()}


CASES: dict[str, tuple[str, Any, int, dict[str, Any]]] = {
    "alone": ("llama", None, 1, {}),
    "micro-batches": ("llama", None, 1, {"train": {"micro_batch_size": 2}}),
    "packed": ("llama", None, 1, {"method": {"packing": True}}),
    "two ranks": ("llama", None, 2, {"train": {"micro_batch_size": 2}}),
    "two ranks, exact": ("llama", None, 2, {"elastic": {"exact": True, "min_workers": 1}}),
    "four ranks": ("llama", None, 4, {"train": {"micro_batch_size": 1}}),
    "four ranks, sharded, packed": (
        *("llama", LORA, 4),
        {"parallel": {"shard": 2}, "method": {"packing": True}},
    ),
    "sharded, packed": ("llama", None, 2, {"parallel": {"shard": 2}, "method": {"packing": True}}),
    "ZeRO 1": ("llama", None, 2, {"parallel": {"shard": 2, "zero": 1}}),
    "recomputed": ("llama", None, 2, {"parallel": {"shard": 2}, "train": {"recompute": "full"}}),
    "LoRA": ("llama", LORA, 1, {"method": {"packing": True}}),
    "LoRA, two ranks": ("llama", LORA, 2, {"train": {"micro_batch_size": 1}}),
    "LoRA, sharded": ("llama", LORA, 2, {"parallel": {"shard": 2}}),
    "Qwen": ("qwen3", None, 2, {"method": {"packing": True}}),
    "Qwen 2, LoRA": ("qwen2", LORA, 2, {"parallel": {"shard": 2}}),
    "Gemma, sharded": ("gemma3", None, 2, {"parallel": {"shard": 2}}),
    "Gemma, LoRA": ("gemma3", LORA, 2, {"method": {"packing": True}}),
}
"""Gemma 2 is missing because transformers computes its softmax in float32. Gemma 3 shares its
embedding with the output layer, and its first layer has a sliding window."""
SHORT = {"micro-batches", "two ranks", "sharded, packed", "LoRA, sharded", "Gemma, LoRA"}


@pytest.mark.parametrize("case", soak_but(list(CASES), short=SHORT))
def test_the_weights_are_those_of_a_plain_loop(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    kind, adapter, num_ranks, fields = CASES[case]
    document = job(tmp_path, kind, adapter, num_ranks, **fields)
    initial = None if adapter is None else initial_adapter(document)
    codes = run_ranks(tmp_path, document, world_size=num_ranks, before=in_float64)
    assert codes == [0] * num_ranks
    expected, loss = plain(tmp_path, initial)
    *_, last = series(tmp_path, "val/loss").values()
    assert last == pytest.approx(loss, rel=1e-10)
    if adapter is None:
        tensors = {name: p.detach() for name, p in expected.named_parameters()}
        assert_close(load_file(artifacts(tmp_path) / "model.safetensors"), tensors, 1e-10)
        return
    trained = load_file(artifacts(tmp_path) / "adapter" / "adapter_model.safetensors")
    from peft import get_peft_model_state_dict

    assert_close(trained, get_peft_model_state_dict(expected), 1e-10)


KILLED: dict[str, tuple[Any, dict[str, Any]]] = {
    "all weights": (None, {}),
    "adapter": (LORA, {}),
    "adapter, sharded": (LORA, {"shard": 2}),
}


@pytest.mark.parametrize("case", soak_but(KILLED, short={"adapter, sharded"}))
def test_a_killed_rank_changes_no_bit(tmp_path: Path, case: str) -> None:
    """In float32, with dropout; the base is read again by the replacement."""
    adapter, parallel = KILLED[case]
    if adapter is not None:
        adapter = {**adapter, "dropout": 0.2}
    options = {"parallel": parallel, "dtype": torch.float32, "train": {"epochs": 3}}
    document = job(tmp_path / "one", "llama", adapter, 2, **options)
    (tmp_path / "other").mkdir()
    for home, fault in ((tmp_path / "one", None), (tmp_path / "other", die_in_step_6)):
        codes = run_ranks(home, document, world_size=2, before=fault, recovers=True)
        assert codes == [0, 0]
    assert replaced(tmp_path / "one") == []
    assert replaced(tmp_path / "other") == [1]
    found, expected = stored(tmp_path / "other"), stored(tmp_path / "one")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    if not parallel:  # otherwise, the ranks return to copies in memory and repeat steps
        losses = [series(home, "train/loss") for home in (tmp_path / "one", tmp_path / "other")]
        assert losses[0] == losses[1]


def die_while_loading(task: RankTask, incarnation: int) -> None:
    """Kill rank 1 when it has read some of the base's weights."""
    if task.rank != 1 or task.incarnation != incarnation:
        return
    read, calls = pretrained._part, []

    def part(*given: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 5:
            die()
        return read(*given)

    pretrained._part = part


def die_at_the_first_loading(task: RankTask) -> None:
    die_while_loading(task, 0)


def die_at_the_second_loading(task: RankTask) -> None:
    die_in_step_6(task)
    die_while_loading(task, 1)


@pytest.mark.parametrize("fault", soak_but([1, 2], short={2}))
def test_a_rank_that_is_killed_while_it_loads_the_base_changes_no_bit(
    tmp_path: Path, fault: int
) -> None:
    """At the start of the job, or as the replacement of a killed rank."""
    before = {1: die_at_the_first_loading, 2: die_at_the_second_loading}[fault]
    options = {"parallel": {"shard": 2}, "dtype": torch.float32, "train": {"epochs": 3}}
    document = job(tmp_path / "one", "llama", LORA, 2, **options)
    (tmp_path / "other").mkdir()
    for home, chosen in ((tmp_path / "one", None), (tmp_path / "other", before)):
        codes = run_ranks(home, document, world_size=2, before=chosen, recovers=True)
        assert codes == [0, 0]
    assert replaced(tmp_path / "other") == [1] * fault
    found, expected = stored(tmp_path / "other"), stored(tmp_path / "one")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_mixture_trains_like_a_file_with_its_examples(tmp_path: Path) -> None:
    """An epoch contains one source twice. The other document has a file with each example as often
    as an epoch contains it. A killed rank changes nothing."""
    often, once = tiny.conversations(9, seed=1), tiny.conversations(5, seed=2)
    held_out = tiny.write_lines(tmp_path / "held-out.jsonl", tiny.conversations(4, seed=3))
    tiny.write_lines(tmp_path / "often.jsonl", often)
    tiny.write_lines(tmp_path / "once.jsonl", [{"conversations": shared(one)} for one in once])
    written = tiny.write_lines(tmp_path / "all.jsonl", [*(o for o in often for _ in "12"), *once])
    mixed = {
        "sources": [
            {"source": (tmp_path / "often.jsonl").as_uri(), "repeat": 2},
            {"source": (tmp_path / "once.jsonl").as_uri()},
        ]
    }
    found = []
    for name, data, num_ranks, fault in (
        ("plain", {"source": written.as_uri()}, 1, None),
        ("mixed", mixed, 1, None),
        ("both", mixed, 2, None),
        ("killed", mixed, 2, die_in_step_6),
    ):
        home = tmp_path / name
        document = job(home, "llama", LORA, num_ranks, dtype=torch.float32)
        document["data"] = {**data, "validation": held_out.as_uri()}
        codes = run_ranks(home, document, world_size=num_ranks, before=fault, recovers=True)
        assert codes == [0] * num_ranks
        found.append((stored(home), series(home, "val/loss")))
    assert replaced(tmp_path / "killed") == [1]
    (plain_weights, losses), (mixed_weights, same), (both, _), (killed, _) = found
    assert losses == same
    for name, tensor in plain_weights.items():
        assert torch.equal(mixed_weights[name], tensor)
        assert torch.equal(killed[name], both[name])
        torch.testing.assert_close(both[name], tensor, rtol=1e-4, atol=1e-5)
    report = json.loads((artifacts(tmp_path / "mixed") / "examples.json").read_text())
    assert (report["training"], report["validation"]) == (23, 4)
    assert [part["form"] for part in report["sources"]] == ["messages", "sharegpt", "messages"]


def shared(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return a conversation in the form of ShareGPT."""
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    return [{"from": names[m["role"]], "value": m["content"]} for m in record["messages"]]


def die_in_step_6(task: RankTask) -> None:
    if task.rank == 1 and task.incarnation == 0:
        arm(FaultPoint.BEFORE_EXCHANGE, die, at_step=6)


EXAMPLES = sorted((Path(__file__).parents[4] / "examples" / "fine_tuning").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_succeed(tmp_path: Path, path: Path) -> None:
    document = tiny.with_tiny_base(yaml.safe_load(path.read_text()), tmp_path)
    num_ranks = document["resources"]["num_workers"]
    assert run_ranks(tmp_path, document, world_size=num_ranks) == [0] * num_ranks
    assert {"model.safetensors", "config.json"} <= {p.name for p in artifacts(tmp_path).iterdir()}
    assert min(series(tmp_path, "train/loss")) == 1


def test_a_checkpoint_of_an_adapter_has_no_base_and_needs_the_same_one(tmp_path: Path) -> None:
    options = {"dtype": torch.float32, "checkpoint": {"every_steps": 4}}
    document = job(tmp_path, "llama", LORA, 1, **options)
    assert run_ranks(tmp_path, document, world_size=1) == [0]
    refs = checkpoint_refs(tmp_path)
    assert [ref.step for ref in refs] == [8, 4]
    saved = checkpoint_files.load(refs[0]).state
    assert all(".lora_" in name for name in saved["model"])
    assert all(".lora_" in name for name in saved["optimizer"]["state"])
    assert len(saved["model"]) == 2 * 7 * tiny.SIZES["num_hidden_layers"]
    resumed = run_ranks(tmp_path, document, world_size=1, attempt=2, resume_from=refs[1:])
    assert resumed == [0]
    found, expected = stored(tmp_path, attempt=2), stored(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    tiny.make_base(tmp_path / "base", "llama", template=tiny.MARKED, seed=1, shard="20KB")
    changed = run_ranks(tmp_path, document, world_size=1, attempt=3, resume_from=refs[1:])
    assert changed == [1]
    (error,) = frames(tmp_path, attempt=3, kind="error")
    assert "was trained with other frozen weights" in error["message"]
