"""The contenders are given the same work, and what is said of them follows from the samples."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.blocks import Times
from benchmarks.first_step import measure, plain
from benchmarks.first_step.contenders import Turn
from benchmarks.first_step.work import recipe_job, script_job
from dray.spec import JobSpec
from ray_workers.recipes import RECIPES
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.parallel.meta_init import materialise


def test_the_documents_are_valid_jobs(tmp_path: Path) -> None:
    assert JobSpec.model_validate(recipe_job()).recipe == "image_classification"
    assert JobSpec.model_validate(script_job(tmp_path)).script is not None


def test_the_peers_train_the_recipes_model_on_as_many_of_its_images() -> None:
    document = JobSpec.model_validate(recipe_job())
    workload = RECIPES["image_classification"].build(document, DataPolicy.open())
    images, labels = plain.load_images()
    inputs, targets = workload.train.take(torch.arange(len(workload.train)))
    assert (images.shape, images.dtype) == (inputs.shape, inputs.dtype)
    assert labels.dtype == targets.dtype

    materialise(workload.model, torch.device("cpu"), 0)
    theirs = plain.build_model()
    mine = list(workload.model.state_dict().values())
    theirs.load_state_dict(dict(zip(theirs.state_dict(), mine, strict=True)))
    torch.testing.assert_close(theirs(images[:5]), workload.model(images[:5]))


def samples(first_steps: list[float]) -> measure.Samples:
    turns = [Turn(value, {"slots given": value / 4, "first step": value}) for value in first_steps]
    return measure.Samples(turns, [0.0] * len(turns))


def test_a_goal_is_met_by_the_ratio_alone(tmp_path: Path) -> None:
    taken = {
        measure.RECIPE: samples([1.0, 1.1, 0.9]),
        measure.AGAIN: samples([2.0, 2.0, 2.0]),
        measure.RAY_TRAIN: samples([20.0, 21.0, 19.0]),
        measure.TORCHRUN: samples([2.0, 2.1, 1.9]),
        measure.SCRIPT: samples([1.0, 1.0, 1.0]),
    }
    result = measure.conclude(taken)
    met = {each.label: each.met for each in result.comparisons}
    assert met[f"{measure.RECIPE} / {measure.RAY_TRAIN}"]
    assert not met[f"{measure.RECIPE} / {measure.TORCHRUN}"]


def test_a_breakdown_tells_when_each_moment_came_and_how_long_it_took() -> None:
    table = measure.breakdown("any", samples([4.0, 8.0, 12.0]).turns)
    assert table.rows == [["slots given", "2 s", "2 s"], ["first step", "8 s", "6 s"]]


def test_a_result_is_kept_with_its_samples_and_shown_with_its_interval(tmp_path: Path) -> None:
    taken = {label: samples([1.0, 2.0, 3.0]) for label in measure.SETTLE_S}
    text = report.write(measure.conclude(taken), {"cores": "2"}, "2020-01-01", tmp_path)
    kept = json.loads((tmp_path / "submit_to_first_step.json").read_text())
    assert kept["rows"][0]["samples"] == [1.0, 2.0, 3.0]
    assert kept["machine"] == {"cores": "2"}
    assert str(measure.conclude(taken).comparisons[0].ratio) in text
    assert text in (tmp_path / "README.md").read_text()


def test_blocks_are_compared_with_their_neighbours() -> None:
    times = Times(dray=[1.0, 2.0, 3.0, 4.0], plain=[10.0, 20.0, 30.0, 40.0])
    assert times.pairs() == [(1.0, 10.0), (2.0, 20.0), (3.0, 30.0), (4.0, 40.0)]
    assert times.same_pairs() == [(3.0, 2.0)]
