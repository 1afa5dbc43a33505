"""Finished jobs of fine-tuning tell how fast the workers compute."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dray import views
from dray.requests import PlanRequest
from ray_workers.shared.contracts import TOKENS
from service.planning.calibration import STEP_TIME
from tests.unit.service.helpers import Service, metrics, resumed
from tests.unit.service.planning.test_plans import plans_of
from tests.unit.service.planning.tuning_documents import LARGE

WIDTH, INNER, LAYERS, KV, VOCABULARY = 1024, 4096, 8, 256, 32000
IN_BLOCKS = LAYERS * (2 * WIDTH**2 + 2 * WIDTH * KV + 3 * WIDTH * INNER)
"""Number of weights of LARGE that are multiplied with every token, without the output layer."""
NUM_WEIGHTS = IN_BLOCKS + WIDTH * VOCABULARY
STEP_S, BATCH_SIZE = 2.0, 8


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    config = {**LARGE, "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes(b"x")
    return folder


def tuning(base: Path, method: str, adapter: str | None) -> dict[str, Any]:
    return {
        "recipe": "fine_tuning",
        "model": {"base": base.as_uri(), "adapter": adapter},
        "method": {"name": method, "max_length": 1024},
        "data": {"source": "file:///examples.jsonl"},
        "train": {"global_batch_size": BATCH_SIZE},
    }


async def ran(service: Service, given: dict[str, Any], **more: float) -> None:
    """Run a job that succeeds. more: metrics of each step, besides its duration."""
    job_id = await service.running(**given)
    steps = (metrics(step, {STEP_TIME: STEP_S, **more}) for step in range(1, 31))
    service.report(job_id, 1, [resumed(0), *steps])
    service.end(job_id, 1)


async def planned(service: Service, given: dict[str, Any]) -> views.Plan:
    return await plans_of(service).plan(PlanRequest.model_validate(given))


@pytest.mark.parametrize(
    ("method", "adapter", "operations"),
    [
        ("sft", None, 6 * NUM_WEIGHTS),  # forward, gradients of the inputs, and of the weights
        ("sft", "lora", 4 * NUM_WEIGHTS),
        ("dpo", None, 8 * NUM_WEIGHTS),
        ("dpo", "lora", 6 * NUM_WEIGHTS),
        ("reward", None, 6 * IN_BLOCKS),
    ],
)
async def test_the_speed_is_that_of_the_tokens_that_were_computed(
    service: Service, base: Path, method: str, adapter: str | None, operations: int
) -> None:
    """Compare with the usual estimate of operations per token and weight, for rows that are much
    shorter than `max_length`. Attention and the adapter's products are not part of the estimate."""
    given = tuning(base, method, adapter)
    before = await planned(service, given)
    assert "not measured" in before.calibration.source
    num_tokens = BATCH_SIZE * (1 if method == "sft" else 2) * 120
    await ran(service, given, **{TOKENS: num_tokens})
    after = await planned(service, given)
    assert after.calibration.source.startswith("speed measured in the last job")
    expected = operations * num_tokens / STEP_S
    assert after.calibration.flops_per_s == pytest.approx(expected, rel=0.06)
    (mesh,) = after.meshes
    assert mesh.step_time_s == pytest.approx(STEP_S * 1024 / 120, rel=0.1), "for full rows"


async def test_steps_of_unknown_length_and_bases_that_are_gone_say_nothing(
    service: Service, base: Path
) -> None:
    given = tuning(base, "sft", None)
    await ran(service, given)
    assert "not measured" in (await planned(service, given)).calibration.source
    other = base.with_name("other")
    shutil.copytree(base, other)
    await ran(service, tuning(other, "sft", None), **{TOKENS: 1000.0})
    assert "speed measured" in (await planned(service, given)).calibration.source
    shutil.rmtree(other)
    assert "not measured" in (await planned(service, given)).calibration.source
