"""The chosen division, rejections, and changes that would help."""

from __future__ import annotations

from typing import Any

import pytest

from dray.spec import JobSpec
from service.planning.model.choice import plan_of
from service.planning.model.cost import CPU, Machine, step_time
from service.planning.model.memory import memory_of
from service.planning.model.meshes import meshes, name_of
from service.planning.model.shapes import shapes_of
from service.planning.model.unknown import Unknown
from tests.unit.service.planning.tuning_documents import changed

MODEL = {"name": "gpt", "num_layers": 4, "num_heads": 4, "width": 256, "context_length": 64}


def job(num_workers: int = 4, parallel: Any = None, **train: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "recipe": "language_model",
            "model": MODEL,
            "data": {"source": "file:///text.txt"},
            "train": {"global_batch_size": 16, **train},
            "resources": {"num_workers": num_workers},
            "parallel": parallel or {},
        }
    )


def test_every_mesh_is_one_that_the_document_takes_and_none_is_lacking() -> None:
    names = {name_of(each.parallel, 4) for each in meshes(job())}
    assert {"data 4", "shard 4", "tensor 4", "pipeline 4", "context 4"} <= names
    assert {"data 2 x shard 2", "tensor 2 x pipeline 2", "shard 2 x context 2"} <= names
    assert len(names) == len(meshes(job())) == 15


def test_a_model_of_images_is_divided_along_data_and_shard_alone() -> None:
    images = JobSpec.model_validate(
        {"recipe": "image_classification", "resources": {"num_workers": 4}}
    )
    names = [name_of(each.parallel, 4) for each in meshes(images)]
    assert names == ["data 4", "data 2 x shard 2", "shard 4"]


@pytest.mark.parametrize(
    ("parallel", "names"),
    [
        ({"shard": "auto"}, {"data 4", "data 2 x shard 2", "shard 4"}),
        ({"data": 2, "shard": "auto"}, {"data 2 x shard 2"}),
        ({"tensor": 2, "pipeline": "auto"}, {"data 2 x tensor 2", "tensor 2 x pipeline 2"}),
        (
            {"data": 1, "tensor": "auto", "shard": "auto"},
            {"tensor 4", "shard 2 x tensor 2", "shard 4"},
        ),
    ],
)
def test_axes_that_are_given_stay_and_the_others_are_found(
    parallel: dict[str, Any], names: set[str]
) -> None:
    found = meshes(job(parallel=parallel))
    assert {name_of(each.parallel, 4) for each in found} == names
    assert not any(each.parallel.auto for each in found)


def test_what_is_said_besides_of_the_division_is_kept_where_it_means_something() -> None:
    types = {"param_dtype": "bf16", "reduce_dtype": "bf16"}
    parallel = {"shard": "auto", "pipeline": "auto", "schedule": "gpipe", "zero": 2, **types}
    found = {name_of(m.parallel, 4): m.parallel for m in meshes(job(4, parallel, precision="bf16"))}
    assert set(found) >= {"data 4", "shard 4, zero 2", "pipeline 4", "shard 2 x pipeline 2, zero 2"}
    for each in found.values():
        assert each.zero == (2 if each.shard > 1 else 3)
        assert each.schedule == ("gpipe" if each.pipeline > 1 else "1f1b")
        assert each.param_dtype == each.reduce_dtype == ("bf16" if each.shard > 1 else "fp32")
    balanced = meshes(job(4, {"shard": "auto", "balance": "auto"}))
    assert [name_of(each.parallel, 4) for each in balanced] == ["data 4"]
    assert balanced[0].parallel.balance == "auto"


def test_what_looks_at_whole_layers_shards_the_optimizers_state_alone() -> None:
    spec = job(4, "auto", optimizer={"name": "lamb"})
    assert [name_of(m.parallel, 4) for m in meshes(spec)] == [
        "data 4",
        "data 2 x shard 2, zero 1",
        "shard 4, zero 1",
    ]
    replicas = memory_of(meshes(spec)[0], shapes_of(spec)).total
    plan = plan_of(spec, shapes_of(spec), CPU, replicas - 1, all_of_them=True)
    assert plan.chosen is not None
    assert plan.chosen.name == "shard 4, zero 1"
    given = job(4, {}, optimizer={"name": "lamb"}, micro_batch_size=1, recompute="full")
    least = memory_of(given, shapes_of(given)).total
    change = plan_of(given, shapes_of(given), CPU, least - 1, all_of_them=False).change
    assert change == "parallel.shard 2 with parallel.zero 1"


def test_a_batch_of_fewer_samples_than_workers_leaves_the_axes_that_do_not_share_it() -> None:
    names = {name_of(m.parallel, 8) for m in meshes(job(8, "auto", global_batch_size=4))}
    assert {"tensor 4 x pipeline 2", "data 4 x context 2"} <= names
    assert not {"data 8", "shard 8", "data 2 x shard 4"} & names


def test_more_workers_than_are_compared_are_still_divided() -> None:
    many = job(2048, {"shard": "auto"}, global_batch_size=4096)
    plan = plan_of(many, shapes_of(many), CPU, None, all_of_them=True)
    (only,) = plan.candidates
    assert only.name == "data 2048"
    assert not only.spec.parallel.auto


