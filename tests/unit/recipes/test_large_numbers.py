"""Numbers that are large and close together, which float32 would make equal.

The references are computed with Python's whole numbers, and with float64 in numpy, from these rows.
"""

from __future__ import annotations

import decimal
import json
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from dray.spec import Data, JobSpec
from ray_workers import recipes
from ray_workers.datasets import open_table
from ray_workers.datasets.core.alignment import table_like
from ray_workers.datasets.formats.number_texts import NumberStyle
from ray_workers.recipes.models.tables import TableModel
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError
from ray_workers.training.core.workload import Workload
from ray_workers.training.parallel.meta_init import materialise
from tests.marks import ONE_SET

BASES = {
    "seconds": 1_700_000_000,
    "milliseconds": 1_700_000_000_000,
    "orders": 4_000_000_000,
    "northings": 5_412_345,
    "days": 20_240_101,
    "int64": 2**60 + 12_345,
    "negative": -(2**62),
    "uint64": 2**64 - 9_000,
    "decimal": 10**25 + 7,
}
MODEL = {"name": "mlp", "width": 8}


def arrow_of(values: list[int]) -> Any:
    if max(map(abs, values)) >= 2**64:
        return pa.array(map(decimal.Decimal, values), pa.decimal128(38, 0))
    return pa.array(values, pa.uint64() if max(values) >= 2**63 else pa.int64())


def written(form: str, x: list[int], y: list[Any], folder: Path) -> dict[str, Any]:
    """The document's data for a table with the columns x and y."""
    path = folder / f"table.{form}"
    if form == "csv":
        path.write_text("x,y\n" + "".join(f"{a},{b}\n" for a, b in zip(x, y, strict=True)))
    elif form == "parquet":
        target = arrow_of(y) if isinstance(y[0], int) else pa.array(y)
        parquet.write_table(pa.table({"x": arrow_of(x), "y": target}), path)
    else:
        np.savez(path, x=np.array(x), y=np.array(y))
        return {"source": path.as_uri()}
    return {"source": path.as_uri(), "target": "y"}


def built(recipe: str, data: dict[str, Any], folder: Path) -> Workload:
    document = JobSpec.model_validate({"recipe": recipe, "model": MODEL, "data": data})
    work = recipes.RECIPES[recipe].build(document, DataPolicy.open(str(folder / "cache")))
    materialise(work.model, torch.device("cpu"), 0)
    work.model.eval()
    return work


def loaded(work: Workload, folder: Path) -> Any:
    (folder / "result").mkdir(exist_ok=True)
    work.write_results(work.model, {}, 1, folder / "result")
    return recipes.load(folder / "result")


@pytest.mark.parametrize("form", ["csv", "parquet", "npz"])
@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_metrics_are_of_the_numbers_in_the_file(base: int, form: str, tmp_path: Path) -> None:
    if form == "npz" and base > 2**64:
        pytest.skip("numpy has no such numbers")
    rng = np.random.default_rng(base % 1000)
    x = [base + int(more) for more in rng.integers(0, 900, 120)]
    y = [base + int(more) for more in rng.integers(0, 900, 120)]
    work = built("tabular_regression", written(form, x, y, tmp_path), tmp_path)
    inputs, targets = work.validation.take(torch.arange(len(work.validation)))
    wanted = [y[row] for row in work.validation.rows]
    assert len(set(targets.tolist())) == len(set(wanted))
    (table,) = (part for part in work.model.modules() if isinstance(part, TableModel))
    given = [x[row] for row in work.validation.rows]
    assert len(set(table.standardised(inputs[:, :1])[:, 0].tolist())) == len(set(given))
    assert not any("different" in line for line in work.about), work.about
    predictions = work.model(inputs).detach()
    metrics = work.metrics()
    for at in (slice(0, 5), slice(5, None)):
        metrics.update(predictions[at], targets[at])
    found = {name: value.item() for name, value in metrics.compute().items()}
    # The values in the file, less what float64 can't represent.
    taken = json.loads(_config(work, tmp_path))["bases"].get("y", 0)
    exact = np.array([one - taken for one in wanted], dtype=np.float64)
    assert [int(one) + taken for one in exact] == wanted
    assert found["mae"] == pytest.approx(np.abs(predictions.numpy() - exact).mean(), rel=1e-12)
    assert found["mse"] == pytest.approx(((predictions.numpy() - exact) ** 2).mean(), rel=1e-12)
    true, guessed = map(Fraction, exact.tolist()), map(Fraction, predictions.tolist())
    pairs = list(zip(true, guessed, strict=True))
    mean = sum(one for one, _ in pairs) / len(pairs)
    r2 = 1 - sum((a - b) ** 2 for a, b in pairs) / sum((a - mean) ** 2 for a, _ in pairs)
    assert found["r2"] == pytest.approx(float(r2), rel=1e-9, abs=1e-11)


