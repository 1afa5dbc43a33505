"""The module that MLflow loads a recipe's model by: `mlflow.pyfunc.load_model("runs:/RUN/.")`.

It needs `dray[predict]`, as `dray.load` does.
"""

from __future__ import annotations

from typing import Any

from dray.inference import load


class RecipeModel:
    """A recipe's model with the `predict` of MLflow."""

    def __init__(self, model: Any) -> None:
        self.model = model
        """Model as returned by `dray.load`."""

    def predict(self, model_input: Any, params: Any = None) -> Any:
        """The predictions for a batch of images, the rows of a frame, or its column `prompt`."""
        if hasattr(self.model, "context_length"):
            return [
                self.model.predict(prompt, **(params or {})) for prompt in model_input["prompt"]
            ]
        return self.model.predict(model_input)


def _load_pyfunc(path: str) -> RecipeModel:
    return RecipeModel(load(path))
