"""Sweeps. A sweep creates many jobs (trials) from one document. The trials differ in the values of
some parameters, and are compared by a metric."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from dray.input.names import unfit
from dray.spec.fields import MAX_STEPS, Document, Int, a_number, wrong
from dray.spec.program.metrics import MetricKey
from dray.spec.program.recipes import MINIMISED
from dray.spec.trial_values import PLACEHOLDER, Value, as_text, variable

MAX_PARAMETERS: Final = 32
MAX_CHOICES: Final = 256
"""Maximum total number of values in all lists of a sweep."""
MAX_LIST: Final = 64
"""Maximum number of items if a value is itself a list."""
MAX_ARGUMENTS: Final = 1 << 20
"""Maximum total number of characters in the arguments of a trial. Operating systems have a similar
limit, and a parameter that occurs a thousand times in the arguments could exhaust memory."""
MAX_NUMBER: Final = 2**53
"""Maximum magnitude of integers, including bounds. A double represents all of them exactly."""
SWEPT_PARTS: Final = ("train", "model", "sync", "federated")
"""Parts of a recipe's document whose fields a sweep can vary."""
FIXED: Final = ("model.code", "model.import")
"""Fields of SWEPT_PARTS that a sweep can't vary, because they name code, and code is checked only
once, when the sweep is submitted."""
RECIPE_METRICS: Final = ("train/loss", "perf/samples_per_s", "perf/step_time_s")
"""Metrics that every recipe reports in addition to its evaluation metrics."""
LESS_IS_BETTER: Final = MINIMISED | {"train/loss", "perf/step_time_s"}
"""Metrics that recipes report, and for which lower values are better."""

_NEAR: Final = 1e-9
"""Tolerance for binary rounding errors, in units of a range's step."""


def _scalar(value: Any) -> Any:
    if isinstance(value, str):
        if (found := unfit(value)) is not None or len(value) > 4096:
            raise ValueError(f"contains a string with {found or 'more than 4096 characters'}")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("contains a number that is not finite")
    elif isinstance(value, int):
        if abs(value) > MAX_NUMBER:
            raise ValueError("contains an integer beyond 2**53")
    elif value is not None:
        raise ValueError("contains a mapping as a value: list the values of each field separately")
    return value


def _choice(value: Any) -> Any:
    if not isinstance(value, list):
        return _scalar(value)
    if len(value) > MAX_LIST:
        raise ValueError(f"contains a list of more than {MAX_LIST} items as a value")
    return [_scalar(item) for item in value]


def _bound(value: Any) -> Any:
    """Check a bound of a range. An int remains an int, because the values of the range are then
    integers too."""
    value = a_number(value)
    if not (isinstance(value, int) or math.isfinite(value)):
        raise ValueError("must be a finite number")
    if abs(value) > MAX_NUMBER and not (isinstance(value, float) and abs(value) <= 1e300):
        raise ValueError("must be at most 2**53 in magnitude, or 1e300 for a floating-point number")
    return value


def _written_out(given: Any) -> Any:
    return {"choices": given} if isinstance(given, list) else given


_SCALARS: Final = [{"type": kind} for kind in ("number", "string", "boolean", "null")]
_CHOICES: Final = [*_SCALARS, {"type": "array", "items": {"anyOf": _SCALARS}}]
Choice = Annotated[Any, AfterValidator(_choice), WithJsonSchema({"anyOf": _CHOICES})]
Bound = Annotated[int | float, BeforeValidator(_bound), WithJsonSchema({"type": "number"})]


