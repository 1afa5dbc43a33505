"""The loop trains a user's own model on several ranks."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.marks import SOAK
from tests.unit.training import jobs
from tests.unit.training.ranks import run_ranks

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Parameter(torch.randn(64, width) / 8)
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        return self.head((images.flatten(1) @ self.first).relu())
"""


@SOAK
def test_two_ranks_train_it_as_one_does(tmp_path: Path) -> None:
    found = []
    for num_workers in (1, 2):
        home = tmp_path / str(num_workers)
        folder = home / "work" / "job"
        folder.mkdir(parents=True)
        (folder / "my_net.py").write_text(NET)
        document = jobs.document(num_workers, epochs=2)
        document["model"] = {"import": "my_net:Net", "args": {"width": 24}}
        assert run_ranks(home, document, world_size=num_workers) == [0] * num_workers
        found.append(jobs.weights(home))
        losses = jobs.series(home, "train/loss")
        assert losses[max(losses)] < losses[1] - 0.1
    assert set(found[0]) == {"first", "head.weight", "head.bias"}
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-4, atol=1e-5)
