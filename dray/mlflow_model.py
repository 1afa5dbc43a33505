"""The loader module for a recipe's model in MLflow: `mlflow.pyfunc.load_model("runs:/RUN/.")`.

Requires `dray[predict]`, like `dray.load`.
"""

from __future__ import annotations

from typing import Any

from dray.inference import load


class RecipeModel:
    """Wraps a recipe's model in MLflow's `predict` interface."""

    def __init__(self, model: Any) -> None:
        self.model = model
        """The model, as returned by `dray.load`."""

    def predict(self, model_input: Any, params: Any = None) -> Any:
        """Return predictions for a batch of images, for the rows of a DataFrame, or for the prompts
        in the column `prompt` of a DataFrame."""
        if hasattr(self.model, "context_length"):
            return [
                self.model.predict(prompt, **(params or {})) for prompt in model_input["prompt"]
            ]
        return self.model.predict(model_input)


def _load_pyfunc(path: str) -> RecipeModel:
    return RecipeModel(load(path))
