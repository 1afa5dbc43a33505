"""What a job document may say, and where the error points when it says something else."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dray import validation
from dray.spec import RECIPES, JobSpec
from dray.spec.recipes import MINIMISED


def divided(parallel: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A job of four workers."""
    return recipe("image_classification", resources={"num_workers": 4}, parallel=parallel, **fields)


def divided_gpt(parallel: dict[str, Any], **model: Any) -> dict[str, Any]:
    """A language model of four workers."""
    return recipe(
        "language_model",
        resources={"num_workers": 4},
        parallel=parallel,
        model={"num_layers": 4, "num_heads": 4, "width": 32, "context_length": 32, **model},
    )


def served(num_ranks: int, **sync: Any) -> dict[str, Any]:
    """A job with parameter servers among its ranks."""
    return recipe(
        "image_classification",
        resources={"num_workers": num_ranks},
        sync={"kind": "parameter_server", **sync},
    )


def refusal(document: dict[str, Any]) -> tuple[str, str]:
    """(pointer, message) of the first error."""
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate(document)
    error = caught.value.errors(include_url=False)[0]
    tags = ("all_reduce", "gossip")  # which are no fields
    place = (str(part) for part in error["loc"] if part not in tags)
    pointer = error.get("ctx", {}).get("pointer") or "/" + "/".join(place)
    return pointer, error["msg"]


def recipe(name: str, **fields: Any) -> dict[str, Any]:
    defaults: dict[str, dict[str, Any]] = {
        "image_classification": {},
        "image_segmentation": {"data": {"source": "file:///scans"}},
        "tabular_classification": {"data": {"source": "sklearn://wine"}},
        "tabular_regression": {"data": {"source": "sklearn://diabetes"}},
        "language_model": {"data": {"source": "file:///text.txt"}},
    }
    return {"recipe": name, **defaults[name], **fields}


def gossip(num_workers: int, **options: Any) -> dict[str, Any]:
    sync = {"kind": "gossip", **options}
    return recipe("image_classification", sync=sync, resources={"num_workers": num_workers})


CUSTOM: dict[str, Any] = {"graph": "custom"}
NO_GOSSIP: list[tuple[dict[str, Any], str, str]] = [
    ({"every": 4}, "/sync/every", "Extra inputs"),
    (CUSTOM, "/sync/edges", "give both or neither"),
    ({"edges": [[0, 1]]}, "/sync/edges", "give both or neither"),
    (CUSTOM | {"edges": [[0, 1], [2, 3]]}, "/sync/edges", "no path leads from rank 0 to rank 2"),
    (CUSTOM | {"edges": [[0, 1], [1, 4]]}, "/sync/edges/1", "names rank 4, and the ranks are 0"),
    (CUSTOM | {"edges": [[1, 1]]}, "/sync/edges/0", "joins a rank with itself"),
    (CUSTOM | {"edges": [[0, -1]]}, "/sync/edges/0/1", "greater than or equal to 0"),
    (
        CUSTOM | {"mode": "sgp", "edges": [[0, 1], [1, 2], [2, 3]]},
        "/sync/edges",
        "no path leads from rank 1 to rank 0",
    ),
    (
        CUSTOM | {"mode": "ad_psgd", "edges": [[0, 1], [1, 2], [2, 0], [2, 3]]},
        "/sync/edges",
        "the edge [1, 2] closes an odd cycle",
    ),
    ({"mode": "ad_psgd", "graph": "exponential"}, "/sync/graph", "must not be exponential"),
]


