"""Metrics guessed from a script's output, such as `loss=0.12` or numbers next to a progress bar.

A guess is a name and a number, in a format that programs usually use to print metrics. The rules in
`_is_guess` exclude numbers that are printed for other reasons. As a result, some metrics may be
missed, and some numbers that are not metrics may be included. The names of guessed series begin
with `guessed/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ray_workers.node.found_metrics.lines import CONTROLS, MAX_STEP, FoundPoint, SearchBudget
from ray_workers.shared.contracts import GUESSED

MAX_NAMES = 50
"""Maximum number of guessed series. Names that appear later are ignored."""
MAX_LINE_CHARS = 1000
LINES_PER_S = 1000
SHARE = 0.05
"""Maximum fraction of each second that guessing may take."""
MAX_HELD = 5000
"""Maximum number of points between two calls of `release`. Beyond this number, only the newest
point of each series is kept."""

_WHOLE = r"\d{1,15}(?![ \u00a0\u202f]\d{3}(?!\d))"  # not the first digits of `1 234.5`
_NUMBER = rf"[-+]?(?:\d{{1,15}}\.\d{{0,20}}|\.\d{{1,20}}|{_WHOLE})(?:[eE][-+]?\d{{1,3}})?"
_SPECIAL = r"[-+]?(?i:nan|inf(?:inity)?)"
_NAME = r"[A-Za-z][A-Za-z0-9_/.@-]{0,62}"
_QUALIFIER = (
    r"(?i:train(?:ing)?|val(?:id(?:ation)?)?|eval(?:uation)?|test|dev|avg|average|mean|best|total"
    r"|running|final|current|batch|epoch|mini-batch)"
)
_PAIR = re.compile(
    # A pair follows the start of the line, a space or punctuation, and can begin with words such as
    # `train`.
    rf"""(?:^|(?<=[\s,;:|(\[{{'"*>]))"""
    rf"((?:{_QUALIFIER}[ ]){{0,3}})({_NAME})['\"]?"
    r"([ ]?[=:][ ]{0,8}|[ ]{1,4})"
    rf"['\"]?(?:tensor\(|np\.float\d\d\()?({_NUMBER}|{_SPECIAL})"
    # The number must not be followed by a unit or by an arrow and a new value, and must not be the
    # start of a date, address, version, fraction or number with a comma. The number may be at
    # the end of a progress bar's description, which is followed by a colon.
    r"(?=(%?)(?:$|[\s,;|)\]}'\"]|\.(?:\s|$)|:[ ]{1,4}\d{1,15}(?:%|it)))"
    r"(?![,']\d)(?![ \t]*(?:/|(?:out[ ])?of[ ]|[-=]+>|→))"
    # Exclude the percentage of a progress bar: `53%|## |`, `53% (3 of 6) |# |`, `53% 3/6 [`.
    r"(?!%[ ]?(?:\([\d ]{1,15}of[\d ]{1,15}\)[ ]?)?\|[^|A-Za-z.]{0,400}(?:\||$))"
    r"(?!%[ ]\d{1,15}/\d{1,15}[ ]\[)"
)
_FRACTION = re.compile(
    rf"""(?:^|(?<=[\s,;:|(\[{{'"*>]))"""
    rf"((?:{_QUALIFIER}[ ]){{0,3}})({_NAME})['\"]?[ ]?[=: ][ ]{{0,8}}"
    r"(\d{1,15})[ ]{0,4}(?:/|(?:out[ ])?of)[ ]{0,8}(\d{1,15})(?![\d./])"
    r"(?:[ ]?\([ ]?(\d{1,3}(?:\.\d{1,9})?)[ ]?%)?"
)
"""Matches a count out of a total, such as `Accuracy: 9823/10000 (98%)`."""
_COUNT = r"""['"]?[ ]?[\[(#=:]{0,2}[ ]{0,8}(\d{1,15})\b(?!\.\d)"""
_HAS_NUMBER = re.compile(r"\d|(?i:nan|inf)")
_STEP = re.compile(r"(?i:\b(?:global[_ ]?)?(?:step|iter(?:ation)?|batch|update)s?)" + _COUNT)
_EPOCH = re.compile(r"(?i:\bep(?:och|isode)?)" + _COUNT)
_OF_TOTAL = re.compile(r"(?:^|[\s\[(|])(\d{1,15})\s?/\s?(\d{1,15})\b")
_PART_OF_NAME = re.compile(r"""[A-Za-z]['"]?\s?[:=]\s?$""")
_COUNTER_NAMES = (
    "step steps iter iters iteration iterations epoch epochs ep batch batches update updates "
    "global_step eta elapsed time date hour hours minute minutes second seconds s sec secs ms took "
    "duration remaining pid port rank world_size local_rank seed line lineno node gpu device cuda "
    "version v_num num_workers batch_size batchsize progress id total size len length"
)
_COUNTERS = frozenset(_COUNTER_NAMES.split())
"""Names of numbers that are not metrics, in lower case."""
_METRIC_NAMES = (
    "loss acc accuracy error err mse rmse mae mape r2 auc auroc auprc f1 precision recall iou miou "
    "dice map map50 bleu rouge wer cer ppl perplexity nll elbo kl reward return score lr psnr ssim "
    "fid top1 top5 entropy bpb bpc mfu rate norm"
)
_METRICS = frozenset(_METRIC_NAMES.split())
_SHARES = frozenset({"acc", "accuracy"})
"""Metrics that may be printed as a number of samples out of a total."""
_SETTINGS = frozenset({"lr", "rate"})
"""Names of settings, unless their line also contains a step or an epoch: `lr=0.003` may be printed
before training begins."""
_NEVER_WHOLE = frozenset({"precision", "error", "err"})
"""Names that aren't metrics if their value is a whole number: `precision=16`, `error: 2`."""
_PARTS = re.compile(r"[_/.@\- ]+|(?<=[a-z])(?=[A-Z])")


class Guesses:
    """Guesses the metrics of a process, line by line, and holds them until `release`.

    A number with the name of a metric is treated as a metric immediately. A number with any other
    name is treated as a metric when a number with this name appears for the second time, because
    numbers that are printed once are usually settings. A single occurrence before the first line
    with a step or an epoch is considered a setting and doesn't count.
    """

    def __init__(self, budget: SearchBudget | None = None) -> None:
        self._budget = budget or SearchBudget(LINES_PER_S, SHARE)
        self._series: dict[str, _Series] = {}
        self._held: list[FoundPoint] = []
        self._epoch: int | None = None
        """The epoch in the most recent line that contains one."""

    def take(self, line: str) -> None:
        """Search a line, if there is time for it."""
        if len(line) <= MAX_LINE_CHARS and _HAS_NUMBER.search(line) and self._budget.take(1):
            self._budget.run(self._look, line)

    def release(self) -> list[FoundPoint]:
        """Return the guesses made since the last call."""
        held, self._held = self._held, []
        return [point for point in held if self._series[point.key].is_sure] + self._newest()

    def _newest(self) -> list[FoundPoint]:
        """Return the newest point of each series whose points exceeded `MAX_HELD`."""
        found = [each.left_out for each in self._series.values() if each.left_out and each.is_sure]
        for each in self._series.values():
            each.left_out = None
        return found

    def _look(self, line: str) -> None:
        text = CONTROLS.sub("", line)
        position = self._position_in(text)
        for name, value in dict(_pairs_in(text)).items():
            series = self._series.get(GUESSED + name)
            if series is None and len(self._series) >= MAX_NAMES:
                continue
            if series is None or (series.waits_for_position and position.at is not None):
                may_be_setting = position.at is None and not _SETTINGS.isdisjoint(_parts_of(name))
                series = _Series(is_sure=is_metric(name) and not may_be_setting)
                self._series[GUESSED + name] = series
            printed = position, value
            if position.kind != "epoch" and series.last == printed:
                continue  # a progress bar that is redrawn, for example at its end
            series.last = printed
            self._add(FoundPoint(GUESSED + name, series.step_at(position), value), series)

    def _add(self, point: FoundPoint, series: _Series) -> None:
        if not series.is_sure:
            self._held += [] if series.first is None else [series.first]
            series.is_sure = series.first is not None
            if not series.is_sure:
                series.first = point
                return
        if point.step > MAX_STEP:
            return
        if len(self._held) < MAX_HELD:
            self._held.append(point)
        else:
            series.left_out = point

    def _position_in(self, text: str) -> _Position:
        epoch = _EPOCH.search(text)
        if epoch:
            self._epoch = int(epoch.group(1))
        step = _STEP.search(text)
        if step:
            return _Position("step", int(step.group(1)), self._epoch)
        counted = {each.start(3) for each in _FRACTION.finditer(text) if _counts_samples(each)}
        for of_total in _OF_TOTAL.finditer(text):
            before = text[max(0, of_total.start(1) - 4) : of_total.start(1)]
            is_epoch = epoch and epoch.start(1) == of_total.start(1)
            if of_total.start(1) in counted or _PART_OF_NAME.search(before):
                continue  # such as `correct: 98/100`
            if not is_epoch:
                return _Position("of", int(of_total.group(1)), self._epoch)
        return _Position("epoch", self._epoch, self._epoch)


class _Position(NamedTuple):
    """The training progress that a line contains."""

    kind: str
    at: int | None
    epoch: int | None


class _Series:
    """The steps of a guessed series, which always increase.

    If a script restarts its count in each epoch, the series continues from its previous step, even
    if the script prints only the last step of each epoch. A line that contains no position, or that
    repeats a position for another reason, is assigned the step after the previous step. Once a line
    has contained a count of steps or batches, epoch numbers are no longer used as steps.
    """

    def __init__(self, *, is_sure: bool) -> None:
        self.is_sure = is_sure
        self.first: FoundPoint | None = None
        self.left_out: FoundPoint | None = None
        self.last: tuple[_Position, float] | None = None
        self._kind = ""
        self._at = -1
        self._epoch: int | None = None
        self._base = 0
        self._newest = -1

    @property
    def waits_for_position(self) -> bool:
        """Whether the series has only one point, whose line had no step or epoch, so that the point
        may be a setting instead of a metric."""
        return self.first is not None and not self.is_sure and not self._kind

    def step_at(self, position: _Position) -> int:
        if position.at is not None and self._kind in ("", "epoch") and position.kind != self._kind:
            self._kind, self._at, self._base = position.kind, -1, 0
        at = position.at if position.kind == self._kind else None
        if at is None:
            self._newest = max(self._newest + 1, 1)
            return self._newest
        is_next_epoch = position.epoch != self._epoch and self._epoch is not None
        if at < self._at or (at == self._at and is_next_epoch):
            self._base = self._newest
        self._epoch = position.epoch
        step = max(self._base + at, self._newest + 1)
        self._at, self._newest = at, step
        return step


def is_metric(name: str) -> bool:
    """Return whether this is the name of a metric, such as `val_loss` or `Accuracy`."""
    return any(part in _METRICS or part.endswith(("loss", "acc")) for part in _parts_of(name))


def _parts_of(name: str) -> list[str]:
    return [part.lower() for part in (name, *_PARTS.split(name))]


def _counts_samples(fraction: re.Match[str]) -> bool:
    name = fraction.group(2)
    return is_metric(name) or name.lower() == "correct"


def _pairs_in(text: str) -> Iterator[tuple[str, float]]:
    for fraction in _FRACTION.finditer(text):
        qualifiers, name, part, whole, percent = fraction.groups()
        if not _SHARES.isdisjoint(_PARTS.split(name.lower())) and int(part) <= int(whole) > 0:
            share = int(part) / int(whole)
            if percent is None or abs(100 * share - float(percent)) <= 1:
                yield "_".join([*qualifiers.split(), name]), share
    for found in _PAIR.finditer(text):
        qualifiers, name, separator, number, percent = found.groups()
        whole = "_".join([*qualifiers.split(), name])
        if percent and number.isdigit() and not is_metric(whole):
            continue  # the progress of something: `Downloading: 53%`
        if _is_guess(whole, name, separator, number):
            yield whole, float(number)


def _is_guess(whole: str, name: str, separator: str, number: str) -> bool:
    if name.lower() in _COUNTERS:
        return False
    if name.lower() in _NEVER_WHOLE and number.lstrip("+-").isdigit():
        return False
    if separator.isspace():  # as in `loss 0.12`, but not in `error 404` or `page 3`
        return is_metric(whole) and not number.lstrip("+-").isdigit()
    if separator == ":":  # `loss:0.12`, but not `host:8080` or `file.py:12`
        return is_metric(whole)
    return True
