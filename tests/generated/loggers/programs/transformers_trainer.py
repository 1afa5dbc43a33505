"""The Trainer of transformers, with its progress bar, evaluations, and event files if asked for."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from common import Truth, regression

torch: Any = import_module("torch")
transformers: Any = import_module("transformers")


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(4, 1)

    def forward(self, x: Any, labels: Any = None) -> Any:
        found = self.line(x)
        return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}


class Callback(transformers.TrainerCallback):  # type: ignore[misc]
    """Writes down what the Trainer logs."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        for name, value in logs.items():
            kind, _, rest = name.partition("_")
            key = f"eval/{rest}" if kind == "eval" else f"train/{name}"
            if name != "epoch":
                self.truth.add(key, state.global_step, value)


def main(report_to: str, disable_tqdm: bool) -> None:
    x, y = regression(torch)
    samples = [{"x": one, "labels": label} for one, label in zip(x, y, strict=True)]
    truth = Truth()
    options = transformers.TrainingArguments(
        output_dir="out",
        num_train_epochs=4,
        per_device_train_batch_size=8,
        logging_steps=3,
        eval_strategy="steps",
        eval_steps=6,
        save_strategy="no",
        report_to=report_to,
        disable_tqdm=disable_tqdm,
        use_cpu=True,
    )
    trainer = transformers.Trainer(
        Model(), options, train_dataset=samples, eval_dataset=samples[:16]
    )
    trainer.add_callback(Callback(truth))
    trainer.train()
    trainer.evaluate()
    truth.write()


if __name__ == "__main__":
    main(sys.argv[1], "plain" in sys.argv)
