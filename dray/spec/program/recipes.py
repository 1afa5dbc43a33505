"""The models, data formats and metrics that each recipe supports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from dray.spec.fields import wrong
from dray.spec.program.model import Unet
from dray.spec.training.data import Data, Format
from dray.spec.training.train import Train

RecipeName = Literal[
    "image_classification",
    "image_segmentation",
    "tabular_classification",
    "tabular_regression",
    "language_model",
    "fine_tuning",
]

MINIMISED: Final = frozenset(
    {
        "val/loss",
        "val/mae",
        "val/mse",
        "val/perplexity",
        "val/rewards/rejected",
        "val/worst_tenth_loss",
    }
)
"""Metrics for which lower values are better."""


FORMATS_OF: Final[Mapping[str, tuple[Format, ...]]] = MappingProxyType(
    {
        "target": ("npz", "csv", "parquet"),
        "features": ("npz", "csv", "parquet"),
        "categorical": ("csv", "parquet"),
        "delimiter": ("csv",),
        "encoding": ("csv",),
        "decimal": ("csv",),
        "numbers": ("csv",),
        "missing": ("csv", "parquet"),
        "missing_columns": ("csv", "parquet"),
        "image_size": ("images",),
    }
)
"""The formats that support each option of `data`; options that are not listed work with all
formats."""

_OF_EXAMPLES: Final = ("examples", "sources", "validation")
_OF_FILES: Final = ("delimiter", "encoding")
"""Options that determine how a file is read, whatever its columns are."""
OPTIONAL: Final = {name: Data.model_fields[name].default for name in (*FORMATS_OF, *_OF_EXAMPLES)}
"""The options of `data` that only some recipes or formats support, and their defaults."""


@dataclass(frozen=True)
class Options:
    """The models, data formats and metrics that a recipe supports."""

    models: tuple[str, ...]
    """Supported models; the first is the default."""
    formats: tuple[Format, ...]
    folder_format: Format | None
    """Format of sources without a known extension."""
    sklearn_sets: tuple[str, ...]
    metrics: tuple[str, ...]
    classifies: bool
    reads_masks: bool = False
    """Whether the targets are masks."""
    reads_examples: bool = False
    """Whether the data are examples for a language model."""

    @property
    def client_metrics(self) -> tuple[str, ...]:
        """Metrics of the recipe in a federated job, including the metrics over the worst
        clients."""
        accuracy = ("val/worst_tenth_accuracy",) if self.classifies else ()
        return (*self.metrics, "val/worst_tenth_loss", *accuracy)

    def reads(self, option: str) -> bool:
        """Whether the recipe can use an option of `data`, given its name in OPTIONAL."""
        if option in _OF_EXAMPLES:
            return self.reads_examples
        if self.reads_examples and option not in _OF_FILES:
            return False
        return not {*FORMATS_OF[option]}.isdisjoint(self.formats)

    def format_of(self, data: Data) -> Format | None:
        return data.known_format or self.folder_format

    def check(
        self, model: Any, data: Data, train: Train, best: str | None, metrics: tuple[str, ...]
    ) -> None:
        """Raise a validation error for the first option that the recipe does not support. `metrics`
        are the metrics of the job."""
        if model.name not in self.models:
            raise wrong("/model/name", f"must be one of {_listed(self.models)} for this recipe")
        self._check_options(data)
        for number, one in enumerate(data.mixed):
            self._check_data(one, "/data" if data.sources is None else f"/data/sources/{number}")
        if data.held_out is not None:
            self._check_data(data.held_out, "/data", "validation")
        if isinstance(model, Unet) and data.image_size is not None:
            _check_halving(model, data.image_size)
        stopping = train.early_stopping
        for pointer, metric in (
            ("/checkpoint/best", best),
            ("/train/early_stopping/metric", stopping.metric if stopping else None),
        ):
            if metric is not None and metric not in metrics:
                raise wrong(pointer, f"must be one of {_listed(metrics)} for this recipe")
        if train.label_smoothing > 0.0 and not self.classifies:
            raise wrong("/train/label_smoothing", "is only for classification")

    def _check_options(self, data: Data) -> None:
        """Raise a validation error for the first option that does not belong to the recipe or to
        the format of any source."""
        parts = data.mixed if data.held_out is None else [*data.mixed, data.held_out]
        forms = list(dict.fromkeys(str(self.format_of(part)) for part in parts))
        for option, default in OPTIONAL.items():
            if getattr(data, option) == default:
                continue
            pointer, owners = f"/data/{option}", FORMATS_OF.get(option)
            if owners is None and not self.reads_examples:
                raise wrong(pointer, "is only for the recipe fine_tuning: leave it out")
            if self.reads_examples and not self.reads(option):
                raise wrong(pointer, "is not for the recipe fine_tuning: leave it out")
            if owners is not None and not set(owners).intersection(forms):
                found = f"the format of the data is {_listed(forms)}"
                raise wrong(pointer, f"is only for {_listed(owners)}, but {found}")

    def _check_data(self, data: Data, at: str = "/data", field: str = "source") -> None:
        """Check a source. at, field: where the document names it."""
        form = self.format_of(data)
        if form == "sklearn":
            name = data.source.removeprefix("sklearn://").rstrip("/")
            if name not in self.sklearn_sets:
                known = _listed(f"sklearn://{one}" for one in self.sklearn_sets)
                brought = (
                    f"; use one of {known}"
                    if known
                    else ", which supports no scikit-learn data sets"
                )
                raise wrong(f"{at}/{field}", f"is not a data set for this recipe{brought}")
        elif form is None:
            formats = _listed(self.formats)
            raise wrong(
                f"{at}/format",
                f"is required, because the extension of the source is not one of {formats}",
            )
        elif form not in self.formats:
            pointer = "/data/format" if data.format else f"{at}/{field}"
            raise wrong(pointer, f"is {form}, but this recipe reads only {_listed(self.formats)}")
        if form in ("csv", "parquet") and data.target is None and not self.reads_examples:
            raise wrong("/data/target", f"is required: it names the {form} column to predict")
        if form == "csv" and data.decimal == data.known_delimiter:
            raise wrong(
                "/data/decimal",
                "is a comma, but data.delimiter is also a comma: set data.delimiter to another "
                "character, such as ;",
            )
        if form == "csv" and data.numbers.thousands == data.decimal:
            raise wrong("/data/numbers/thousands", "must differ from data.decimal")
        if data.missing_columns.get(data.target or "", "error") not in ("error", "drop"):
            message = (
                f"must be error or drop for the target {data.target!r}, whose missing values are "
                "never filled in"
            )
            raise wrong("/data/missing_columns", message)
        if data.classes is not None and not self.reads_masks:
            raise wrong(
                "/data/classes", "is only for image_segmentation: it names the classes of masks"
            )
        if form == "npz" and data.features is not None and len(data.features) > 1:
            raise wrong(
                "/data/features", "must name exactly one array of the npz file: the array of inputs"
            )


METRICS_OF_METHOD: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "sft": ("val/loss", "val/perplexity", "val/accuracy"),
        "dpo": (
            "val/loss",
            "val/rewards/chosen",
            "val/rewards/rejected",
            "val/rewards/margins",
            "val/rewards/accuracies",
        ),
        "reward": ("val/loss", "val/accuracy", "val/margin"),
    }
)
"""Metrics of each method of fine-tuning, with the names of TRL."""
_SAMPLES_METRICS = ("val/loss", "val/accuracy", "val/f1", "val/auroc")
_TABLES: tuple[Format, ...] = ("csv", "parquet", "npz")

RECIPES: Final[Mapping[str, Options]] = MappingProxyType(
    {
        "image_classification": Options(
            models=("cnn", "resnet", "mlp", "imported"),
            formats=("images", "npz"),
            folder_format="images",
            sklearn_sets=("digits",),
            metrics=_SAMPLES_METRICS,
            classifies=True,
        ),
        "image_segmentation": Options(
            models=("unet", "imported"),
            formats=("images", "npz"),
            folder_format="images",
            sklearn_sets=(),
            metrics=("val/loss", "val/dice", "val/iou", "val/accuracy"),
            classifies=False,
            reads_masks=True,
        ),
        "tabular_classification": Options(
            models=("mlp", "imported"),
            formats=_TABLES,
            folder_format=None,
            sklearn_sets=("breast_cancer", "digits", "iris", "wine"),
            metrics=_SAMPLES_METRICS,
            classifies=True,
        ),
        "tabular_regression": Options(
            models=("mlp", "imported"),
            formats=_TABLES,
            folder_format=None,
            sklearn_sets=("diabetes",),
            metrics=("val/loss", "val/mae", "val/mse", "val/r2"),
            classifies=False,
        ),
        "language_model": Options(
            models=("gpt", "imported"),
            formats=("text",),
            folder_format="text",
            sklearn_sets=(),
            metrics=("val/loss", "val/perplexity", "val/accuracy"),
            classifies=False,
        ),
        "fine_tuning": Options(
            models=("pretrained",),
            formats=("jsonl", "parquet", "csv"),
            folder_format="jsonl",
            sklearn_sets=(),
            metrics=METRICS_OF_METHOD["sft"],
            classifies=False,
            reads_examples=True,
        ),
    }
)
"""Options of each recipe, keyed by its name in job documents."""


def _check_halving(model: Unet, size: tuple[int, int]) -> None:
    if min(size) < model.least_side:
        height, width = size
        raise wrong(
            "/data/image_size",
            f"is {height} x {width}; a unet of depth {model.depth} requires sides of at least "
            f"{model.least_side} pixels",
        )


def _listed(words: Any) -> str:
    return ", ".join(words)
