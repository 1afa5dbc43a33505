"""The documents of fine-tuning: short forms, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from dray.spec import JobSpec, Lora, Pretrained, Sft
from tests.unit.spec.job_documents import check_refusal, images, recipe

BASE = {"base": "file:///model"}
NF4 = {"kind": "lora", "base_precision": "nf4"}
BF16 = {"precision": "bf16"}
SHARDED = {"resources": {"num_workers": 2}, "parallel": {"shard": 2}}


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
        ({"model": {"base": "./llama"}}, "/model/pretrained/base", "is neither a name"),
        ({"model": {"base": "https:///c"}}, "/model/pretrained/base", "names no host"),
        ({"model": {"base": "hf://org/name"}}, "/model/pretrained/base", "on the hub and a commit"),
        ({"model": {"base": "hf://org/name@main"}}, "/model/pretrained/base", "40 hexadecimal"),
        (
            {"model": {"base": f"hf://org/../name@{'0' * 40}"}},
            "/model/pretrained/base",
            "hf://org/name@COMMIT",
        ),
        ({"model": {"name": "gpt"}}, "/model/name", "must be one of pretrained"),
        ({"model": {**BASE, "adapter": "ia3"}}, "/model/pretrained/adapter/kind", "'lora'"),
        (
            {"model": {**BASE, "adapter": {"kind": "dora", "base_precision": "bf16"}}},
            "/model/adapter/base_precision",
            "set train.precision to bf16",
        ),
        (
            {"model": {**BASE, "adapter": NF4}},
            "/model/adapter/base_precision",
            "is nf4, but train.precision is fp32",
        ),
        (
            {"model": {**BASE, "adapter": {**NF4, "kind": "dora"}}, "train": BF16},
            "/model/adapter/base_precision",
            "set adapter.kind to lora",
        ),
        (
            {"model": {**BASE, "adapter": NF4}, "train": BF16, **SHARDED},
            "/model/adapter/base_precision",
            "set parallel.zero to 1",
        ),
        (
            {"model": {**BASE, "adapter": NF4}, "train": BF16, "parallel": "auto"},
            "/model/adapter/base_precision",
            "can't be divided by parallel.shard",
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
        ({"data": {"source": "file:///a.npz"}}, "/data/source", "reads only jsonl, parquet, csv"),
        (
            {"data": {"sources": [{"source": "file:///a.jsonl"}, {"source": "file:///b.zip"}]}},
            "/data/sources/1/source",
            "is images, but this recipe reads only jsonl, parquet, csv",
        ),
        ({"data": {"sources": []}}, "/data/sources", "at least 1 item"),
        (
            {"data": {"source": "file:///c.jsonl", "sources": [{"source": "file:///a.jsonl"}]}},
            "/data",
            "source and sources can't be combined",
        ),
        (
            {"data": {"sources": [{"source": "file:///a.jsonl"}], "sha256": "0" * 64}},
            "/data",
            "are only for a single source",
        ),
        (
            {"data": {"sources": [{"source": "file:///a.jsonl", "repeat": float("nan")}]}},
            "/data/sources/0/repeat",
            "finite number",
        ),
        (
            {"data": {"sources": [{"source": "file:///a.jsonl", "repeat": 0}]}},
            "/data/sources/0/repeat",
            "greater than or equal to 0.001",
        ),
        ({"data": {"sources": [{"source": "a.jsonl"}]}}, "/data/source", "must be a URL"),
        (
            {"data": {"source": "file:///a.jsonl", "examples": "chat"}},
            "/data/examples",
            "'sharegpt'",
        ),
        (
            {"data": {"source": "file:///a.jsonl", "validation": "file:///v.txt"}},
            "/data/validation",
            "is text, but",
        ),
        (
            {"data": {"source": "file:///a.csv", "target": "x"}},
            "/data/target",
            "is not for the recipe fine_tuning",
        ),
        (
            {"data": {"source": "file:///a.jsonl", "delimiter": ";"}},
            "/data/delimiter",
            "is only for csv, but the format of the data is jsonl",
        ),
        (
            {"model": {**BASE, "trust_remote_code": True}},
            "/model/pretrained/trust_remote_code",
            "",
        ),
        ({"train": {"ema": {}}}, "/train/ema", "is not supported by the recipe fine_tuning"),
        ({"train": {"compile": True}}, "/train/compile", "is not supported"),
        (
            {"method": "dpo", "data": {"source": "file:///a.jsonl", "examples": "messages"}},
            "/data/examples",
            "is for the method sft, but the method is dpo: leave it out",
        ),
        (
            {
                "method": "reward",
                "data": {
                    "sources": [
                        {"source": "file:///a.jsonl"},
                        {"source": "file:///b.jsonl", "examples": "text"},
                    ]
                },
            },
            "/data/sources/1/examples",
            "is for the method sft, but the method is reward",
        ),
        (
            {"method": "reward", "samples": {"prompts": ["a"]}},
            "/samples",
            "is for the methods sft and dpo, but the method is reward",
        ),
        ({"method": {"metrics": {"a": "b"}}}, "/method/sft/metrics/a", "must be MODULE:NAME"),
        ({"method": {"metrics": {"loss": "m:A"}}}, "/method/sft/metrics/loss/[key]", "one of dray"),
        ({"method": {"metrics": {"a/b": "m:A"}}}, "/method/sft/metrics/a/b/[key]", "match pattern"),
        (
            {
                "method": {"metrics": {"a": "m:A"}},
                "resources": {"num_workers": 2},
                "elastic": {"min_workers": 1},
            },
            "/method/metrics",
            "can't be used with elastic.min_workers",
        ),
        (
            {"model": {"base": "file:///a", "code": f"code-{'0' * 32}"}},
            "/model/code",
            "is only for the classes of method.metrics",
        ),
        (
            {"method": {"metrics": {"a": "m:A"}}, "checkpoint": {"best": "val/b"}},
            *("/checkpoint/best", "val/a"),
        ),
        ({"samples": {}}, "/samples/prompts", "Field required"),
        ({"samples": {"prompts": []}}, "/samples/prompts", "at least 1 item"),
        ({"samples": {"prompts": ["a"] * 17}}, "/samples/prompts", "at most 16 items"),
        ({"samples": {"prompts": [""]}}, "/samples/prompts/0/text", "at least 1 character"),
        ({"samples": {"prompts": [[]]}}, "/samples/prompts/0/messages", "at least 1 item"),
        ({"samples": {"prompts": [3]}}, "/samples/prompts/0/messages", "valid list"),
        (
            {"samples": {"prompts": [[{"role": "bot", "content": "a"}]]}},
            *("/samples/prompts/0/messages/0/role", "'assistant'"),
        ),
        ({"samples": {"prompts": ["a" * 8193]}}, "/samples/prompts/0/text", "at most 8192"),
        ({"samples": {"prompts": ["a"], "max_tokens": 513}}, "/samples/max_tokens", "512"),
        ({"samples": {"prompts": ["a"], "max_tokens": 0}}, "/samples/max_tokens", "or equal to 1"),
        ({"samples": {"prompts": ["a"], "temperature": -1}}, "/samples/temperature", "equal to 0"),
        (
            {"samples": {"prompts": ["a"], "temperature": float("nan")}},
            *("/samples/temperature", "finite"),
        ),
        (
            {"samples": {"prompts": ["a"]}, "method": {"max_length": 64}},
            *("/samples/max_tokens", "must be less than method.max_length, which is 64"),
        ),
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


def test_options_of_examples_are_only_for_fine_tuning() -> None:
    for option, value in (
        ("examples", "text"),
        ("validation", "file:///v.jsonl"),
        ("sources", [{"source": "file:///a.zip"}]),
    ):
        data = {"source": "file:///a.zip", option: value}
        check_refusal(images(data=data), f"/data/{option}", "only for the recipe fine_tuning")


def test_several_sources_are_written_once() -> None:
    """The document that a user reads again has only `sources`, with which it is valid."""
    given = {
        "sources": [{"source": "file:///a.csv", "repeat": 2}, {"source": "file:///b.jsonl"}],
        "delimiter": ";",
    }
    spec = JobSpec.model_validate(tuning(data=given))
    assert spec.data.source == "file:///a.csv"
    for written in (spec.as_given(), spec.without_defaults(), spec.model_dump(mode="json")):
        assert JobSpec.model_validate(written) == spec
    assert [one.known_format for one in spec.data.mixed] == ["csv", "jsonl"]


def test_a_method_is_only_for_fine_tuning() -> None:
    check_refusal(images(method="sft"), "/method", "is only for the recipe fine_tuning")
    samples = {"prompts": ["a"]}
    check_refusal(images(samples=samples), "/samples", "is only for the recipe fine_tuning")
    check_refusal(images(model=BASE | {"name": "pretrained"}), "/model/name", "must be one of cnn")


def test_other_kinds_of_sync_are_refused() -> None:
    """Each kind of sync that is not a plain all-reduce, in which ranks would weight tokens of
    different batches."""
    for sync in ({"kind": "parameter_server", "servers": 1}, {"every": 4}, "auto"):
        check_refusal(tuning(resources={"num_workers": 3}, sync=sync), "/sync", "is not supported")
