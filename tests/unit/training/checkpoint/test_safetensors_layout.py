"""A state is written to two files and restored without changes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ray_workers.training.checkpoint.safetensors_layout import (
    PAGE_BYTES,
    flatten,
    lay_out,
    read_tensors,
    restore,
)
from ray_workers.training.checkpoint.staging import Stager

STATE: dict[str, Any] = {
    "model": {"a": torch.randn(3, 5), "b/c": torch.arange(4), "b": {"c": torch.tensor(True)}},
    "optimizer": {
        "state": {0: {"step": torch.tensor(3.0), "none": torch.empty(0, 7)}, 11: {}},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 11], "foreach": None}],
    },
    "half": torch.randn(9).bfloat16(),
    "patience": {"best": math.inf, "evaluations_since": 0},
    "flag": True,
    "text": "ü",
}


def through_the_files(state: dict[str, Any]) -> Any:
    snapshot = Stager().take(state)
    snapshot.wait()
    tensors = read_tensors(bytes(snapshot.data[: snapshot.num_bytes]))
    return restore(json.loads(json.dumps(snapshot.tree)), tensors)


def test_a_state_comes_out_as_it_went_in() -> None:
    found = through_the_files(STATE)
    assert torch.equal(found["model"]["a"], STATE["model"]["a"])
    assert torch.equal(found["model"]["b/c"], torch.arange(4))
    assert found["model"]["b"]["c"].dtype == torch.bool
    assert torch.equal(found["half"], STATE["half"])
    assert found["half"].dtype == torch.bfloat16
    states = found["optimizer"]["state"]
    assert list(states) == [0, 11]
    assert states[0]["step"].shape == ()
    assert states[0]["none"].shape == (0, 7)
    assert found["optimizer"]["param_groups"] == STATE["optimizer"]["param_groups"]
    for key in ("patience", "flag", "text"):
        assert found[key] == STATE[key]


def test_views_and_shared_tensors_are_saved_as_they_are_seen() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    found = through_the_files({"t": whole.T, "part": whole[:, 1], "again": whole})
    assert torch.equal(found["t"], whole.T)
    assert torch.equal(found["part"], whole[:, 1])
    assert torch.equal(found["again"], whole)


def test_the_file_is_one_of_safetensors_whose_data_begin_at_a_page(tmp_path: Any) -> None:
    snapshot = Stager().take(STATE)
    path = tmp_path / "x.safetensors"
    path.write_bytes(snapshot.data[: snapshot.num_bytes])
    assert torch.equal(load_file(path)["model/a"], STATE["model"]["a"])
    layout = lay_out(flatten(STATE)[1])
    assert len(layout.header) % PAGE_BYTES == 0
    assert all(location.start % location.dtype.itemsize == 0 for location in layout.locations)
    assert len(snapshot.data) % PAGE_BYTES == 0


@pytest.mark.parametrize(
    ("value", "message"), [({1.5: 0}, "the key 1.5"), (object(), "x is a object")]
)
def test_what_no_checkpoint_can_hold_is_refused_by_its_name(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flatten({"x": value})


@pytest.mark.parametrize("data", [b"", b"x" * 100, (10**9).to_bytes(8, "little") + b"{}"])
def test_bytes_that_are_no_safetensors_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_tensors(data)
