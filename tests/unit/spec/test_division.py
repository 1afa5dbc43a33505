"""Divisions of a model that conflict with the rest of a document."""

from __future__ import annotations

from typing import Any

import pytest

from dray.spec import JobSpec
from tests.unit.spec.job_documents import SCRIPT, check_refusal, divided, images, recipe


def divided_gpt(parallel: dict[str, Any], **model: Any) -> dict[str, Any]:
    """A language model of four workers."""
    return recipe(
        "language_model",
        resources={"num_workers": 4},
        parallel=parallel,
        model={"num_layers": 4, "num_heads": 4, "width": 32, "context_length": 32, **model},
    )


@pytest.mark.parametrize(
    ("document", "pointer", "message"),
    [
        (
            divided({"shard": 3}),
            "/parallel/shard",
            "does not divide resources.num_workers (4): set num_workers to 6, or",
        ),
        (
            divided_gpt({"tensor": 2, "pipeline": 3}),
            "/parallel/pipeline",
            "results in the product 6 (tensor 2 x pipeline 3), which does not divide "
            "resources.num_workers (4): set num_workers to 6, or pipeline to 4",
        ),
        (divided({"shard": 2, "data": 4}), "/parallel/data", "but must be 2"),
        (divided({"tensor": 2}), "/parallel/tensor", "Use parallel.shard, which works with"),
        (divided({"pipeline": 2}), "/parallel/pipeline", "is only for gpt and resnet"),
        (divided({"context": 2}), "/parallel/context", "is only for gpt"),
        (
            divided({"pipeline": 4}, model={"name": "resnet", "depth": 8}),
            "/parallel/pipeline",
            "results in 4 stages, but the model has only 3 blocks: pipeline must be 3 or less",
        ),
        (divided_gpt({"tensor": 2, "zero": 1}), "/parallel/zero", "must be 2 or 3 with tensor"),
        (
            divided_gpt({"tensor": 2, "zero": 2}),
            "/parallel/zero",
            "requires parallel.shard above 1",
        ),
        (divided({"zero": 1}), "/parallel/zero", "requires parallel.shard above 1"),
        (divided({"auto": ["shard", "shard"]}), "/parallel/shard", "is set to auto more than once"),
        (
            divided({"auto": ["shard"], "shard": "auto"}),
            "/parallel/shard",
            "is set to auto more than once",
        ),
        (divided({"auto": ["shard"], "shard": 2}), "/parallel/shard", "but also has a size"),
        (divided({"schedule": "gpipe"}), "/parallel/schedule", "parallel.pipeline above 1"),
        (divided({"stages_per_rank": 2}), "/parallel/stages_per_rank", "pipeline above 1"),
        (
            divided_gpt({"pipeline": 2, "stages_per_rank": 2}),
            "/parallel/stages_per_rank",
            "not to 1f1b",
        ),
        (
            divided_gpt({"pipeline": 4, "stages_per_rank": 2, "schedule": "interleaved"}),
            "/parallel/pipeline",
            "only 4 layers (model.num_layers): pipeline x stages_per_rank must be 4 or less",
        ),
        (
            divided_gpt({"tensor": 4}, num_heads=2),
            "/parallel/tensor",
            "must divide model.num_heads, which is 2",
        ),
        (
            divided_gpt({"tensor": 2, "context": 2}, num_heads=2),
            "/parallel/tensor",
            "(tensor x context is 4)",
        ),
        (
            divided_gpt({"context": 4}, context_length=30),
            "/parallel/context",
            "must divide model.context_length, which is 30",
        ),
        (
            divided({"shard": 2}, train={"measure_noise": True}),
            "/train/measure_noise",
            "only applies to data parallelism",
        ),
        (
            divided({"balance": "auto"}, train={"measure_noise": True}),
            "/train/measure_noise",
            "can't be combined with elastic.exact, with sync or with",
        ),
        (
            divided({}, train={"measure_noise": True, "precision": "fp16"}),
            "/train/measure_noise",
            "requires train.precision fp32 or bf16",
        ),
        (
            divided({"shard": 2, "balance": "auto"}),
            "/parallel/balance",
            "must be `even` with shard",
        ),
        (
            divided({"balance": "auto"}, elastic={"min_workers": 1, "exact": True}),
            "/parallel/balance",
            "must be `even` with elastic.exact",
        ),
        (
            divided({"balance": "auto"}, sync={"compression": {"name": "fp16"}}),
            "/parallel/balance",
            "must be `even` with sync.compression",
        ),
        (SCRIPT | {"parallel": {"balance": "auto"}}, "/parallel/balance", "is only for recipes"),
        (
            divided({}, train={"recompute": "full"}),
            "/train/recompute",
            "is only for models that consist of blocks",
        ),
        (
            divided_gpt({"pipeline": 2, "schedule": "zero_bubble"})
            | {"train": {"recompute": "full"}},
            "/train/recompute",
            "must be none with the schedule zero_bubble",
        ),
        (
            divided_gpt({"pipeline": 2, "schedule": "zero_bubble"}) | {"train": {"compile": True}},
            "/train/compile",
            "must be false with the schedule zero_bubble",
        ),
        *(
            (
                divided({}, train={"precision": "fp16"}, sync={"compression": {"name": name}}),
                "/train/precision",
                f"must be fp32 or bf16 with {name}",
            )
            for name in ("topk", "powersgd")
        ),
        (
            divided({}, train={"optimizer": {"name": "adamw", "offload": True}}),
            "/train/optimizer/offload",
            "requires gpus_per_worker 1",
        ),
        (
            divided({}, train={"optimizer": {"name": "sgd", "state_dtype": "bf16"}}),
            "/train/optimizer/state_dtype",
            "sgd with a momentum of 0, which has no state",
        ),
        (
            divided({"shard": 2, "zero": 1}, train={"optimizer": {"state_dtype": "bf16"}}),
            "/train/optimizer/state_dtype",
            "requires parallel.zero 2 or 3",
        ),
        (
            divided({"param_dtype": "bf16"}),
            "/parallel/param_dtype",
            "set parallel.shard or parallel.context to more than 1",
        ),
        (
            divided({"shard": 2, "zero": 1, "reduce_dtype": "bf16"}),
            "/parallel/reduce_dtype",
            "parallel.zero to 2 or 3",
        ),
        (
            divided({"shard": 2, "param_dtype": "bf16"}, train={"precision": "fp16"}),
            "/parallel/param_dtype",
            "requires train.precision bf16",
        ),
        (
            divided({"shard": 2, "reduce_dtype": "fp16"}, train={"precision": "bf16"}),
            "/parallel/reduce_dtype",
            "fp16 requires train.precision fp16",
        ),
        (
            divided({"shard": 2}, elastic={"min_workers": 3}),
            "/elastic/min_workers",
            "is 3, but must be a multiple of 2, the number of workers that hold one replica of the "
            "model: set it to 2 or 4",
        ),
        (
            divided_gpt(
                {"tensor": 2, "pipeline": 2},
            )
            | {"elastic": {"min_workers": 1}},
            "/elastic/min_workers",
            "must be a multiple of 4, the number of workers that hold one replica of the model: "
            "set it to 4",
        ),
        (
            divided({"shard": 2}, elastic={"min_workers": 2, "exact": True}),
            "/elastic/exact",
            "requires parallel.shard to be 1: ranks that divide a model compute",
        ),
        (
            SCRIPT
            | {"resources": {"num_workers": 4}, "parallel": {"shard": 2}}
            | {"elastic": {"min_workers": 2}},
            "/elastic",
            "scripts whose ranks divide a model do not recover in place",
        ),
        (
            divided({"shard": 2}, sync={"compression": {"name": "fp16"}}),
            "/sync/compression",
            "requires parallel.shard to be 1, or parallel.zero to be 1: torch can't compress the "
            "sharded gradients of FSDP2. To halve the traffic, set parallel.reduce_dtype to bf16",
        ),
        (
            divided_gpt({"tensor": 2}) | {"sync": {"compression": {"name": "fp16"}}},
            "/sync/compression",
            "requires parallel.tensor to be 1: compression applies to complete gradients",
        ),
        (divided({"shard": 2}, sync={"every": 4}), "/sync/every", "no rank has the complete state"),
        (
            divided({"shard": 2, "zero": 1}, sync={"every": 4}),
            "/sync/every",
            "no rank has the complete state",
        ),
        (
            divided(
                {},
                train={"optimizer": {"name": "sgd", "momentum": 0.9, "state_dtype": "bf16"}},
                sync={"compression": {"name": "topk"}},
            ),
            "/train/optimizer/state_dtype",
            "topk, because topk stores the momentum",
        ),
        (
            divided_gpt({"tensor": 2}) | {"train": {"compile": True}},
            "/train/compile",
            "must be false with parallel.tensor",
        ),
        (divided({"shard": 2}, train={"ema": {}}), "/train/ema", "requires parallel.shard to be 1"),
        (
            divided({"shard": 2}, train={"optimizer": {"name": "lamb"}}),
            "/train/optimizer/name",
            "needs complete layers",
        ),
        (
            SCRIPT | {"parallel": {"pipeline": 2}, "resources": {"num_workers": 2}},
            "/parallel/pipeline",
            "train.prepare() supports parallel.shard and parallel.tensor",
        ),
        (
            SCRIPT | {"parallel": {"shard": 2, "tensor": 2}, "resources": {"num_workers": 6}},
            "/parallel/tensor",
            "does not divide resources.num_workers (6)",
        ),
        (
            SCRIPT | {"parallel": {"shard": 2, "zero": 2}, "resources": {"num_workers": 2}},
            "/parallel/zero",
            "must be 3 for a script",
        ),
        (
            SCRIPT
            | {"parallel": {"shard": 2, "reduce_dtype": "bf16"}, "resources": {"num_workers": 2}},
            "/parallel/reduce_dtype",
            "is only for recipes",
        ),
        (
            {
                "script": {"entrypoint": "x.py", "framework": "jax"},
                "parallel": {"shard": 2},
                "resources": {"num_workers": 2},
            },
            "/parallel",
            "requires a script with `framework: torch` and no roles",
        ),
        (images(parallel={"data": 2}), "/parallel/data", "resources.num_workers is 1"),
    ],
)
def test_a_division_fits_the_rest_of_the_document(
    document: dict[str, Any], pointer: str, message: str
) -> None:
    check_refusal(document, pointer, message)


