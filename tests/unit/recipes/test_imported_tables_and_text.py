"""Recipes for tables and text train a user's own model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dray.spec import JobSpec
from ray_workers import recipes
from ray_workers.recipes.models.tables import OwnTableModel
from ray_workers.shared.contracts import Cause
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import ModelError, cause_of
from ray_workers.training.core.workload import Workload
from ray_workers.training.parallel.meta_init import materialise

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_inputs, num_outputs):
        super().__init__()
        self.head = nn.Linear(num_inputs, num_outputs)

    def forward(self, features):
        self.features = features
        return self.head(features)

class Bigram(nn.Module):
    def __init__(self, vocabulary=256, width=8):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.embed(tokens))

class Last(Bigram):
    def forward(self, tokens):
        return super().forward(tokens)[:, -1]

class Choice(Bigram):
    def forward(self, tokens):
        logits = super().forward(tokens)
        return logits.argmax(dim=-1, keepdim=True).expand_as(logits)

class Moody(Bigram):
    def forward(self, tokens):
        logits = super().forward(tokens)
        return (logits, None) if self.training else logits
"""
ROWS = [
    "size,colour,kind,price",
    *(
        f"{n if n % 7 else ''},{'red' if n % 2 else 'blue'},"
        f"{'big' if n > 20 else 'small'},{1000 + 10 * n}"
        for n in range(40)
    ),
]
MISSING = {"missing_columns": {"size": "indicator"}}
SENTENCE = "the quick brown fox jumps over the lazy dog. "


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_nets.py").write_text(NETS)
    (tmp_path / "table.csv").write_text("\n".join(ROWS) + "\n")
    (tmp_path / "text.txt").write_text(SENTENCE * 20)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_nets", None)


def build(recipe: str, data: dict[str, Any], model: dict[str, Any]) -> Workload:
    document = JobSpec.model_validate({"recipe": recipe, "data": data, "model": model})
    work = recipes.RECIPES[recipe].build(document, DataPolicy.open())
    materialise(work.model, torch.device("cpu"), document.train.seed)
    return work


def table(tmp_path: Path, target: str, features: list[str]) -> dict[str, Any]:
    source = (tmp_path / "table.csv").as_uri()
    return {"source": source, "target": target, "features": features, **MISSING}


def net(num_inputs: int, num_outputs: int) -> dict[str, Any]:
    return {
        "import": "my_nets:Net",
        "args": {"num_inputs": num_inputs, "num_outputs": num_outputs},
    }


def test_a_tables_features_are_standardised_filled_in_coded_and_marked(tmp_path: Path) -> None:
    data = table(tmp_path, "kind", ["size", "price", "colour"])
    work = build("tabular_classification", data, net(4, 2))
    assert isinstance(work.model, OwnTableModel)
    rows, _ = work.train.take(torch.arange(len(work.train)))
    assert work.model(rows).shape == (len(rows), 2)
    features = work.model.network.features
    assert features.shape == (len(rows), 4)
    assert features.isfinite().all()
    torch.testing.assert_close(features[:, :2].mean(dim=0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        features[:, :2].std(dim=0, correction=0), torch.ones(2), atol=1e-5, rtol=0
    )
    assert set(features[:, 2].tolist()) == {1.0, 2.0}
    assert torch.equal(features[:, 3].bool(), rows[:, 0].isnan())


def test_a_model_of_ones_own_predicts_classes_and_numbers(tmp_path: Path) -> None:
    row = {"size": 12, "colour": "red", "price": 1120, "kind": "small"}
    for recipe, target, features, num_outputs in (
        ("tabular_classification", "kind", ["size", "price", "colour"], 2),
        ("tabular_regression", "price", ["size", "kind", "colour"], 1),
    ):
        folder = tmp_path / recipe
        folder.mkdir()
        work = build(recipe, table(tmp_path, target, features), net(4, num_outputs))
        work.write_results(work.model, {}, 1, folder)
        predictor = recipes.load(folder)
        outputs = work.model.eval()(predictor.form.tensor([row]))
        (predicted,) = predictor.predict([row])
        if predictor.labels is None:
            assert predicted == pytest.approx(outputs.item())
            assert predicted == pytest.approx(1200, abs=600), "in the target's own unit"
        else:
            assert predicted == predictor.labels[int(outputs.argmax())]


def text(tmp_path: Path, **more: Any) -> Workload:
    model = {"import": "my_nets:Bigram", "context_length": 8, **more}
    return build("language_model", {"source": (tmp_path / "text.txt").as_uri()}, model)


def test_a_language_model_of_ones_own_goes_on_with_a_text(tmp_path: Path) -> None:
    work = text(tmp_path)
    tokens, targets = work.train.take(torch.tensor([0, 1]))
    assert (tokens.shape, tokens.dtype) == ((2, 8), torch.int64)
    logits = work.model(tokens)
    assert work.loss_sum(logits, targets).isfinite()
    work.write_results(work.model, {}, 1, tmp_path)
    generator = recipes.load(tmp_path)
    assert generator.context_length == 8
    assert torch.equal(generator.model(tokens), logits)
    expected = bytes([int(generator.model(torch.tensor([[ord("q")]]))[0, -1].argmax())])
    assert generator.predict("q", num_tokens=1) == expected.decode(errors="replace")
    (tmp_path / "text.txt").write_text(SENTENCE * 100)
    unset = text(tmp_path, context_length=None)
    assert unset.train.take(torch.tensor([0]))[0].shape == (1, 128)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"import": "my_nets:Last"},
            r"shape \(2, 256\) for inputs of shape \(2, 8\): expected "
            r"\(2, 8, 256\), which is \(batch, time, vocabulary\)",
        ),
        ({"import": "my_nets:Choice"}, "a tensor of torch.int64: expected a floating-point type"),
        (
            {"import": "my_nets:Bigram", "args": {"widht": 3}},
            r"can't be created with model.args {'widht': 3}: TypeError: Bigram.__init__\(\) got an "
            "unexpected keyword argument 'widht'",
        ),
        (
            {"import": "my_nets:Bigram", "args": {"vocabulary": 7}},
            r"shape \(2, 8, 7\) .*: expected \(2, 8, 256\)",
        ),
        (
            {"import": "net_of_mine:Net"},
            "no module net_of_mine .* add model.code, for example with `dray submit",
        ),
    ],
)
def test_a_model_that_does_not_fit_ends_the_job_with_one_sentence(
    tmp_path: Path, model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        text(tmp_path, **model)
    assert cause_of(caught.value) is Cause.CANNOT_RUN


def test_a_model_that_answers_otherwise_when_it_trains_is_refused(tmp_path: Path) -> None:
    work = text(tmp_path, **{"import": "my_nets:Moody"})
    tokens, _ = work.train.take(torch.tensor([0]))
    assert work.model.eval()(tokens).shape == (1, 8, 256)
    with pytest.raises(ModelError, match=r"Moody returns a tuple, not a tensor of shape"):
        work.model.train()(tokens)


def test_a_package_that_the_model_imports_is_not_taken_for_the_model(tmp_path: Path) -> None:
    (tmp_path / "my_nets.py").write_text("import no_such_package_here\n" + NETS)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_here"):
        text(tmp_path)