def _config(work: Workload, folder: Path) -> str:
    loaded(work, folder)
    return (folder / "result" / "config.json").read_text()


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_a_row_to_predict_is_taken_exactly(base: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = [base + int(more) for more in rng.integers(0, 900, 60)]
    data = written("csv", x, [base + at for at in range(60)], tmp_path)
    work = built("tabular_regression", data, tmp_path)
    predictor = loaded(work, tmp_path)
    inputs, _ = work.validation.take(torch.arange(len(work.validation)))
    given = [x[row] for row in work.validation.rows]
    for rows in (given, list(map(str, given)), list(map(decimal.Decimal, given))):
        taken = predictor.form.tensor([{"x": one} for one in rows])
        assert torch.equal(taken, inputs)
    if abs(base) < 2**62:
        assert torch.equal(predictor.form.tensor(np.array(given)[:, None]), inputs)
    predicted = predictor.predict([{"x": one} for one in given])
    assert all(isinstance(number, int if predictor.target_base else float) for number in predicted)
    close = [number - base for number in predicted]  # type: ignore[operator]
    assert max(map(abs, close)) < 2_000 + (0 if predictor.target_base else 1e-15 * abs(base))


@settings(max_examples=25, deadline=None, print_blob=True)
@given(st.data())
def test_whatever_the_numbers_their_differences_are_kept(data: st.DataObject) -> None:
    base = data.draw(st.integers(-(2**63), 2**64) | st.integers(-(2**40), 2**40))
    spread = data.draw(st.sampled_from([3, 1_000, 10**6]))
    x = data.draw(st.lists(st.integers(base, base + spread), min_size=20, max_size=40))
    with TemporaryDirectory() as name:
        folder = Path(name)
        policy = DataPolicy.open(str(folder / "cache"))
        opened = Data(**written("csv", x, [*"ab" * len(x)][: len(x)], folder))
        table = open_table(opened, policy, classifies=True)
        if table.category_names:
            pytest.fail("these are numbers")
        less = table.bases.get("x", 0)
        assert [int(one) + less for one in table.numeric[:, 0]] == x
        assert table.num_rounded == {}


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_class_names_that_are_large_numbers_stay_apart(form: str, tmp_path: Path) -> None:
    names = [2**60 + 1, 2**60 + 2, 2**60 + 3]
    data = written(form, list(range(60)), names * 20, tmp_path)
    table = open_table(Data(**data), DataPolicy.open(str(tmp_path / "cache")), classifies=True)
    assert table.classes == tuple(map(str, names))
    assert table.target.tolist() == [0, 1, 2] * 20


def test_values_that_become_equal_are_counted(tmp_path: Path) -> None:
    """Some values are so far away that float32 has no digits left for the others."""
    x = [*range(100), *(at * 10**12 for at in range(1, 8))]
    work = built("tabular_classification", written("csv", x, [*"ab" * 53, "a"], tmp_path), tmp_path)
    (line,) = (line for line in work.about if line.startswith("  'x'"))
    inputs, _ = work.train.take(torch.arange(len(work.train)))
    left = len(set(work.model.standardised(inputs).flatten().tolist()))
    different = len(set(inputs.flatten().tolist()))
    assert left < different
    assert f"of {different} distinct values in {different} training rows, {left} remain" in line


def test_whole_numbers_that_are_too_far_apart_are_counted(tmp_path: Path) -> None:
    x = [0, *(2**60 + at for at in range(1, 40))]
    work = built("tabular_classification", written("csv", x, ["a", "b"] * 20, tmp_path), tmp_path)
    assert any(
        "39 values rounded because float64 can't represent all their digits" in a
        for a in work.about
    )


def test_what_differs_by_too_little_for_float32_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("x,y\n" + "".join(f"{at}e-45,{'ab'[at % 2]}\n" for at in range(40)))
    with pytest.raises(DataError, match=r"the column 'x' differ by .* smaller unit"):
        built("tabular_classification", {"source": path.as_uri(), "target": "y"}, tmp_path)


def test_a_silos_numbers_are_less_what_the_public_ones_are(tmp_path: Path) -> None:
    policy = DataPolicy.open(str(tmp_path / "cache"))
    tables = []
    for name, base in (("public", 2**60), ("own", 2**60 + 2**40)):
        (tmp_path / name).mkdir()
        x = [base + at for at in range(20)]
        data = Data(**written("csv", x, [2 * one for one in x], tmp_path / name))
        tables.append(open_table(data, policy, classifies=False))
    own = table_like(*tables)
    assert own.bases == tables[0].bases
    assert own.numeric[5, 0] + own.shifts["x"] + own.bases["x"] == 2**60 + 2**40 + 5
    assert own.target[5] + own.shifts["y"] + own.bases["y"] == 2 * (2**60 + 2**40 + 5)


@ONE_SET
@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_an_export_takes_the_tables_numbers(suffix: str, tmp_path: Path) -> None:
    x = [1_700_000_000 + at for at in range(60)]
    work = built(
        "tabular_regression", written("csv", x, [2 * one for one in x], tmp_path), tmp_path
    )
    predictor = loaded(work, tmp_path)
    path = predictor.export(tmp_path / f"model.{suffix}")
    rows = np.array(x[:7], dtype=np.float64)[:, None]
    if suffix == "onnx":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        assert session.get_inputs()[0].type == "tensor(double)"
        (found,) = session.run(None, {"rows": rows})
    else:
        found = torch.export.load(path).module()(torch.from_numpy(rows)).detach().numpy()
    np.testing.assert_allclose(found, predictor.predict({"x": x[:7]}), rtol=1e-14)


def test_numbers_beyond_float64_are_not_exported(tmp_path: Path) -> None:
    x = [2**60 + at for at in range(60)]
    work = built("tabular_classification", written("csv", x, ["a", "b"] * 30, tmp_path), tmp_path)
    with pytest.raises(ValueError, match=r"'x'.*beyond 2\*\*53"):
        loaded(work, tmp_path).export(tmp_path / "model.onnx")


def test_models_without_offsets_are_as_they_were(tmp_path: Path) -> None:
    """Their files have no additional tensor, and the configuration of an older version loads."""
    x = list(range(60))
    work = built(
        "tabular_regression", written("csv", x, [2 * one for one in x], tmp_path), tmp_path
    )
    predictor = loaded(work, tmp_path)
    path = tmp_path / "result" / "config.json"
    config = json.loads(path.read_text())
    for field in ("bases", "has_offsets"):
        del config[field]
    del config["spec"]["data"]["numbers"]
    path.write_text(json.dumps(config))
    assert recipes.load(path.parent).predict({"x": 3}) == predictor.predict({"x": 3})
    assert work.train.take(torch.arange(3))[0].dtype == torch.float32
    assert {name.rpartition(".")[2] for name, _ in work.model.named_buffers()} == {
        *("mean", "deviation", "target_mean", "target_deviation")
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [("1,163.74", 1163.74), ("-$1,000", -1000), ("$ 5", 5), ("5 %", 5), ("1,00,000", 100_000)],
)
def test_separators_and_units(text: str, value: float) -> None:
    style = NumberStyle(thousands=",", units=("$", "%"))
    plain, is_number = style.plain(pa.array([text, "1,16.5", "$", "1 5"]))
    assert is_number.to_pylist() == [True, False, False, False]
    assert float(plain[0].as_py()) == value == style.value_of(text)
    for bad in ("1,16.5", "$", "1 5", "1_0", "0x10", "", "\uff11"):
        with pytest.raises(ValueError, match="is not a number"):
            style.value_of(bad)