def test_blocks_of_a_network_for_images_can_be_stages() -> None:
    document = {
        "recipe": "image_classification",
        "model": {"name": "resnet", "depth": 8},
        "resources": {"num_workers": 4},
    }
    names = {name_of(each.parallel, 4) for each in meshes(JobSpec.model_validate(document))}
    assert names == {
        "data 4",
        "data 2 x shard 2",
        "shard 4",
        "data 2 x pipeline 2",
        "shard 2 x pipeline 2",
    }


def test_where_all_fit_the_fastest_is_chosen() -> None:
    plan = plan_of(job(), shapes_of(job()), CPU, 1 << 40, all_of_them=True)
    assert plan.chosen is plan.candidates[0]
    times = [each.time.total_s for each in plan.candidates]
    assert times == sorted(times)


def test_a_slow_network_makes_pipelines_better_than_shards() -> None:
    slow = Machine(CPU.flops_per_s, 1e6, 0.0, "test")
    one, other = job(4, {"pipeline": 4}), job(4, {"shard": 4})
    shapes = shapes_of(one)
    assert step_time(one, shapes, slow).total_s < step_time(other, shapes, slow).total_s


def test_replicas_that_do_not_fit_are_not_chosen() -> None:
    replicas = memory_of(job(), shapes_of(job())).total
    plan = plan_of(job(), shapes_of(job()), CPU, replicas - 1, all_of_them=True)
    assert plan.chosen is not None
    assert plan.chosen.memory.total < replicas
    lacking = next(each for each in plan.candidates if each.name == "data 4")
    assert lacking.missing_bytes == 1
    assert "lacks 1 bytes" in plan.why(lacking)


def test_what_is_named_as_a_help_does_help() -> None:
    shapes = shapes_of(job(1))
    needed = memory_of(job(1), shapes).total
    plan = plan_of(job(1), shapes, CPU, int(0.9 * needed), all_of_them=False)
    assert plan.chosen is None
    assert plan.change == "train.micro_batch_size 8"
    assert memory_of(job(1, micro_batch_size=8), shapes).total <= 0.9 * needed


def test_weights_that_do_not_fit_are_spread_over_more_workers() -> None:
    shapes = shapes_of(job(1))
    memory = memory_of(job(1), shapes)
    weights = memory.parameters + memory.gradients + memory.optimizer
    plan = plan_of(job(1), shapes, CPU, int(0.7 * weights), all_of_them=False)
    assert plan.change is not None
    assert "resources.num_workers" in plan.change


LARGE = {"num_layers": 32, "num_heads": 32, "width": 4096, "context_length": 2048}
SPARING = {"precision": "bf16", "recompute": "full", "micro_batch_size": 1}
H100_BYTES = 78 << 30


@pytest.mark.parametrize(
    ("num_workers", "parallel", "change"),
    [
        (8, {}, "parallel.shard 2"),
        (4, {"shard": 4, "zero": 1}, "parallel.zero 3"),
        (8, {"pipeline": 2}, "parallel.shard 2"),
        (2, {"shard": 2}, None),
        (1, {}, "resources.num_workers 2 with parallel.shard 2"),
    ],
)
def test_before_more_workers_those_that_there_are_divide_it_further(
    num_workers: int, parallel: dict[str, Any], change: str | None
) -> None:
    document = job(num_workers, parallel, **SPARING).model_dump(mode="json", exclude_defaults=True)
    model = {"name": "gpt", **LARGE}
    spec = JobSpec.model_validate({**document, "recipe": "language_model", "model": model})
    assert plan_of(spec, shapes_of(spec), CPU, H100_BYTES, all_of_them=False).change == change


@pytest.mark.parametrize("given", [{}, {"shard": 2}, {"tensor": 2}, {"shard": 4, "zero": 1}])
@pytest.mark.parametrize("part", [0.5, 0.7, 0.9])
def test_whatever_is_named_as_a_help_does_help(given: dict[str, Any], part: float) -> None:
    spec = job(4, given)
    shapes = shapes_of(spec)
    available = int(part * memory_of(spec, shapes).total)
    change = plan_of(spec, shapes, CPU, available, all_of_them=False).change
    assert change is not None
    assert memory_of(changed(spec, change), shapes).total <= available


@pytest.mark.parametrize(
    "document",
    [
        {"script": {"entrypoint": "train.py"}},
        {"recipe": "image_classification", "data": {"source": "file:///folder"}},
        {
            "recipe": "tabular_regression",
            "data": {"source": "file:///a.csv", "target": "y"},
        },
    ],
    ids=["script", "images", "table"],
)
def test_what_the_document_does_not_tell_is_not_guessed(document: dict[str, Any]) -> None:
    with pytest.raises(Unknown):
        shapes_of(JobSpec.model_validate(document))


def test_the_kind_of_sync_is_kept() -> None:
    spec = JobSpec.model_validate(
        {
            "recipe": "image_classification",
            "resources": {"num_workers": 3},
            "sync": {"kind": "gossip"},
            "parallel": "auto",
        }
    )
    assert {each.sync.kind for each in meshes(spec)} == {"gossip"}