class Parameter(Document):
    """The values of a field or an argument, given as a list of `choices` or as a range."""

    choices: Annotated[list[Choice], Field(min_length=1)] | None = None
    """The values. Each choice is a number, a string, a boolean, null, or a list of these."""
    min: Bound | None = None
    """Minimum of the range."""
    max: Bound | None = None
    """Maximum of the range."""
    step: Bound | None = None
    """Difference between consecutive values, the first of which is `min`. If unset, the values are
    all numbers in the range, or all integers if it is a range of integers."""
    log: StrictBool = False
    """Whether to sample uniformly on a logarithmic scale, for values of different magnitudes."""
    type: Literal["int", "float"] | None = None
    """Type of the values of the range; by default int if `min`, `max` and `step` are integers."""

    @property
    def is_whole(self) -> bool:
        """Whether the values of the range are integers."""
        bounds = [bound for bound in (self.min, self.max, self.step) if bound is not None]
        return self.type == "int" or (
            self.type is None and all(isinstance(bound, int) for bound in bounds)
        )

    @property
    def num_values(self) -> int | None:
        """Number of values; None if the range is continuous."""
        if self.choices is not None:
            return len(self.choices)
        assert self.min is not None
        assert self.max is not None
        if self.step is None and not self.is_whole:
            return None
        low, high, step = (Fraction(str(each)) for each in (self.min, self.max, self.step or 1))
        steps = min((high - low) / step, Fraction(MAX_NUMBER))
        if not self.is_whole:  # a computed bound, such as 0.1 + 0.2, has a rounding error
            steps *= 1 + Fraction("1e-12")
            steps += Fraction(str(_NEAR))
        return math.floor(steps) + 1

    @property
    def extremes(self) -> list[Value]:
        """The values to check: all choices, or both ends of the range."""
        return self.choices if self.choices is not None else [self.number(0.0), self.number(1.0)]

    def value(self, number: int) -> Value:
        """Return the value with this index, from 0 to `num_values` - 1."""
        if self.choices is not None:
            return self.choices[number]
        assert self.min is not None
        low, step = Fraction(str(self.min)), Fraction(str(self.step or 1))
        found = low + number * step  # exact for decimal fractions
        return self._written(0.0 if abs(found) < step * _NEAR else float(found))

    def number(self, share: float) -> float | int:
        """Return the number at this fraction (0 to 1) of a range without `step`."""
        assert self.min is not None
        assert self.max is not None
        low, high = float(self.min), float(self.max)
        if self.log and self.is_whole:  # each integer gets the interval of numbers that round to it
            ends = math.log(low - 0.5), math.log(high + 0.5)
            return round(min(max(math.exp(ends[0] + share * (ends[1] - ends[0])), low), high))
        if self.log:
            found = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        else:
            found = low + share * (high - low)
        # Six digits are easy to read, and sufficient for all but very narrow ranges.
        figures = 6 if high - low > 1e-3 * max(abs(low), abs(high)) else 15
        return self._written(min(max(float(f"{found:.{figures}g}"), low), high))

    def _written(self, number: float) -> float | int:
        return round(number) if self.is_whole else float(f"{number:.15g}")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        ranges = (self.min, self.max, self.step, self.type)
        if self.choices is not None:
            if self.log or any(one is not None for one in ranges):
                raise ValueError("must not have min, max, step, log or type together with choices")
            texts = [json.dumps(choice, sort_keys=True) for choice in self.choices]
            twice = next((text for text, number in Counter(texts).items() if number > 1), None)
            if twice is not None:
                raise ValueError(f"contains the value {twice} twice")
            return self
        if self.min is None or self.max is None:
            raise ValueError("needs a list of values, or a range: {min: 0.1, max: 1.0}")
        self._check_range(self.min, self.max)
        return self

    def _check_range(self, low: float, high: float) -> None:
        if low >= high:
            raise ValueError(f"has a min of {low}, which must be less than its max of {high}")
        if self.log and low <= 0:
            raise ValueError(f"has a min of {low}, but log requires a min greater than 0")
        if self.log and self.step is not None:
            raise ValueError("must not have both log and step: list the values instead")
        if self.step is not None and self.step <= 0:
            raise ValueError(f"has a step of {self.step}, which must be greater than 0")
        whole = (low, high, self.step or 0)
        if self.type == "int" and any(number != round(number) for number in whole):
            raise ValueError("has the type int, so min, max and step must be integers")
        if self.is_whole and max(map(abs, whole)) > MAX_NUMBER:
            raise ValueError("is a range of integers, so min, max and step must be at most 2**53")