def ranged(*batch_range: int, train: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """An elastic job of four workers with a range for its batch."""
    options = {"global_batch_size": 64, "batch_range": batch_range, "measure_noise": True}
    return divided(
        {}, train={**options, **(train or {})}, **{"elastic": {"min_workers": 1}, **fields}
    )


def test_a_batch_range_counts_steps_by_its_least_batch() -> None:
    train = JobSpec.model_validate(ranged(32, 256)).train
    assert (train.samples_per_step, train.batch_scaling) == (32, "sqrt")
    assert JobSpec.model_validate(divided({})).train.samples_per_step == 256


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (ranged(65, 256), "must hold train.global_batch_size, which is 64"),
        (ranged(32, 48), "must hold train.global_batch_size, which is 64"),
        (ranged(24, 256), "must have global_batch_size and its end as multiples of 24"),
        (ranged(32, 100), "must have global_batch_size and its end as multiples of 32"),
        (ranged(2, 256), "must begin with 4 or more, a sample for each worker"),
        (ranged(32, 256, elastic=None), "needs elastic with by_speed"),
        (
            ranged(32, 256, elastic={"min_workers": 1, "by_speed": False}),
            "needs elastic with by_speed",
        ),
        (ranged(32, 256, train={"measure_noise": False}), "needs train.measure_noise"),
        (ranged(32, 256, train={"ema": {}}), "is not for train.ema"),
        (ranged(32, 256, profile={}), "is not for profile"),
        (
            ranged(32, 256, checkpoint={"every_steps": "auto"}),
            "is not for checkpoint.every_steps: auto",
        ),
    ],
)
def test_a_batch_range_that_could_not_be_kept_is_refused(
    document: dict[str, Any], message: str
) -> None:
    pointer, said = refusal(document)
    assert pointer == "/train/batch_range"
    assert said.startswith(message)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_without_a_model_gets_its_first(name: str) -> None:
    model = JobSpec.model_validate(recipe(name)).model
    assert model is not None
    assert model.name == RECIPES[name].models[0]
    size = {"image_classification": "width", "language_model": "num_heads"}.get(name, "width")
    chosen = JobSpec.model_validate(recipe(name, model={size: 2})).model
    assert getattr(chosen, size) == 2


@pytest.mark.parametrize("name", RECIPES)
def test_a_document_survives_its_own_json(name: str) -> None:
    spec = JobSpec.model_validate(recipe(name))
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_a_document_as_it_was_stored_before_there_were_more_models_is_read() -> None:
    model = {"name": "cnn", "width": 32, "dropout": 0.0}
    data = {"source": "sklearn://digits", "validation_fraction": 0.2}
    script = {"script": {"entrypoint": "train.py", "args": []}, "model": model, "data": data}
    assert JobSpec.model_validate(script).script is not None
    assert JobSpec.model_validate(recipe("image_classification", model=model, data=data))


