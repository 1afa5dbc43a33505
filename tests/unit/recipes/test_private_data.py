"""The data of clients outside of the cluster are encoded for the job's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from dray.spec import JobSpec
from ray_workers.recipes import RECIPES, private_data
from ray_workers.recipes.private_data import PrivateData
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError
from ray_workers.training.parallel.meta_init import materialise

ROWS = "age,town,ill\n30,Ulm,yes\n40,Bonn,no\n50,Ulm,yes\n60,Bonn,no\n35,Ulm,no\n45,Bonn,yes\n"


def opened(tmp_path: Path, text: str, name: str = "private.csv", **data: Any) -> PrivateData:
    """A client's table, for a job trained on ROWS."""
    (tmp_path / "known.csv").write_text(ROWS)
    source = (tmp_path / "known.csv").as_uri()
    data = {"target": "ill", "validation_fraction": 0.4, **data}
    document = {"recipe": "tabular_classification", "data": {"source": source, **data}}
    if data["target"] == "age":
        document["recipe"] = "tabular_regression"
    spec = JobSpec.model_validate(document)
    recipe = RECIPES[document["recipe"]]
    work = recipe.build(spec, DataPolicy.open())
    materialise(work.model, torch.device("cpu"), 0)
    (result := tmp_path / "result").mkdir()
    work.write_results(work.model, {}, 0, result)
    (path := tmp_path / name).write_text(text)
    return private_data.of_table(recipe.load(result), spec, path)


def test_rows_have_the_codes_that_the_job_knows(tmp_path: Path) -> None:
    """This holds for any towns and classes that the client has."""
    found = opened(tmp_path, "town,ill,age\nUlm,yes,31\nUlm,yes,1e1\n")
    assert found.inputs.tolist() == [[31.0, 2.0], [10.0, 2.0]]
    assert found.targets.tolist() == [1, 1]


def test_a_town_that_the_job_does_not_know_counts_as_unknown(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="did not occur in training"):
        found = opened(tmp_path, "town,ill,age\nOslo,no,31\n")
    assert found.inputs.tolist() == [[31.0, 0.0]]


def test_rows_without_a_value_are_left_out_where_the_job_leaves_them_out(tmp_path: Path) -> None:
    found = opened(tmp_path, "town,ill,age\nUlm,yes,\nUlm,no,31\n", missing="drop")
    assert found.targets.tolist() == [0]


def test_a_number_is_predicted_in_its_own_unit(tmp_path: Path) -> None:
    found = opened(tmp_path, "town\till\tage\nUlm\tyes\t31\n", "private.tsv", target="age")
    assert found.targets.tolist() == [31.0]
    assert float(found.loss_sum(torch.tensor([31.0]), found.targets)) == 0.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("town,ill,age\nUlm,maybe,31\n", "row 1: has the class 'maybe', but the job's classes are"),
        ("town,ill\nUlm,yes\n", "age"),
        ("town,age\nUlm,31\n", "has no column 'ill', which is the column to predict"),
        ("town,ill,age\nUlm,yes,old\n", "'old', which is not a number"),
        ("town,ill,age\nUlm,yes\n", "more or fewer fields"),
        ("town,ill,age\n", "has no row"),
        ("town,ill,age\nUlm,yes,\n", "has no value"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(tmp_path, text)


def test_images_are_scaled_and_found_by_the_folders_of_their_classes(tmp_path: Path) -> None:
    spec = JobSpec.model_validate({"recipe": "image_classification", "model": {"name": "mlp"}})
    recipe = RECIPES["image_classification"]
    work = recipe.build(spec, DataPolicy.open())
    materialise(work.model, torch.device("cpu"), 0)
    (result := tmp_path / "result").mkdir()
    work.write_results(work.model, {}, 0, result)
    (folder := tmp_path / "private" / "7").mkdir(parents=True)
    Image.new("L", (16, 16), 255).save(folder / "one.png")
    found = private_data.of_images(recipe.load(result), spec, folder.parent)
    assert found.targets.tolist() == [7]
    assert torch.equal(found.inputs, torch.ones(1, 1, 8, 8))
    folder.rename(folder.parent / "cat")
    with pytest.raises(DataError, match="the class 'cat', but the job's classes are"):
        private_data.of_images(recipe.load(result), spec, folder.parent)