class SuccessiveHalving(Document):
    """Early stopping of trials that perform worse than others at the same step, by asynchronous
    successive halving (ASHA, arXiv:1810.05934)."""

    min_steps: Annotated[Int, Field(ge=1, le=MAX_STEPS)]
    """Number of steps after which a trial is first compared with others. The trial is compared
    again after `eta` times as many steps, and so on."""
    max_steps: Annotated[Int, Field(ge=1, le=MAX_STEPS)] | None = None
    """Number of steps after which a trial is no longer compared; if unset, there is no limit."""
    eta: Annotated[Int, Field(ge=2, le=100)] = 3
    """Reduction factor. At each comparison, the best 1/`eta` of the trials continue."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max_steps is not None and self.min_steps > self.max_steps:
            raise wrong(
                "/sweep/early_stopping/min_steps",
                f"is {self.min_steps}, but must be at most max_steps, which is {self.max_steps}",
            )
        return self


ParameterName = Annotated[
    str,
    StringConstraints(
        max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z_][A-Za-z0-9_-]*)*$"
    ),
]


class Sweep(Document):
    """Creates many jobs (trials) from this document that differ in the values of `parameters`, and
    determines the best trial by a metric."""

    metric: MetricKey
    """Metric by which trials are compared, such as `val/loss`; reported by rank 0."""
    mode: Literal["min", "max"] | None = None
    """Whether low (min) or high (max) values are better; required for a script's own metrics."""
    by: Literal["best", "last"] = "best"
    """Which of a trial's reported values counts: the best or the last."""
    sampler: Literal["grid", "random", "optuna"] = "random"
    """How values are chosen. grid: all combinations; the last parameter changes fastest. random:
    values are sampled independently. optuna: Optuna (TPE) suggests values when a trial starts,
    based on the results of earlier trials."""
    trials: Annotated[Int, Field(ge=1, le=10**9)] | None = None
    """Number of trials; only for `random` and `optuna`."""
    seed: Annotated[Int, Field(ge=0, lt=2**63)] = 0
    """Seed of the sampler; the same seed gives the same values."""
    max_running: Annotated[Int, Field(ge=1, le=10**6)] | None = None
    """Maximum number of trials that run at the same time; if unset, there is no limit."""
    max_failed: Annotated[Int, Field(ge=0, le=10**9)] | None = None
    """Maximum number of trials that are allowed to fail. If one more trial fails, the waiting
    trials are cancelled. If unset, there is no limit."""
    parameters: Annotated[
        dict[
            ParameterName,
            Annotated[
                Parameter,
                BeforeValidator(_written_out, json_schema_input_type=Parameter | list[Choice]),
            ],
        ],
        Field(min_length=1, max_length=MAX_PARAMETERS),
    ]
    """Maps the name of each parameter to its values, a list or a range. For a recipe, the name is
    the path of a field, such as `train.optimizer.lr`. For a script, the value of `NAME` replaces
    `${NAME}` in `script.args`. All ranks get the value in the variable `DRAY_PARAM_NAME`."""
    early_stopping: SuccessiveHalving | None = None
    """Early stopping of trials that perform worse than other trials; disabled by default."""

    @property
    def maximises(self) -> bool:
        return (self.mode or ("min" if self.metric in LESS_IS_BETTER else "max")) == "max"

    @property
    def num_trials(self) -> int:
        if self.trials is not None:
            return self.trials
        return math.prod(one.num_values or 0 for one in self.parameters.values())

    @model_validator(mode="before")
    @classmethod
    def _has_a_metric(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("metric") is None:
            raise wrong(
                "/sweep/metric",
                "is missing: name the metric by which trials are compared, such as "
                "metric: val/loss",
            )
        return given

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.sampler == "grid":
            self._check_grid()
        elif self.trials is None:
            raise wrong(
                "/sweep/trials", f"is missing: {self.sampler} requires the number of trials"
            )
        if sum(len(one.choices or ()) for one in self.parameters.values()) > MAX_CHOICES:
            message = (
                f"have more than {MAX_CHOICES} values in total: use ranges, such as {{min, max}}"
            )
            raise wrong("/sweep/parameters", message)
        named: dict[str, str] = {}
        for name in self.parameters:
            other = named.setdefault(variable(name), name)
            if other != name:
                message = (
                    f"and {other} would both set the variable {variable(name)}: rename one of them"
                )
                raise wrong(_pointer(name), message)
        return self

    def _check_grid(self) -> None:
        if self.trials is not None:
            raise wrong(
                "/sweep/trials",
                "only applies to random and optuna: a grid runs one trial per combination",
            )
        for name, parameter in self.parameters.items():
            if parameter.log or parameter.num_values is None:
                raise wrong(
                    _pointer(name),
                    "has no discrete values, which a grid requires: list the values, or specify "
                    "a range with a step, without log",
                )

    @property
    def longest(self) -> dict[str, int]:
        """The number of characters of each parameter's longest value, keyed by parameter name."""
        return {name: max(map(_length, one.extremes)) for name, one in self.parameters.items()}

    def most_characters(self, arguments: Iterable[str]) -> int:
        """Return the number of characters that these arguments have with the longest value of each
        parameter inserted."""
        longest = self.longest
        return sum(
            len(argument)
            + sum(
                longest[found[1]] - len(found[0])
                for found in PLACEHOLDER.finditer(argument)
                if found[1] in longest
            )
            for argument in arguments
        )

    def check_program(
        self, recipe: str | None, metrics: tuple[str, ...], arguments: Sequence[str]
    ) -> None:
        """Raise a validation error if the sweep does not fit the recipe, or, if `recipe` is None,
        the arguments of the script. metrics: the metrics that the recipe's evaluations report."""
        if recipe is None:
            self._check_script()
            if (number := self.most_characters(arguments)) > MAX_ARGUMENTS:
                raise wrong(
                    "/script/args",
                    f"has {number:,} characters with the sweep's longest values, but at most "
                    f"{MAX_ARGUMENTS:,} are allowed",
                )
            return
        known = (*metrics, *RECIPE_METRICS)
        if self.metric not in known:
            raise wrong(
                "/sweep/metric",
                f"is {self.metric}, which {recipe} never reports: use one of {', '.join(known)}",
            )
        for name in self.parameters:
            part, dot, _ = name.partition(".")
            if not dot or part not in SWEPT_PARTS or name in FIXED:
                raise wrong(
                    _pointer(name),
                    f"is not a field of {', '.join(SWEPT_PARTS)}, or can't be varied by a sweep: "
                    "choose a field such as train.optimizer.lr",
                )

    def _check_script(self) -> None:
        if self.mode is None and self.metric not in LESS_IS_BETTER:
            raise wrong(
                "/sweep/mode",
                f"is missing: dray does not know whether a lower {self.metric} is better, so set "
                "mode: min or mode: max",
            )
        dotted = next((name for name in self.parameters if "." in name), None)
        if dotted is not None:
            raise wrong(
                _pointer(dotted),
                "must not contain a dot: a script's parameters are not field paths",
            )


def _pointer(name: str) -> str:
    return f"/sweep/parameters/{name}"


_LONGEST_NUMBER = 32
"""Maximum number of characters that a number between the ends of a range can have."""


def _length(value: Value) -> int:
    return max(_LONGEST_NUMBER, len(as_text(value)))
