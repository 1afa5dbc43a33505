"""A recipe trains a user's own model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dray.spec import Imported, JobSpec
from ray_workers import recipes
from ray_workers.recipes.models import imported
from ray_workers.shared.contracts import Cause
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import ModelError, cause_of
from ray_workers.training.core.workload import Workload
from ray_workers.training.parallel.meta_init import materialise

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes=10, width=8):
        super().__init__()
        self.hidden, self.hidden_2 = nn.Linear(64, width), nn.Linear(width, width)
        self.hidden_2.weight = nn.Parameter(torch.rand(width, width))
        self.same = self.hidden_2.weight
        self.head = nn.Linear(width, num_classes)

    def forward(self, images):
        return self.head(self.hidden_2(self.hidden(images.flatten(1)).relu()))

class Wide(Net):
    def forward(self, images):
        return {"logits": super().forward(images)}

class Frozen(nn.Module):
    pass

def number(): return 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_net.py").write_text(NET)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_net", None)


def build(name: str = "Net", seed: int = 0, **args: Any) -> Workload:
    document = JobSpec.model_validate(
        {
            "recipe": "image_classification",
            "model": {"import": f"my_net:{name}", "args": args},
            "train": {"seed": seed},
        }
    )
    work = recipes.RECIPES["image_classification"].build(document, DataPolicy.open())
    materialise(work.model, torch.device("cpu"), seed)
    return work


def test_it_begins_the_same_for_the_same_seed_also_with_numbers_of_its_own() -> None:
    def weights(seed: int) -> torch.Tensor:
        model: nn.Module = build(seed=seed).model
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(5), weights(5))
    assert not torch.equal(weights(5), weights(6))


def test_the_result_is_rebuilt_with_its_code_at_hand(tmp_path: Path) -> None:
    work = build(width=4)
    folder = tmp_path / "artifacts"
    folder.mkdir()
    work.write_results(work.model, {"val/loss": 1.0}, 3, folder)
    images, _ = work.validation.take(torch.arange(5))
    expected = work.model(images).argmax(dim=1).tolist()
    assert recipes.load(folder).predict(images) == [str(label) for label in expected]
    sys.modules.pop("my_net")
    (tmp_path / "my_net.py").unlink()
    with pytest.raises(ImportError, match=r"dray code JOB FOLDER"):
        recipes.load(folder)


def test_results_that_name_a_function_of_python_do_not_call_it(tmp_path: Path) -> None:
    """Otherwise a user who loads the files of another user's job would run that user's command."""
    work = build()
    folder, done = tmp_path / "artifacts", tmp_path / "done"
    folder.mkdir()
    work.write_results(work.model, {"val/loss": 1.0}, 3, folder)
    config = (folder / "config.json").read_text()
    for name, command in {"os:system": f"touch {done}", "subprocess:call": None}.items():
        changed = json.loads(config)
        args = {"command": command} if command else {"args": ["touch", str(done)]}
        changed["spec"]["model"] |= {"import": name, "args": args}
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ModelError, match="Python's standard library"):
            recipes.load(folder)
    assert not done.exists()


def test_a_module_of_the_users_own_may_have_a_name_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "antigravity.py").write_text(NET)
    monkeypatch.delitem(sys.modules, "antigravity", raising=False)
    options = Imported.model_validate({"import": "antigravity:Net"})
    assert isinstance(imported.at_hand(options), nn.Module)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        (
            "Net",
            {"num_classes": 3},
            r"shape \(2, 3\).*expected \(2, 10\), which is \(batch, classes\)",
        ),
        ("Wide", {}, "returns a dict, not a tensor"),
        ("Frozen", {}, "no trainable parameters"),
        ("number", {}, "returned a int, not a torch.nn.Module"),
        ("Other", {}, "no Other in the module my_net"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_for_good(name: str, args: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        build(name, **args)
    assert cause_of(caught.value) is Cause.CANNOT_RUN


def test_an_error_names_the_shape_of_data_that_the_model_can_not_compute() -> None:
    options = JobSpec.model_validate(
        {"recipe": "image_segmentation", "model": {"import": "my_net:Net"}, "data": DATA}
    ).model
    assert isinstance(options, Imported)
    with pytest.raises(ModelError, match=r"can't process a batch of shape \(2, 3, 9, 9\)"):
        imported.build(options, 0, (3, 9, 9), (10, 9, 9), "(batch, classes, height, width)")


DATA = {"source": "file:///data/cells", "image_size": [9, 9]}
