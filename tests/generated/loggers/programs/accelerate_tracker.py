"""accelerate with its tracker for TensorBoard, for two seeds."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from common import Truth, regression

torch: Any = import_module("torch")
accelerate: Any = import_module("accelerate")


def main() -> None:
    truth = Truth()
    x, y = regression(torch)
    for seed in (1, 2):
        torch.manual_seed(seed)
        runner = accelerate.Accelerator(
            log_with="tensorboard", project_dir=f"runs/seed{seed}", cpu=True
        )
        runner.init_trackers("regression", config={"lr": 0.1})
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = runner.prepare(model, optimizer)
        for step in range(12):
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            runner.backward(loss)
            optimizer.step()
            runner.log({"train/loss": loss.item(), "lr": 0.1}, step=step)
            truth.add(f"seed{seed}:train/loss", step, loss.item())
            truth.add(f"seed{seed}:lr", step, 0.1)
        runner.end_training()
        accelerate.state.AcceleratorState._reset_state(True)
    truth.write()


if __name__ == "__main__":
    main()
