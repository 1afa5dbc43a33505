"""The documents of fine-tuning: short forms, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from dray.spec import JobSpec, Lora, Pretrained, Sft
from tests.unit.spec.job_documents import check_refusal, images, recipe

BASE = {"base": "file:///model"}


def tuning(**fields: Any) -> dict[str, Any]:
    return recipe("fine_tuning", **fields)


def test_short_forms_are_the_defaults() -> None:
    spec = JobSpec.model_validate(tuning(model={**BASE, "adapter": "lora"}, method="sft"))
    assert spec.model == Pretrained(base="file:///model", adapter=Lora())
    assert spec.method == Sft()
    plain = JobSpec.model_validate(tuning(model={**BASE, "adapter": "none"}))
    assert plain == JobSpec.model_validate(tuning())
    assert plain.method == Sft()


def test_a_document_is_the_same_after_it_was_written() -> None:
    spec = JobSpec.model_validate(tuning(model={**BASE, "adapter": {"rank": 4}}))
    for written in (spec.as_given(), spec.without_defaults(), spec.model_dump(mode="json")):
        assert JobSpec.model_validate(written) == spec


@pytest.mark.parametrize(
    ("fields", "pointer", "message"),
    [
        ({"model": {}}, "/model/pretrained/base", "Field required"),
        ({"model": {"base": "sklearn://iris"}}, "/model/pretrained/base", "URL of a folder"),
        ({"model": {"base": "llama"}}, "/model/pretrained/base", "must be a URL"),
        ({"model": {"base": "https://a.b/c"}}, "/model/pretrained/base", "s3://bucket/prefix"),
        ({"model": {"name": "gpt"}}, "/model/name", "must be one of pretrained"),
        ({"model": {**BASE, "adapter": "ia3"}}, "/model/pretrained/adapter/kind", "'lora'"),
        (
            {"model": {**BASE, "adapter": {"kind": "dora", "base_precision": "bf16"}}},
            "/model/adapter/base_precision",
            "set train.precision to bf16",
        ),
        ({"method": "kto"}, "/method", "'sft', 'dpo', 'reward'"),
        ({"method": {"max_length": 1}}, "/method/sft/max_length", "greater than or equal to 2"),
        ({"method": {"name": "dpo", "beta": 0}}, "/method/dpo/beta", "greater than 0"),
        ({"method": {"name": "dpo", "packing": True}}, "/method/dpo/packing", "not permitted"),
        ({"method": {"name": "reward", "beta": 0.1}}, "/method/reward/beta", "not permitted"),
        (
            {"method": {"name": "dpo", "loss": "ipo", "label_smoothing": 0.1}},
            "/method/label_smoothing",
            "is only for the loss sigmoid",
        ),
        (
            {"method": "dpo", "init_from": {"job": "job-1"}},
            "/init_from",
            "set model.base to the result of the other job",
        ),
        (
            {"method": "dpo", "checkpoint": {"best": "val/perplexity"}},
            "/checkpoint/best",
            "val/rewards/margins, val/rewards/accuracies for this recipe",
        ),
        (
            {"checkpoint": {"best": "val/rewards/margins"}},
            "/checkpoint/best",
            "must be one of val/loss, val/perplexity, val/accuracy",
        ),
        ({"data": {"source": "file:///a.csv"}}, "/data/source", "reads only jsonl"),
        ({"train": {"ema": {}}}, "/train/ema", "is not supported by the recipe fine_tuning"),
        ({"train": {"compile": True}}, "/train/compile", "is not supported"),
        (
            {"resources": {"num_workers": 2}, "parallel": {"tensor": 2}},
            "/parallel/tensor",
            "Use parallel.shard",
        ),
        (
            {"resources": {"num_workers": 2}, "parallel": {"balance": "auto"}},
            "/parallel/balance",
            "is not supported",
        ),
        (
            {"resources": {"num_workers": 2}, "sync": {"kind": "gossip"}},
            "/sync",
            "is not supported",
        ),
        (
            {"resources": {"num_workers": 2}, "sync": {"compression": {"name": "bf16"}}},
            "/sync",
            "is not supported",
        ),
    ],
)
def test_what_does_not_fit_is_refused(fields: Any, pointer: str, message: str) -> None:
    check_refusal(tuning(**fields), pointer, message)


def test_a_method_is_only_for_fine_tuning() -> None:
    check_refusal(images(method="sft"), "/method", "is only for the recipe fine_tuning")
    check_refusal(images(model=BASE | {"name": "pretrained"}), "/model/name", "must be one of cnn")


def test_other_kinds_of_sync_are_refused() -> None:
    """Each kind of sync that is not a plain all-reduce, in which ranks would weight tokens of
    different batches."""
    for sync in ({"kind": "parameter_server", "servers": 1}, {"every": 4}, "auto"):
        check_refusal(tuning(resources={"num_workers": 3}, sync=sync), "/sync", "is not supported")
