"""Generated sweeps of a script: names and values of parameters, and a metric to compare by."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.generated.names.drawing import DOORS, PLAIN, WHOLE, Draw, is_odd

NAMES = (
    *("lr", "a-b", "a_b", "__proto__", "constructor", "toString", "None", "x" * 128, "HOME", "A"),
    *("a.b", "1a", "", "length", "no", "é"),
)
Value = Any
MOST_TRIALS = 6


@dataclass
class SweepCase:
    """A sweep with all combinations. Refused parts are removed from it."""

    name: str
    values: dict[str, list[Value]]
    """The choices for each parameter."""
    args: list[list[tuple[str, str]]]
    """Each argument in pieces: ("text", itself) or ("value", name of a parameter)."""
    metric: str
    mode: str
    reports: list[float]
    """The reports of the trials, in order."""
    door: str
    refused: list[str] = field(default_factory=list)

    @property
    def combinations(self) -> list[dict[str, Value]]:
        """The last parameter changes fastest."""
        rows = itertools.product(*self.values.values())
        return [dict(zip(self.values, row, strict=True)) for row in rows]

    def argument(self, pieces: list[tuple[str, str]], values: dict[str, Value] | None) -> str:
        """The arguments as written, or with values in place of the names."""
        found = ""
        for kind, text in pieces:
            if kind == "text":
                found += text
            elif values is None or text not in values:
                found += f"${{{text}}}"
            else:
                found += as_text(values[text])
        return found

    @property
    def document(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "script": {
                "entrypoint": "a.py",
                "args": [self.argument(pieces, None) for pieces in self.args],
            },
            "sweep": {
                "metric": self.metric,
                "mode": self.mode,
                "sampler": "grid",
                "parameters": self.values,
            },
        }

    @property
    def best(self) -> int | None:
        """Return the first trial with the best value; NaN and infinities don't count."""
        known = [(at, v) for at, v in enumerate(self._reported) if math.isfinite(v)]
        choose = min if self.mode == "min" else max
        return choose(known, key=lambda pair: pair[1])[0] if known else None

    @property
    def _reported(self) -> list[float]:
        return self.reports[: len(self.combinations)]


def as_text(value: Value) -> str:
    """Return strings unchanged, and all other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


class SweepDraw(Draw):
    """Generates sweeps."""

    def sweep(self) -> SweepCase:
        values: dict[str, list[Value]] = {}
        for _ in range(self.random.randint(1, 3)):
            name = self._parameter()
            most = MOST_TRIALS // math.prod(map(len, values.values()))
            if most and all(variable(name) != variable(other) for other in values):
                values[name] = self._choices(min(3, most))
        case = SweepCase(
            name=self.word(),
            values=values,
            args=[self._argument(list(values)) for _ in self.several(4)],
            metric=self.text(),
            mode=self.random.choice(("min", "max")),
            reports=[self.number() for _ in range(MOST_TRIALS)],
            door=self.random.choice([door for door in DOORS if door != "program"]),
        )
        if len(values) > 1 and self._around.random() < 0.2:
            self._write_place_in_value(case)
        return case

    def _write_place_in_value(self, case: SweepCase) -> None:
        """Add a value that looks like the placeholder of another parameter, and stays so."""
        name, other = self._around.sample(list(case.values), 2)
        case.values[name][0] = f"${{{other}}}"
        case.args.append([("value", name)])

    def _parameter(self) -> str:
        kind = self.random.random()
        if kind < 0.3:
            return self.random.choice(NAMES)
        if kind < 0.4:
            return self.text()
        return self.random.choice("abcXYZ_") + "".join(
            self.random.choices(PLAIN + "_-", k=self.random.randint(0, 9))
        )

    def _choices(self, most: int) -> list[Value]:
        found: dict[str, Value] = {}
        for _ in range(self.random.randint(1, most)):
            value = self._choice()
            found[json.dumps(value)] = value
        return list(found.values())

    def _choice(self) -> Value:
        kind = self.random.random()
        if kind < 0.05:
            return None
        if kind < 0.15:
            return [self._scalar() for _ in self.several(3)]
        return self._scalar()

    def _scalar(self) -> Value:
        if self.chance(0.4):
            return self.text()
        value = self.value()
        if isinstance(value, float) and not math.isfinite(value):
            return 0.5
        return value

    def _argument(self, names: list[str]) -> list[tuple[str, str]]:
        if names and self.chance(0.4):
            name = self.random.choice(names)
            return [("text", f"--{self.word(5)}="), ("value", name)]
        return [
            ("value", self.random.choice(names))
            if names and self.chance(0.4)
            else ("text", self.text(0.02).replace("${HOME}", "$HOME"))  # not a placeholder
            for _ in range(self.random.randint(1, 3))
        ]


def variable(name: str) -> str:
    """Return the ranks' name: `DRAY_PARAM_` and the name in capitals, with `_` for `.` and `-`."""
    return "DRAY_PARAM_" + name.replace(".", "_").replace("-", "_").upper()


def may_be_refused(value: Value) -> bool:
    """Whether a sweep is allowed to refuse a value."""
    if isinstance(value, list):
        return any(map(may_be_refused, value))
    if isinstance(value, str):
        return not (value.isprintable() and len(value) <= 4096)
    return isinstance(value, int) and value in WHOLE and abs(value) > 2**53


def smaller(case: SweepCase) -> Iterator[SweepCase]:
    """Yield sweeps without an argument, a parameter, or a value."""
    for at in range(len(case.args)):
        yield replace(case, args=case.args[:at] + case.args[at + 1 :])
    for name, choices in case.values.items():
        others = {other: of for other, of in case.values.items() if other != name}
        if others:
            yield replace(case, values=others)
        for at in range(len(choices) if len(choices) > 1 else 0):
            yield replace(case, values={**case.values, name: choices[:at] + choices[at + 1 :]})


def take_out(case: SweepCase, pointer: str) -> None:
    """Remove what the pointer of a refusal names, which must be unusual."""
    parts = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
    match parts:
        case ["script", "args", *_]:
            texts = [case.argument(pieces, None) for pieces in case.args]
            odd = {at for at, text in enumerate(texts) if is_odd(text)}
            assert odd, f"nothing of {texts} is odd"
            at = int(parts[2]) if len(parts) > 2 else min(odd)
            assert at in odd
            case.refused.append(repr(case.args.pop(at)))
        case ["sweep", "metric"]:
            assert is_odd(case.metric)
            case.refused.append(case.metric)
            case.metric = "loss"
        case ["sweep", "parameters"]:
            _take_names(case, list(case.values))
        case ["sweep", "parameters", name, *_] if name in case.values:
            odd_values = [one for one in case.values[name] if may_be_refused(one)]
            case.refused += map(repr, odd_values)
            if odd_values:
                case.values[name] = [one for one in case.values[name] if one not in odd_values]
            if not odd_values or not case.values[name]:
                _take_names(case, [name], is_empty=bool(odd_values))
        case _:
            raise AssertionError(f"what does {pointer} name?")


def _take_names(case: SweepCase, names: list[str], *, is_empty: bool = False) -> None:
    odd = [name for name in names if is_empty or is_odd(name) or name[0].isdigit()]
    assert odd, f"none of {names} is odd"
    case.refused += odd
    for name in odd:
        del case.values[name]
    case.values = case.values or {"lr": [0.5]}
