"""Texts that a model generates at its evaluations: the texts of transformers, and no effect on
training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import dray
from dray.spec import JobSpec
from ray_workers import recipes
from ray_workers.datasets.core.errors import DataError
from ray_workers.recipes.fine_tuning import Writer
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.loop.text_samples import TextSampler
from tests.marks import SOAK, soak_but
from tests.unit.recipes import tiny_models as tiny
from tests.unit.training.elastic.test_recovery import die
from tests.unit.training.jobs import series
from tests.unit.training.loop.test_fine_tuning_runs import LORA, artifacts, job, stored
from tests.unit.training.loop.test_preference_runs import DPO
from tests.unit.training.loop.test_preference_runs import job as preference_job
from tests.unit.training.ranks import frames, replaced, run_ranks

PROMPTS: list[Any] = [
    "the cat",
    [{"role": "system", "content": "the red tree"}, {"role": "user", "content": "likes"}],
    "a dog sees the blue house and",
]
SAMPLES = {"prompts": PROMPTS, "max_tokens": 9}


def run(home: Path, adapter: Any, num_ranks: int, fault: Any = None, **fields: Any) -> list[Any]:
    """Run a job, and return its samples."""
    home.mkdir(exist_ok=True)
    fields["train"] = {"optimizer": {"name": "adamw", "lr": 0.001}, **fields.get("train", {})}
    document = job(home, "llama", adapter, num_ranks, dtype=torch.float32, **fields)
    codes = run_ranks(
        home, document, world_size=num_ranks, before=fault, recovers=fault is not None
    )
    assert codes == [0] * num_ranks
    return frames(home, kind="samples")


CASES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "alone": (None, 1, {}),
    "one at a time": (None, 1, {"train": {"micro_batch_size": 1}}),
    "two ranks": (None, 2, {}),
    "two ranks, exact": (None, 2, {"elastic": {"exact": True, "min_workers": 1}}),
    "sharded": (None, 2, {"parallel": {"shard": 2}}),
    "LoRA": (LORA, 1, {}),
    "LoRA, sharded, packed": (LORA, 2, {"parallel": {"shard": 2}, "method": {"packing": True}}),
    "bf16, recomputed": (
        *(None, 2),
        {"parallel": {"shard": 2}, "train": {"precision": "bf16", "recompute": "full"}},
    ),
}


@pytest.mark.parametrize("case", soak_but(CASES, short={"LoRA, sharded, packed", "two ranks"}))
def test_samples_change_no_bit_and_are_the_texts_of_transformers(tmp_path: Path, case: str) -> None:
    adapter, num_ranks, fields = CASES[case]
    if adapter is not None:
        adapter = {**adapter, "dropout": 0.2}
    assert run(tmp_path / "without", adapter, num_ranks, **fields) == []
    found = run(tmp_path / "with", adapter, num_ranks, **fields, samples=SAMPLES)
    weights, expected = stored(tmp_path / "with"), stored(tmp_path / "without")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    losses = [series(tmp_path / name, "val/loss") for name in ("with", "without")]
    assert losses[0] == losses[1]
    assert [one["step"] for one in found] == list(losses[0])
    if "bf16" in case:  # transformers would compute another text in float32
        return
    model = dray.load(artifacts(tmp_path / "with"))
    texts = [model.predict(prompt, num_tokens=SAMPLES["max_tokens"]) for prompt in PROMPTS]
    assert found[-1]["texts"] == texts
    assert len({text for one in found for text in one["texts"]}) > 1


PREFERENCES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "adapter": (LORA, 1, {}),
    "adapter, sharded": (LORA, 2, {"parallel": {"shard": 2}}),
    "all weights, sharded": (None, 2, {"parallel": {"shard": 2}}),
}


@pytest.mark.parametrize("case", soak_but(PREFERENCES, short={"adapter, sharded"}))
def test_a_model_of_preferences_answers_like_its_result(tmp_path: Path, case: str) -> None:
    """With the adapter on, and not like the reference."""
    adapter, num_ranks, fields = PREFERENCES[case]
    results = []
    for name, more in (("without", {}), ("with", {"samples": SAMPLES})):
        (home := tmp_path / name).mkdir()
        options = {**fields, **more, "dtype": torch.float32}
        document = preference_job(home, "llama", DPO, adapter, num_ranks, **options)
        assert run_ranks(home, document, world_size=num_ranks) == [0] * num_ranks
        results.append(stored(home))
    assert all(torch.equal(results[1][name], tensor) for name, tensor in results[0].items())
    found = frames(tmp_path / "with", kind="samples")
    assert [one["step"] for one in found] == list(series(tmp_path / "with", "val/loss"))
    model = dray.load(artifacts(tmp_path / "with"))
    texts = [model.predict(prompt, num_tokens=SAMPLES["max_tokens"]) for prompt in PROMPTS]
    assert found[-1]["texts"] == texts
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "with" / "base")
    assert [
        Writer(base, model.tokenizer).predict(prompt, num_tokens=SAMPLES["max_tokens"])
        for prompt in PROMPTS
    ] != texts


def test_random_texts_are_the_same_in_each_run(tmp_path: Path) -> None:
    options = {**SAMPLES, "temperature": 3.0}
    runs = [run(tmp_path / name, LORA, 1, samples=options) for name in ("one", "other")]
    assert runs[0] == runs[1]
    greedy = run(tmp_path / "greedy", LORA, 1, samples=SAMPLES)
    assert greedy[-1]["texts"] != runs[0][-1]["texts"]
    assert stored(tmp_path / "one").keys() == stored(tmp_path / "greedy").keys()


def die_while_generating(task: RankTask) -> None:
    """Kill rank 1 at the fourth token of the second evaluation."""
    if task.rank != 1 or task.incarnation:
        return
    generate, chosen = TextSampler.sample, TextSampler._chosen
    calls: list[int] = []

    def sample(self: TextSampler, step: int, *given: Any) -> None:
        calls.append(step)
        generate(self, step, *given)

    def choose(self: TextSampler, *given: Any) -> Any:
        if len(calls) == 2:
            calls.extend([0])
        if len(calls) == 5:
            die()
        if len(calls) > 2:
            calls.append(0)
        return chosen(self, *given)

    TextSampler.sample = sample  # type: ignore[method-assign]
    TextSampler._chosen = choose  # type: ignore[method-assign]


@SOAK
@pytest.mark.parametrize("parallel", ["replicas", "sharded"])
def test_a_rank_that_is_killed_while_it_generates_changes_nothing(
    tmp_path: Path, parallel: str
) -> None:
    fields = {"parallel": {"shard": 2} if parallel == "sharded" else {}, "train": {"epochs": 3}}
    expected = run(tmp_path / "one", LORA, 2, samples=SAMPLES, **fields)
    found = run(tmp_path / "other", LORA, 2, die_while_generating, samples=SAMPLES, **fields)
    assert replaced(tmp_path / "other") == [1]
    weights, whole = stored(tmp_path / "other"), stored(tmp_path / "one")
    assert all(torch.equal(weights[name], tensor) for name, tensor in whole.items())
    by_step = {one["step"]: one["texts"] for one in found}
    assert by_step == {one["step"]: one["texts"] for one in expected}


@pytest.mark.parametrize(
    ("prompts", "fault"),
    [
        ([[{"role": "user", "content": "x"}]], "has no chat template"),
        (["the cat " * 40], "exceeds method.max_length .64."),
    ],
)
def test_a_prompt_that_cannot_be_used_is_named_before_training(
    tmp_path: Path, prompts: Sequence[Any], fault: str
) -> None:
    base = tiny.make_base(tmp_path / "base", template=None)
    lines = tiny.write_lines(tmp_path / "d.jsonl", tiny.texts(20))
    document = tiny.document(
        base, lines, samples={"prompts": ["the dog", *prompts], "max_tokens": 8}
    )
    with pytest.raises(DataError, match=rf"samples\.prompts\[1\].*{fault}"):
        recipes.RECIPES["fine_tuning"].build(JobSpec.model_validate(document), DataPolicy.open())
