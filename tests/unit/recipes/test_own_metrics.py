"""The user's own metrics of fine-tuning, from the code of the job."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from ray_workers.training.core.errors import ModelError
from tests.unit.recipes import tiny_models as tiny
from tests.unit.recipes.test_fine_tuning import build
from tests.unit.training.jobs import series
from tests.unit.training.loop.test_fine_tuning_runs import artifacts
from tests.unit.training.ranks import frames, run_ranks

SCORES = '''
import torch
from torchmetrics import Metric


class InTopTen(Metric):
    """The share of tokens that are among the ten most likely ones."""

    def __init__(self):
        super().__init__()
        self.add_state("right", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits, targets):
        found = (logits.topk(10).indices == targets[..., None]).any(dim=-1)
        self.right += found.sum()
        self.total += (targets >= 0).sum()

    def compute(self):
        return self.right / self.total


class Vector(InTopTen):
    def compute(self):
        return torch.zeros(2)


class Broken(InTopTen):
    def update(self, logits, targets):
        raise KeyError("no such word")


def number(): return torch.nn.Linear(1, 1)
'''


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    tiny.make_base(tmp_path / "base", template=tiny.MARKED)
    (tmp_path / "data").mkdir()
    tiny.write_lines(tmp_path / "data" / "train.jsonl", tiny.conversations(20, seed=1))
    tiny.write_lines(tmp_path / "data" / "validation.jsonl", tiny.conversations(7, seed=2))
    (code := tmp_path / "work" / "job").mkdir(parents=True)
    (code / "my_scores.py").write_text(SCORES)
    monkeypatch.syspath_prepend(str(code))
    yield tmp_path
    sys.modules.pop("my_scores", None)


def document(home: Path, name: str = "InTopTen", **fields: Any) -> dict[str, Any]:
    method = {"metrics": {"top_ten": f"my_scores:{name}"}, **fields.pop("method", {})}
    data = {"format": "jsonl"}
    return tiny.document(home / "base", home / "data", method=method, data=data, **fields)


@pytest.mark.parametrize("packing", [False, True])
def test_a_metric_is_updated_with_logits_and_next_tokens(home: Path, packing: bool) -> None:
    work = build(document(home, method={"packing": packing}), home)
    metrics = work.metrics()
    assert set(metrics) == {"perplexity", "accuracy", "top_ten"}
    inputs, targets = work.validation.take(torch.arange(7))
    with torch.no_grad():
        logits = work.model.eval()(inputs)
    metrics.update(logits, targets)
    rights = [
        int(target) in row.argsort()[-10:].tolist()
        for row, target in zip(logits.flatten(0, 1), targets.flatten(), strict=True)
        if target != -100
    ]
    assert 0 < sum(rights) < len(rights)
    assert float(metrics.compute()["top_ten"]) == pytest.approx(sum(rights) / len(rights))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("Missing", "there is no Missing in the module my_scores"),
        ("number", "my_scores:number is a Linear, not a torchmetrics.Metric"),
        ("Vector", "method.metrics.top_ten: my_scores:Vector can't compute a number"),
        ("Broken", "KeyError: 'no such word'"),
    ],
)
def test_an_unfit_metric_is_named_before_training(home: Path, name: str, fault: str) -> None:
    with pytest.raises(ModelError) as refused:
        build(document(home, name), home)
    assert fault in str(refused.value)


def test_a_module_that_is_missing_is_named(home: Path) -> None:
    (home / "work" / "job" / "my_scores.py").unlink()
    with pytest.raises(ModelError, match="no module my_scores on this node, and the job has no"):
        build(document(home), home)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_best_checkpoint_is_chosen_by_ones_own_metric(home: Path, num_ranks: int) -> None:
    """The metric does not depend on the number of ranks, which share its states."""
    given = document(
        home,
        resources={"num_workers": num_ranks},
        parallel={"shard": num_ranks} if num_ranks > 1 else {},
        checkpoint={"best": "val/top_ten", "every_steps": 3},
    )
    given["model"]["code"] = f"code-{'0' * 32}"
    given["train"]["epochs"] = 3
    assert run_ranks(home, given, world_size=num_ranks) == [0] * num_ranks
    *_, last = series(home, "val/top_ten").values()
    assert last == pytest.approx(expected(home), abs=1e-6)
    saved = [one["metrics"] for one in frames(home, kind="checkpoint")]
    assert any("val/top_ten" in metrics for metrics in saved)


def expected(home: Path) -> float:
    """Return the share for the result, computed by transformers one conversation at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(artifacts(home))
    tokenizer: Any = AutoTokenizer.from_pretrained(artifacts(home))
    rights = []
    for line in (home / "data" / "validation.jsonl").read_text().splitlines():
        encoded = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        ids = torch.tensor(encoded["input_ids"])
        with torch.no_grad():
            chances = functional.softmax(model(ids[None]).logits[0], dim=-1)
        for at, counts in enumerate(encoded["assistant_masks"][1:]):
            if counts:
                better = (chances[at] > chances[at, ids[at + 1]]).sum()
                rights.append(int(better) < 10)
    return sum(rights) / len(rights)