@pytest.mark.parametrize(
    ("document", "pointer", "message"),
    [
        (recipe("language_model", model={"name": "cnn"}), "/model/name", "must be one of gpt"),
        (recipe("tabular_regression", data={}), "/data/source", "sklearn://diabetes"),
        (recipe("language_model", data={}), "/data/source", "scikit-learn brings none"),
        (
            recipe("tabular_classification", data={"source": "s3://b/x.csv"}),
            "/data/target",
            "names the csv column to predict",
        ),
        (
            recipe("tabular_classification", data={"source": "s3://b/folder/"}),
            "/data/format",
            "the source's end tells none of",
        ),
        (
            recipe("image_classification", data={"source": "s3://b/x.csv"}),
            "/data/source",
            "is csv, and this recipe reads images, npz",
        ),
        (
            recipe("image_classification", data={"source": "s3://b/x", "format": "text"}),
            "/data/format",
            "is text, and this recipe reads",
        ),
        *(
            (
                recipe(
                    "tabular_classification",
                    data={"source": "s3://b/x.csv", "target": "y", **options},
                ),
                pointer,
                message,
            )
            for options, pointer, message in (
                ({"delimiter": "a"}, "/data/delimiter", "String should match pattern"),
                ({"delimiter": ";;"}, "/data/delimiter", "String should match pattern"),
                ({"encoding": "klingon"}, "/data/encoding", "no encoding of text that Python"),
                ({"encoding": "base64"}, "/data/encoding", "no encoding of text that Python"),
                ({"decimal": ","}, "/data/decimal", "is a comma, and so is data.delimiter"),
            )
        ),
        (
            recipe("tabular_classification", data={"source": "sklearn://iris", "missing": "mean"}),
            "/data/missing",
            "is for csv, parquet, and the data are sklearn",
        ),
        (
            recipe(
                "tabular_classification",
                data={
                    "source": "s3://b/x.csv",
                    "target": "y",
                    "missing_columns": {"y": "mean"},
                },
            ),
            "/data/missing_columns",
            "must be error or drop of the target, 'y'",
        ),
        (
            recipe("image_classification", data={"image_size": [8, 8]}),
            "/data/image_size",
            "is for images, and the data are sklearn",
        ),
        (
            recipe("image_classification", data={"source": "s3://b/x", "target": "y"}),
            "/data/target",
            "is for npz, csv, parquet",
        ),
        (
            recipe("image_classification", checkpoint={"best": "val/mae"}),
            "/checkpoint/best",
            "must be one of val/loss",
        ),
        (
            recipe("tabular_regression", train={"early_stopping": {"metric": "val/f1"}}),
            "/train/early_stopping/metric",
            "val/r2",
        ),
        (
            recipe("tabular_regression", train={"label_smoothing": 0.1}),
            "/train/label_smoothing",
            "is for classification",
        ),
        (recipe("image_segmentation", data={}), "/data/source", "scikit-learn brings none"),
        (recipe("image_segmentation", model={"name": "cnn"}), "/model/name", "must be one of unet"),
        (recipe("image_classification", model={"name": "unet"}), "/model/name", "one of cnn, resn"),
        (
            recipe("image_segmentation", data={"source": "s3://b/x.csv"}),
            "/data/source",
            "is csv, and this recipe reads images, npz",
        ),
        (
            recipe("image_classification", data={"source": "s3://b/x", "classes": ["a", "b"]}),
            "/data/classes",
            "is for image_segmentation",
        ),
        (
            recipe("image_segmentation", data={"source": "s3://b/x", "image_size": [31, 64]}),
            "/data/image_size",
            "is 31 x 64; a unet of depth 4 needs sides of at least 32 pixels",
        ),
        (
            recipe("image_segmentation", train={"label_smoothing": 0.1}),
            "/train/label_smoothing",
            "is for classification",
        ),
        (
            recipe("image_segmentation", checkpoint={"best": "val/f1"}),
            "/checkpoint/best",
            "must be one of val/loss, val/dice, val/iou, val/accuracy",
        ),
        (
            recipe("image_segmentation", train={"early_stopping": {"metric": "val/auroc"}}),
            "/train/early_stopping/metric",
            "must be one of val/loss, val/dice",
        ),
        (
            recipe("image_classification", sync={"every": 1, "outer": {}}),
            "/sync/outer",
            "needs sync.every above 1",
        ),
        (
            recipe("image_classification", sync={"every": 5, "compression": {"name": "fp16"}}),
            "/sync/compression",
            "needs sync.every 1",
        ),
        (
            recipe("image_classification", sync={"every": 5}, elastic={"min_workers": 1}),
            "/elastic",
            "no common weights in between",
        ),
        (
            recipe("image_classification", sync={"every": 5}, train={"ema": {}}),
            "/train/ema",
            "no common weights in between",
        ),
        (
            recipe("image_classification", sync={"every": 5}, checkpoint={"every_steps": "auto"}),
            "/checkpoint/every_steps",
            "must be a number",
        ),
        *((gossip(4, **options), pointer, said) for options, pointer, said in NO_GOSSIP),
        (gossip(1), "/resources/num_workers", "a single rank has no neighbours"),
        (gossip(3, mode="ad_psgd"), "/sync/graph", "needs an even number. Take random or complete"),
        (gossip(2) | {"elastic": {"min_workers": 1}}, "/elastic", "with sync.kind gossip"),
        (gossip(2) | {"train": {"ema": {}}}, "/train/ema", "with sync.kind gossip"),
        (gossip(2) | {"checkpoint": {"every_steps": "auto"}}, "/checkpoint/every_steps", "gossip"),
        (gossip(2) | {"parallel": {"shard": 2}}, "/sync/kind", "needs parallel.shard 1"),
        (gossip(2) | {"parallel": {"balance": "auto"}}, "/parallel/balance", "sync.kind other"),
        (
            gossip(2, mode="ad_psgd") | {"resources": {"num_workers": 2, "gpus_per_worker": 1}},
            "/resources/gpus_per_worker",
            "must be 0 with ad_psgd",
        ),
        (
            gossip(2, mode="ad_psgd") | {"data": {"source": "file:///images", "loader_workers": 2}},
            "/data/loader_workers",
            "must be 0 with ad_psgd",
        ),
        (
            served(3, servers=2),
            "/resources/num_workers",
            "is 3, of which sync.servers takes 2: make it 4 or more",
        ),
        (
            served(7, servers=4),
            "/sync/servers",
            "is 4, more than the 3 workers that are left of the 7 ranks: take 3 servers or fewer",
        ),
        (
            served(4, mode="bounded"),
            "/sync/max_staleness",
            "and mode: bounded go together",
        ),
        (
            served(4, max_staleness=4),
            "/sync/max_staleness",
            "and mode: bounded go together",
        ),
        (
            served(4, correction={"name": "staleness_lr"}),
            "/sync/correction",
            "synchronous updates are not stale",
        ),
        (
            served(4, mode="asynchronous", correction={"name": "staleness_lr", "strength": 0.1}),
            "/sync/correction/strength",
            "is for delay_compensation",
        ),
        (
            recipe(
                "image_classification",
                sync="auto",
                init_from={"job": "job-1", "take": "everything"},
            ),
            "/sync",
            "give the other job's sync, with which the job goes on",
        ),
        (
            recipe(
                "image_classification",
                sync="auto",
                federated={"clients": 20, "clients_per_round": 5, "rounds": 30},
            ),
            "/sync",
            "must be unset with federated",
        ),
        (
            served(4, shards_kept_by="replica"),
            "/sync/shards_kept_by",
            "must be snapshot with one server: a replica is on the next server. Take sync",
        ),
        (
            served(4) | {"parallel": {"shard": 2}},
            "/parallel",
            "must be unset with sync.kind parameter_server: each worker has the whole model",
        ),
        (
            served(4) | {"elastic": {"min_workers": 3}},
            "/elastic",
            "with sync.kind parameter_server the size is fixed",
        ),
        (
            served(4) | {"parallel": {"balance": "auto"}},
            "/parallel/balance",
            "with sync.kind other than all_reduce",
        ),
        (
            served(4) | {"resources": {"num_workers": 4, "gpus_per_worker": 1}},
            "/sync/server_resources",
            "must be given with gpus_per_worker, because servers use no GPU",
        ),
        (
            served(4, server_resources={})
            | {"resources": {"num_workers": 4, "gpus_per_worker": 0.5, "share_gpus": True}},
            "/resources/gpus_per_worker",
            "must be 0 or 1 with sync.kind parameter_server",
        ),
        (
            served(4, server_resources={})
            | {"resources": {"num_workers": 4, "required_topology": "rack"}},
            "/resources/required_topology",
            "must be unset with sync.server_resources",
        ),
        (
            served(4, server_resources={"cpus": 0}),
            "/sync/parameter_server/server_resources/cpus",
            "greater than or equal to 1",
        ),
        (
            served(4, server_resources={"gpus": 1}),
            "/sync/parameter_server/server_resources/gpus",
            "Extra inputs are not permitted",
        ),
        (
            served(4) | {"train": {"optimizer": {"name": "lamb"}}},
            "/train/optimizer/name",
            "must be adamw or sgd with sync.kind parameter_server: lamb looks at whole layers",
        ),
        (
            served(4) | {"train": {"max_grad_norm": 1.0}},
            "/train/max_grad_norm",
            "or take sync.mode asynchronous or bounded",
        ),
        (served(4) | {"train": {"precision": "fp16"}}, "/train/precision", "must be fp32 or bf16"),
        (served(4) | {"train": {"ema": {}}}, "/train/ema", "must be unset"),
        (
            served(4) | {"train": {"on_divergence": "skip_step"}},
            "/train/on_divergence",
            "take rollback",
        ),
        (
            served(4) | {"train": {"optimizer": {"state_dtype": "bf16"}}},
            "/train/optimizer/state_dtype",
            "must be fp32",
        ),
        (
            served(4, mode="asynchronous")
            | {"data": {"source": "sklearn://digits", "loader_workers": 2}},
            "/data/loader_workers",
            "must be 0 with sync.mode asynchronous",
        ),
        (served(4) | {"profile": {}}, "/profile", "workers do not take the same steps"),
        (
            served(6, servers=2) | {"train": {"global_batch_size": 3}},
            "/train/global_batch_size",
            "is 3, fewer than one sample for each of 4 workers",
        ),
        (
            recipe("image_classification", sync={"compression": {"name": "fp16", "ratio": 0.1}}),
            "/sync/compression",
            "ratio is an option of topk",
        ),
        (
            recipe(
                "image_classification",
                sync={"compression": {"name": "fp16"}},
                resources={"num_workers": 2},
                elastic={"min_workers": 1, "exact": True},
            ),
            "/sync/compression",
            "is not for elastic.exact",
        ),
        (
            recipe(
                "image_classification",
                sync={"compression": {"name": "topk"}},
                train={"optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True}},
            ),
            "/train/optimizer/nesterov",
            "is not for topk",
        ),
        (
            recipe(
                "image_classification",
                sync={"compression": {"name": "topk"}},
                train={"optimizer": {"name": "lars"}},
            ),
            "/sync/compression/name",
            "must not be topk with lars",
        ),
        (
            divided({"shard": 3}),
            "/parallel/shard",
            "does not divide the 4 of resources.num_workers: make those 6, or this 2 or 4",
        ),
        (
            divided_gpt({"tensor": 2, "pipeline": 3}),
            "/parallel/pipeline",
            "makes the product 6 (tensor 2 x pipeline 3), which does not divide the 4 of "
            "resources.num_workers: make those 6, or this 4",
        ),
        (divided({"shard": 2, "data": 4}), "/parallel/data", "so it must be 2"),
        (divided({"tensor": 2}), "/parallel/tensor", "use parallel.shard, which every model takes"),
        (divided({"pipeline": 2}), "/parallel/pipeline", "is for gpt and resnet"),
        (divided({"context": 2}), "/parallel/context", "is for gpt"),
        (
            divided({"pipeline": 4}, model={"name": "resnet", "depth": 8}),
            "/parallel/pipeline",
            "makes 4 stages, more than the 3 blocks of this depth: it can be 3 at most",
        ),
        (divided_gpt({"tensor": 2, "zero": 1}), "/parallel/zero", "must be 2 or 3 with tensor"),
        (divided_gpt({"tensor": 2, "zero": 2}), "/parallel/zero", "is for parallel.shard above 1"),
        (divided({"zero": 1}), "/parallel/zero", "is for parallel.shard above 1"),
        (divided({"schedule": "gpipe"}), "/parallel/schedule", "parallel.pipeline above 1"),
        (divided({"stages_per_rank": 2}), "/parallel/stages_per_rank", "pipeline above 1"),
        (
            divided_gpt({"pipeline": 2, "stages_per_rank": 2}),
            "/parallel/stages_per_rank",
            "not for 1f1b",
        ),
        (
            divided_gpt({"pipeline": 4, "stages_per_rank": 2, "schedule": "interleaved"}),
            "/parallel/pipeline",
            "more than the 4 of model.num_layers: pipeline x stages_per_rank can be 4 at most",
        ),
        (
            divided_gpt({"tensor": 4}, num_heads=2),
            "/parallel/tensor",
            "must divide model.num_heads 2",
        ),
        (
            divided_gpt({"tensor": 2, "context": 2}, num_heads=2),
            "/parallel/tensor",
            "(tensor x context is 4)",
        ),
        (
            divided_gpt({"context": 4}, context_length=30),
            "/parallel/context",
            "must divide model.context_length 30",
        ),
        (
            divided({"shard": 2}, train={"measure_noise": True}),
            "/train/measure_noise",
            "is for data parallelism",
        ),
        (
            divided({"balance": "auto"}, train={"measure_noise": True}),
            "/train/measure_noise",
            "is not for elastic.exact, sync and balance",
        ),
        (
            divided({}, train={"measure_noise": True, "precision": "fp16"}),
            "/train/measure_noise",
            "needs train.precision fp32 or bf16",
        ),
        (
            {"recipe": "image_classification", "train": {"measure_noise": True}},
            "/train/measure_noise",
            "needs resources.num_workers 2",
        ),
        (divided({"shard": 2, "balance": "auto"}), "/parallel/balance", "must be even with shard"),
        (
            divided({"balance": "auto"}, elastic={"min_workers": 1, "exact": True}),
            "/parallel/balance",
            "must be even with elastic.exact",
        ),
        (
            divided({"balance": "auto"}, sync={"compression": {"name": "fp16"}}),
            "/parallel/balance",
            "must be even with sync.compression",
        ),
        (
            {"script": {"entrypoint": "x.py"}, "parallel": {"balance": "auto"}},
            "/parallel/balance",
            "is for recipes",
        ),
        (
            divided({}, train={"recompute": "full"}),
            "/train/recompute",
            "is for models made of blocks",
        ),
        (
            {
                **divided_gpt({"pipeline": 2, "schedule": "zero_bubble"}),
                "train": {"recompute": "full"},
            },
            "/train/recompute",
            "must be none with the schedule zero_bubble",
        ),
        (
            {
                **divided_gpt({"pipeline": 2, "schedule": "zero_bubble"}),
                "train": {"compile": True},
            },
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
            "needs gpus_per_worker 1",
        ),
        (
            divided({}, train={"optimizer": {"name": "sgd", "state_dtype": "bf16"}}),
            "/train/optimizer/state_dtype",
            "sgd without momentum has nothing",
        ),
        (
            divided({"shard": 2, "zero": 1}, train={"optimizer": {"state_dtype": "bf16"}}),
            "/train/optimizer/state_dtype",
            "needs parallel.zero 2 or 3",
        ),
        (divided({"param_dtype": "bf16"}), "/parallel/param_dtype", "shard or context above 1"),
        (
            divided({"shard": 2, "zero": 1, "reduce_dtype": "bf16"}),
            "/parallel/reduce_dtype",
            "zero 2 or 3",
        ),
        (
            divided({"shard": 2, "param_dtype": "bf16"}, train={"precision": "fp16"}),
            "/parallel/param_dtype",
            "needs train.precision bf16",
        ),
        (
            divided({"shard": 2, "reduce_dtype": "fp16"}, train={"precision": "bf16"}),
            "/parallel/reduce_dtype",
            "fp16 needs train.precision fp16",
        ),
        (divided({"shard": 2}, elastic={"min_workers": 2}), "/elastic", "needs parallel.shard 1"),
        (
            divided({"shard": 2}, sync={"compression": {"name": "fp16"}}),
            "/sync/compression",
            "needs parallel.shard 1, or take parallel.zero 1: FSDP2 adds up parts, for which "
            "torch has none of these; "
            "parallel.reduce_dtype bf16 sends half",
        ),
        (
            divided_gpt({"tensor": 2}) | {"sync": {"compression": {"name": "fp16"}}},
            "/sync/compression",
            "needs parallel.tensor 1: it is for gradients that each rank has whole",
        ),
        (divided({"shard": 2}, sync={"every": 4}), "/sync/every", "no rank has the whole state"),
        (
            divided({"shard": 2, "zero": 1}, sync={"every": 4}),
            "/sync/every",
            "no rank has the whole state",
        ),
        (
            divided(
                {},
                train={"optimizer": {"name": "sgd", "momentum": 0.9, "state_dtype": "bf16"}},
                sync={"compression": {"name": "topk"}},
            ),
            "/train/optimizer/state_dtype",
            "topk keeps the momentum itself",
        ),
        (
            divided_gpt({"tensor": 2}) | {"train": {"compile": True}},
            "/train/compile",
            "must be false with parallel.tensor",
        ),
        (divided({"shard": 2}, train={"ema": {}}), "/train/ema", "needs parallel.shard 1"),
        (
            divided({"shard": 2}, train={"optimizer": {"name": "lamb"}}),
            "/train/optimizer/name",
            "looks at whole layers",
        ),
        (
            divided({"shard": 2}, checkpoint={"every_steps": "auto"}),
            "/checkpoint/every_steps",
            "all ranks save together",
        ),
        (
            {
                "script": {"entrypoint": "x.py"},
                "parallel": {"pipeline": 2},
                "resources": {"num_workers": 2},
            },
            "/parallel/pipeline",
            "train.prepare() takes parallel.shard and parallel.tensor",
        ),
        (
            {
                "script": {"entrypoint": "x.py"},
                "parallel": {"shard": 2, "tensor": 2},
                "resources": {"num_workers": 6},
            },
            "/parallel/tensor",
            "does not divide the 6",
        ),
        (
            {
                "script": {"entrypoint": "x.py"},
                "parallel": {"shard": 2, "zero": 2},
                "resources": {"num_workers": 2},
            },
            "/parallel/zero",
            "must be 3 for a script",
        ),
        (
            {
                "script": {"entrypoint": "x.py"},
                "parallel": {"shard": 2, "reduce_dtype": "bf16"},
                "resources": {"num_workers": 2},
            },
            "/parallel/reduce_dtype",
            "is for recipes",
        ),
        (
            {
                "script": {"entrypoint": "x.py", "framework": "jax"},
                "parallel": {"shard": 2},
                "resources": {"num_workers": 2},
            },
            "/parallel",
            "a script of torch without roles",
        ),
        (
            {"script": {"entrypoint": "x.py"}, "profile": {}},
            "/profile",
            "a script calls torch.profiler itself",
        ),
        (
            recipe("image_classification", profile={"ranks": [0, 1]}),
            "/profile/ranks",
            "must be below resources.num_workers, which is 1",
        ),
        (
            {"script": {"entrypoint": "x.py"}, "sync": {}},
            "/sync",
            "a script exchanges its gradients itself",
        ),
        (
            recipe("image_classification", resources={"num_workers": 300}),
            "/train/global_batch_size",
            "fewer than one sample for each of 300 workers",
        ),
        (
            recipe("image_classification", parallel={"data": 2}),
            "/parallel/data",
            "resources.num_workers is 1",
        ),
        (
            {"script": {"entrypoint": "x.py"}, "init_from": {"job": "job-1"}},
            "/init_from",
            "is for recipes",
        ),
    ],
)
def test_fields_that_do_not_go_together_are_refused_where_the_fault_is(
    document: dict[str, Any], pointer: str, message: str
) -> None:
    found, said = refusal(document)
    assert found == pointer
    assert message in said


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("ftp://host/x.csv", "must be a URL that begins with one of file://"),
        ("digits", "must be a URL"),
        ("sklearn://faces", "scikit-learn's sets are"),
        ("file://relative/x.csv", "must name an absolute path"),
        ("https:///x.csv", "names no host"),
        ("https://host:99999/x.csv", "is not a URL"),
        ("s3:///key", "names no bucket"),
        ("https://me:secret@host/x.csv", "must not hold a user or password"),
        ("https://host/x.csv?X-Amz-Signature=abc", "must not hold a secret"),
        *(
            (f"https://host/x.csv?a=b&{name}=abc", f"its parameter '{name}' looks like one")
            for name in (
                *("access_token", "accessToken", "apikey", "api_key", "x_sig", "auth", "pass"),
                *("pwd", "passwd", "dbPassword", "secrets"),
            )
        ),
        ("https://host/../../x.csv", "must not contain '..'"),
        ("file:///a%00b.csv", "must not contain %00"),
        ("https://host\\@elsewhere/x.csv", "must not contain a backslash"),
        ("https://host/a b.csv", "must not contain a backslash or a space"),
    ],
)
def test_a_source_is_a_url_without_secrets(source: str, message: str) -> None:
    document = recipe("tabular_classification", data={"source": source, "target": "y"})
    pointer, said = refusal(document)
    assert pointer == "/data/source"
    assert message in said


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"optimizer": {"momentum": 0.9}}, "momentum is an option of sgd and lars, not of adamw"),
        ({"optimizer": {"name": "adafactor", "eps": 1e-3}}, "eps is an option of adamw"),
        ({"optimizer": {"name": "sgd", "nesterov": True}}, "nesterov needs a momentum"),
        ({"schedule": {"name": "step"}}, "needs every_steps"),
        ({"schedule": {"name": "cosine", "factor": 0.5}}, "factor is an option of step"),
        ({"schedule": {"name": "step", "every_steps": 5, "final_ratio": 0.1}}, "final_ratio is an"),
        ({"lr_scaling": {"rule": "cubic", "reference_batch_size": 2}}, "'linear' or 'sqrt'"),
        ({"ema": {"decay": 1.0}}, "less than 1"),
    ],
)
def test_options_that_would_be_ignored_are_refused(train: dict[str, Any], message: str) -> None:
    _, said = refusal(recipe("image_classification", train=train))
    assert message in said


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (["cell"], "at least 2 items"),
        ([f"organ {number}" for number in range(256)], "at most 255 items"),
        (["background", "cell", "cell"], "names 'cell' twice"),
        (["background", ""], "at least 1"),
        (["background", 1], "valid string"),
        ("cell", "valid list"),
    ],
)
def test_the_classes_of_masks_are_names(classes: Any, message: str) -> None:
    data = {"source": "file:///scans", "classes": classes}
    pointer, said = refusal(recipe("image_segmentation", data=data))
    assert pointer.startswith("/data/classes")
    assert message in said


