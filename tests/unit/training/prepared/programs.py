"""A training program that calls `train.prepare`, and a function that runs it with ranks that
die."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ray_workers.shared.contracts import RankTask
from ray_workers.training.core.faultpoints import FaultPoint, arm_with
from ray_workers.training.scripts.prepared_script import RankGroup
from tests.unit.training.ranks import run_ranks

PROGRAM = """
    import os
    import torch
    import json
    from torch import nn
    from torch.utils._pytree import tree_map_only
    from dray import train

    OUT = {out!r}
    {options}
    FIRST = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def die(rank, now):
        if FIRST and now and int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), 9)

    train.init(checkpoint_every_s=None, **INIT)
    torch.manual_seed(0)
    x = torch.randn(60, 6)
    y = x.sum(1, keepdim=True) + 0.1
    model = nn.Sequential(nn.Linear(6, 16), *MIDDLE, nn.Linear(16, 1)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    data = torch.utils.data.TensorDataset(x, y, torch.arange(60))
    loader = torch.utils.data.DataLoader(data, batch_size=12, shuffle=True, num_workers=WORKERS)
    model, optimizer, loader = train.prepare(model, optimizer, loader, scheduler=scheduler)
    START()
    for epoch in (train.epochs(3) if COUNTS else range(3)):
        for inputs, targets, numbers in loader:
            step = train.progress().step + 1
            NUMBERS(step, numbers)
            inputs, targets = inputs.to(DEVICE), targets.to(DEVICE)
            BEFORE(step)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            AFTER_BACKWARD(step)
            optimizer.step()
            scheduler.step()
            AFTER_STEP(step)
            train.report({{"train/loss": loss.item(), "lr": scheduler.get_last_lr()[0]}})
        AFTER_EPOCH(epoch)
    state = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict()]
    state = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), state)
    torch.save(state, f"{{OUT}}/state-{{train.context().rank}}.pt")
    AT_END()
"""

DEFAULTS = {
    "DEVICE": "'cpu'",
    "INIT": "{}",
    "WORKERS": "0",
    "COUNTS": "True",
    "MIDDLE": "[nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2)]",
    "NUMBERS": "lambda step, numbers: None",
    "START": "lambda: None",
    "BEFORE": "lambda step: None",
    "AFTER_BACKWARD": "lambda step: None",
    "AFTER_STEP": "lambda step: None",
    "AFTER_EPOCH": "lambda epoch: None",
    "AT_END": "lambda: None",
}


class Leash:
    """Makes the ranks wait at a point in a step until the next round is announced."""

    def __init__(self, point: FaultPoint, step: int) -> None:
        self.point, self.step = point, step

    def __call__(self, task: RankTask) -> None:
        arm_with(self.point, self._wait, at_step=self.step)

    def _wait(self, group: RankGroup) -> None:
        while group._page.wanted < 1:
            time.sleep(0.005)


def program(home: Path, **options: str) -> dict[str, Any]:
    """Return the document of the program with these expressions instead of `DEFAULTS`."""
    home.mkdir(parents=True, exist_ok=True)
    lines = "\n    ".join(f"{name} = {value}" for name, value in {**DEFAULTS, **options}.items())
    text = textwrap.dedent(PROGRAM).format(out=str(home), options=lines.replace("\n    ", "\n"))
    path = home / "train_it.py"
    path.write_text(text)
    return {"script": {"entrypoint": str(path)}}


def run(
    home: Path,
    world_size: int,
    before: Callable[[RankTask], None] | None = None,
    device: str = "cpu",
    num_spares: int = 0,
    **options: str,
) -> list[Any]:
    """Run the program, replacing ranks that are killed, and return the final state, which is the
    same on all ranks."""
    document = program(home, DEVICE=repr(device), **options)
    if num_spares:
        document |= {"elastic": {"spares": num_spares}}
    group = {"world_size": world_size, "num_spares": num_spares}
    codes = run_ranks(home, document, **group, before=before, device=device, recovers=True)
    assert codes == [0] * world_size
    return final_state(home, world_size)


def final_state(home: Path, world_size: int) -> list[Any]:
    states = [torch.load(home / f"state-{rank}.pt") for rank in range(world_size)]
    for other in states[1:]:
        assert_same(states[0], other)
    found: list[Any] = states[0]
    return found


def assert_same(one: Any, other: Any) -> None:
    """Check that nested values are equal, and tensors bitwise equal except for the kind of NaN."""
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other
