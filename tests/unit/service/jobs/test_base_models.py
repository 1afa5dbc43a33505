"""Checks, at submission, of a base model that the server can read."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dray.spec import JobSpec
from ray_workers.shared.node_needs import DataPolicy
from service.domain.errors import DataSourceForbidden, InvalidDocument
from service.jobs import base_models, data_policy
from service.planning import base_config

CONFIG = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 128}


def job(base: Path, max_length: int = 64) -> JobSpec:
    return JobSpec.model_validate(
        {
            "recipe": "fine_tuning",
            "model": {"base": base.as_uri()},
            "method": {"name": "sft", "max_length": max_length},
            "data": {"source": "https://example.org/d.jsonl"},
        }
    )


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes(b"x")
    return folder


async def refusal(base: Path, **options: Any) -> str | None:
    """Return the pointer and the message of the refusal."""
    try:
        await base_models.refuse_unfit(job(base, **options), DataPolicy.open())
    except InvalidDocument as error:
        return f"{error.pointer}: {error.message}"
    return None


async def test_a_base_that_fits_is_accepted(base: Path) -> None:
    assert await refusal(base) is None
    assert await refusal(base / "elsewhere") is None, "it may be on the nodes only"


async def test_what_is_missing_is_named_before_the_job_waits(base: Path) -> None:
    found = await refusal(base, max_length=129)
    assert found is not None
    assert found.startswith("/model/base: ")
    assert "set it to 128 or less" in found
    for name, message in (
        ("tokenizer.json", "has no tokenizer"),
        ("model.safetensors", "has no weights"),
        ("config.json", "has no config.json"),
    ):
        (base / name).unlink()
        assert message in (await refusal(base) or "")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is not a JSON document"),
        ("[" * 100_000, "is not a JSON document"),
        ("[]", "is not a JSON object"),
        ("{}", "names no architecture"),
        ('{"architectures": ["ViT"]}', "belongs to a ViT"),
        ('{"architectures": [7]}', "names no architecture"),
        (
            '{"architectures": ["GPT2LMHeadModel"], "n_positions": 32}',
            "allows 32 positions (n_positions)",
        ),
    ],
)
async def test_an_unfit_config_is_refused(base: Path, config: str, message: str) -> None:
    (base / "config.json").write_text(config)
    assert message in (await refusal(base) or "")


async def test_only_a_small_regular_file_is_read(base: Path) -> None:
    """A pipe would block the request, and the beginning of a large document is not a document."""
    (base / "config.json").write_text(json.dumps({"padding": "x" * base_config.MAX_CONFIG_BYTES}))
    assert await refusal(base) is None
    (base / "config.json").unlink()
    os.mkfifo(base / "config.json")
    assert await refusal(base) is None


async def test_the_message_quotes_only_the_beginning_of_a_name(base: Path) -> None:
    (base / "config.json").write_text(json.dumps({"architectures": ["x" * 10_000]}))
    assert len(await refusal(base) or "") < 1_000


async def test_pickled_weights_are_refused(base: Path) -> None:
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    assert "has only pickled weights" in (await refusal(base) or "")


async def test_nothing_outside_of_the_allowed_folders_is_read(base: Path, tmp_path: Path) -> None:
    (base / "config.json").write_text("{")
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    policy = replace(DataPolicy.open(), file_roots=(str(allowed),))
    with pytest.raises(DataSourceForbidden) as raised:
        await data_policy.refuse_forbidden(job(base), policy)
    assert raised.value.pointer == "/model/base"
    link = allowed / "link"
    link.symlink_to(base)
    await data_policy.refuse_forbidden(job(link), policy)
    await base_models.refuse_unfit(job(link), policy)  # the node refuses it
    (base / "config.json").unlink()
    (base / "config.json").symlink_to("/etc/passwd")
    await base_models.refuse_unfit(job(base), DataPolicy.open())