IN_MEMORY = {"checkpoint": {"in_memory": {"every_steps": 5}}}


@pytest.mark.parametrize(
    ("document", "pointer", "message"),
    [
        (images(**IN_MEMORY), "/checkpoint/in_memory", "requires resources.num_workers 2 or more"),
        (
            images(resources={"num_workers": 4}, **IN_MEMORY),
            "/checkpoint/in_memory",
            "is only for models that are divided among workers",
        ),
        (divided({"shard": 2}, **IN_MEMORY), "/checkpoint/in_memory", "not needed with replicas"),
        (
            divided({"shard": 4, "zero": 1}, sync={"compression": {"name": "bf16"}}, **IN_MEMORY),
            "/checkpoint/in_memory",
            "can't be combined with sync.compression",
        ),
        (
            divided({"shard": 4}, checkpoint={"in_memory": {"every_steps": 5, "copies": 4}}),
            "/checkpoint/in_memory/copies",
            "which keep a worker's copies, is 3: set it to 3 or less",
        ),
        (SCRIPT | {"resources": {"num_workers": 2}} | IN_MEMORY, "/checkpoint/in_memory", "only"),
    ],
)
def test_copies_in_memory_that_can_not_help_are_refused(
    document: dict[str, Any], pointer: str, message: str
) -> None:
    check_refusal(document, pointer, message)


def test_copies_in_memory_are_kept_by_default_only_for_a_divided_model_without_replicas() -> None:
    def keeps(document: dict[str, Any]) -> bool:
        return JobSpec.model_validate(document).keeps_state_in_memory

    assert keeps(divided({"shard": 4}))
    assert not keeps(divided({"shard": 4}, checkpoint={"in_memory": "off"}))
    on_gpus = {"resources": {"num_workers": 4, "gpus_per_worker": 1}}
    assert not keeps(divided({"shard": 4}) | on_gpus)
    assert keeps(divided({"shard": 4}, **IN_MEMORY) | on_gpus)
    assert not keeps(divided({"shard": 2}))
    assert not keeps(images(resources={"num_workers": 4}))
