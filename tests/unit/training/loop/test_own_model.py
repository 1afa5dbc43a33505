"""A user's own model is trained, averaged, evaluated, saved, and resumed like dray's models."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.marks import ONE_SET, SOAK
from tests.unit.training.jobs import assert_same, die_at_step_18, series, weights
from tests.unit.training.ranks import checkpoint_refs, frames, run_ranks

NETS = """
from torch import nn

class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 10))

    def forward(self, features):
        return self.body(features)

class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, tokens):
        return self.head(self.embed(tokens))
"""


def digits(home: Path, **fields: Any) -> dict[str, Any]:
    """Place the code in the folder where a node would unpack it."""
    code = home / "work" / "job"
    code.mkdir(parents=True)
    (code / "own_nets.py").write_text(NETS)
    train = {
        "global_batch_size": 200,
        "epochs": 3,
        "ema": {"decay": 0.9},
        **fields.pop("train", {}),
    }
    return {
        "recipe": "tabular_classification",
        "data": {"source": "sklearn://digits"},
        "model": {"import": "own_nets:Table"},
        "train": train,
        "resources": {"num_workers": 2},
        "checkpoint": {"every_steps": 5, "keep": 2},
        **fields,
    }


@SOAK
def test_a_run_that_was_killed_and_resumed_ends_equal_to_the_bit(tmp_path: Path) -> None:
    left_alone, killed = tmp_path / "left-alone", tmp_path / "killed"
    assert run_ranks(left_alone, digits(left_alone), world_size=2) == [0, 0]
    spec = digits(killed)
    codes = run_ranks(killed, spec, world_size=2, before=die_at_step_18)
    assert -signal.SIGKILL in codes
    refs = checkpoint_refs(killed)
    assert run_ranks(killed, spec, world_size=2, attempt=2, resume_from=refs[:2]) == [0, 0]
    assert_same(weights(left_alone), weights(killed, attempt=2))
    assert series(left_alone, "val/loss")[24] == series(killed, "val/loss", attempt=2)[24]


@ONE_SET
@pytest.mark.parametrize(
    "strategy",
    [
        {"parallel": {"shard": 2, "zero": 1}},
        {"sync": {"every": 4}},
        {"sync": {"compression": {"name": "powersgd", "rank": 2}}},
    ],
    ids=["zero 1", "local steps", "powersgd"],
)
def test_strategies_that_leave_the_model_whole_train_it(
    tmp_path: Path, strategy: dict[str, Any]
) -> None:
    spec = digits(tmp_path, train={"ema": None, "optimizer": {"lr": 0.01}}, **strategy)
    assert run_ranks(tmp_path, spec, world_size=2) == [0, 0]
    losses = list(series(tmp_path, "val/loss").values())
    assert losses[-1] < losses[0]


def test_a_language_model_of_ones_own_learns(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcabdabcabd" * 400)
    text = {"source": (tmp_path / "text.txt").as_uri()}
    model = {"import": "own_nets:Bigram", "context_length": 8}
    train = {"ema": None, "optimizer": {"lr": 0.1}, "global_batch_size": 50}
    spec = digits(tmp_path, recipe="language_model", data=text, model=model, train=train)
    assert run_ranks(tmp_path, spec, world_size=2) == [0, 0]
    assert list(series(tmp_path, "val/accuracy").values())[-1] > 0.5


def test_wrong_arguments_end_the_job_at_once_with_the_models_own_sentence(tmp_path: Path) -> None:
    spec = digits(tmp_path, model={"import": "own_nets:Table", "args": {"depth": 2}})
    assert run_ranks(tmp_path, spec | {"resources": {"num_workers": 1}}, world_size=1) == [1]
    (error,) = frames(tmp_path, kind="error")
    assert error["cause"] == "cannot_run"
    assert error["message"] == (
        "own_nets:Table can't be created with model.args {'depth': 2}: TypeError: Table.__init__() "
        "got an unexpected keyword argument 'depth'"
    )