def test_of_the_overlap_of_masks_more_is_better() -> None:
    """So the best checkpoint is that with the most, and early stopping waits for more."""
    assert set(RECIPES["image_segmentation"].metrics) & MINIMISED == {"val/loss"}


@pytest.mark.parametrize(
    ("option", "value"), [("depth", 0), ("depth", 9), ("width", 0), ("dropout", 1.0)]
)
def test_a_unet_has_a_size_that_can_be_built(option: str, value: Any) -> None:
    pointer, _ = refusal(recipe("image_segmentation", model={option: value}))
    assert pointer.endswith(f"/{option}")


def test_the_heads_of_a_gpt_share_its_width() -> None:
    model = {"width": 10, "num_heads": 4}
    _, said = refusal(recipe("language_model", model=model))
    assert "width 10 is not a multiple of twice num_heads 4" in said


@pytest.mark.parametrize("every", [1, 10**12, None, "auto"])
def test_the_interval_of_checkpoints_is_a_number_or_left_to_dray(every: Any) -> None:
    document = recipe("image_classification", checkpoint={"every_steps": every})
    assert JobSpec.model_validate(document).checkpoint.every_steps == every


@pytest.mark.parametrize("every", [0, -1, 10**12 + 1, "always", "10", True, 1.5, [5]])
def test_any_other_interval_of_checkpoints_is_refused_where_it_stands(every: Any) -> None:
    document = recipe("image_classification", checkpoint={"every_steps": every})
    with pytest.raises(validation.Fault, match="'auto'") as caught:
        validation.check(document)
    assert caught.value.pointer == "/checkpoint/every_steps"


def test_an_elastic_script_shares_its_batches_out_as_prepare_does() -> None:
    script = {"script": {"entrypoint": "a.py"}, "resources": {"num_workers": 4}}
    spec = JobSpec.model_validate(script | {"elastic": {"min_workers": 2}})
    assert spec.elastic is not None
    with pytest.raises(ValidationError, match="does not know the loss"):
        JobSpec.model_validate(script | {"elastic": {"min_workers": 2, "exact": True}})


def test_an_elastic_job_says_with_how_few_it_goes_on() -> None:
    fields = {"elastic": {"min_workers": 2}, "resources": {"num_workers": 4}}
    spec = JobSpec.model_validate(recipe("image_classification", **fields))
    assert spec.elastic is not None
    assert spec.elastic.min_workers == 2
    assert JobSpec.model_validate(recipe("image_classification", elastic=None)).elastic is None
