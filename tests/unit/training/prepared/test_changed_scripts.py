"""Scripts that change what they train during the run, or leave their loop early."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.unit.training.prepared.programs import assert_same, final_state
from tests.unit.training.ranks import frames, run_ranks

SCRIPT = """
    import os
    import torch
    from torch import nn
    from dray import train

    OUT, KILLED = {out!r}, {killed!r}
    RANK = int(os.environ["RANK"])
    train.init(seed=1, checkpoint_every_s=None)
    torch.manual_seed(0)
    x = torch.randn(12, 4)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model[1:].parameters(), lr=0.01)
    model, optimizer, loader = train.prepare(model, optimizer, loader)
    IS_ANEW = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    for epoch in {epochs}:
        if epoch == 1:
            {change}
        for inputs, targets in loader:
            progress = train.progress()
            if KILLED == [RANK, progress.epoch, progress.batch] and not IS_ANEW:
                os.kill(os.getpid(), 9)
            model.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    torch.save([model.state_dict(), optimizer.state_dict()], f"{{OUT}}/state-{{RANK}}.pt")
"""
ADD = "optimizer.add_param_group({'params': model[0].parameters(), 'lr': 0.02})"
REPLACE = "model[2] = nn.Linear(5, 1); optimizer.add_param_group({'params': model[2].parameters()})"


def run(
    home: Path, change: str = ADD, epochs: str = "range(2)", killed: list[int] | None = None
) -> list[int | None]:
    home.mkdir()
    path = home / "script.py"
    given = {"out": str(home), "killed": killed, "epochs": epochs, "change": change}
    path.write_text(textwrap.dedent(SCRIPT).format(**given))
    document = {"script": {"entrypoint": str(path)}}
    return run_ranks(home, document, world_size=2, recovers=True, ends_with_error=True)


def messages(home: Path) -> list[str]:
    return [one["message"] for rank in (0, 1) for one in frames(home, rank=rank, kind="error")]


def test_layers_that_an_optimizer_gets_in_a_later_epoch_are_recovered(tmp_path: Path) -> None:
    assert run(tmp_path / "undisturbed") == [0, 0]
    undisturbed = final_state(tmp_path / "undisturbed", 2)
    for epoch in (0, 1):
        home = tmp_path / f"killed-{epoch}"
        assert run(home, killed=[0, epoch, 1]) == [0, 0]
        assert_same(final_state(home, 2), undisturbed)


@pytest.mark.parametrize("change", [REPLACE, REPLACE.split(";")[0]])
def test_a_layer_that_is_made_after_prepare_is_refused(tmp_path: Path, change: str) -> None:
    assert any(run(tmp_path / "replaced", change))
    assert any("created after prepare()" in each for each in messages(tmp_path / "replaced"))


def test_a_loop_that_leaves_out_the_epochs_that_are_done_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "left-out"
    assert any(run(home, "pass", "range(int(IS_ANEW), 2)", killed=[1, 1, 1]))
    assert any("ended before it reached epoch 1" in each for each in messages(home))
