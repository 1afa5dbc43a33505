"""Sweeps over bases and tokenizers: each value is checked like that of a single job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dray.spec import JobSpec
from service.domain.errors import DataSourceForbidden, DomainError, InvalidDocument, OutOfMemory
from service.domain.sweeps.sampling import values_of
from service.sweeps import optuna_sampler
from tests.unit.service.helpers import Service
from tests.unit.service.planning.tuning_documents import LARGE

CONFIG = {**LARGE, "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048}


def make_folder(folder: Path, **config: Any) -> str:
    """Write a base without weights in its files, and return its URL."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes(b"x")
    return folder.as_uri()


@pytest.fixture
def fitting(tmp_path: Path) -> str:
    return make_folder(tmp_path / "fitting", num_hidden_layers=1)


def sweep_over(name: str, values: list[Any], sampler: str = "grid", **fields: Any) -> JobSpec:
    trials = {} if sampler == "grid" else {"trials": 40}
    sweep = {"metric": "val/loss", "sampler": sampler, "parameters": {name: values}, **trials}
    return JobSpec.model_validate({**fields, "sweep": sweep})


def tuning(values: list[Any], sampler: str = "grid", **fields: Any) -> JobSpec:
    given = {
        "recipe": "fine_tuning",
        "model": {"base": values[0], "adapter": "lora"},
        "data": {"source": "file:///examples.jsonl"},
    }
    return sweep_over("model.base", values, sampler, **{**given, **fields})


async def refusal(service: Service, spec: JobSpec) -> DomainError:
    with pytest.raises(DomainError) as refused:
        await service.jobs.submit(spec)
    assert (await service.jobs.list()).items == []
    return refused.value


SAMPLERS = ["grid", "random", "optuna"] if optuna_sampler.is_installed() else ["grid", "random"]


@pytest.mark.parametrize("sampler", SAMPLERS)
async def test_each_base_of_a_sweep_is_checked(
    service: Service, tmp_path: Path, fitting: str, sampler: str
) -> None:
    unfit = tmp_path / "unfit"
    bases = [fitting, make_folder(unfit), (tmp_path / "elsewhere").as_uri()]
    await service.jobs.submit(tuning(bases, sampler))  # the last one may be on the nodes
    for job in (await service.jobs.list()).items:
        await service.jobs.cancel(job.id)
        await service.jobs.delete(job.id)
    (unfit / "tokenizer.json").unlink()
    found = await refusal(service, tuning(bases, sampler))
    assert isinstance(found, InvalidDocument)
    assert found.pointer == "/sweep/parameters/model.base"
    assert found.message.startswith(f"with model.base {unfit.as_uri()}: {unfit} has no tokenizer")


async def test_a_base_that_cannot_fit_is_refused(
    service: Service, tmp_path: Path, fitting: str
) -> None:
    large = make_folder(tmp_path / "large", num_hidden_layers=40)
    resources = {"memory_bytes": "2GiB"}
    found = await refusal(service, tuning([fitting, large], resources=resources))
    assert isinstance(found, OutOfMemory)
    assert found.message.startswith(f"with model.base {large}: this job can't fit")
    assert found.hint


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://10.0.0.1/tokenizer.json", "jobs may not read from 10.0.0.1"),
        ("upload://file-00000000000000000000000000", "only the fields of data can name uploaded"),
    ],
)
async def test_each_tokenizer_of_a_sweep_is_checked(service: Service, url: str, why: str) -> None:
    fields = {"recipe": "language_model", "data": {"source": "file:///text.txt"}}
    spec = sweep_over("model.tokenizer", ["file:///tokenizer.json", url], **fields)
    found = await refusal(service, spec)
    assert isinstance(found, DataSourceForbidden | InvalidDocument)
    assert found.pointer == "/sweep/parameters/model.tokenizer"
    assert why in found.message
    assert found.message.startswith(f"with model.tokenizer {url}: ")


async def test_a_value_that_no_trial_has_is_not_checked(service: Service, fitting: str) -> None:
    """With one trial, the sampler draws only one of the values."""
    values = [fitting, "http://10.0.0.1/model"]
    for seed in range(8):
        document = tuning(values, "random").model_dump(mode="json")
        document["sweep"] |= {"trials": 1, "seed": seed}
        spec = JobSpec.model_validate(document)
        assert spec.sweep is not None
        if values_of(spec.sweep, 0)["model.base"] == fitting:
            job, _ = await service.jobs.submit(spec)
            assert job.spec["model"]["base"] == fitting
        else:
            with pytest.raises(DataSourceForbidden, match=r"10\.0\.0\.1"):
                await service.jobs.submit(spec)
