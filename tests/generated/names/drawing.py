"""What a user gives to a job, drawn: texts of all kinds, and numbers at their bounds."""

from __future__ import annotations

import math
import random
import string
from dataclasses import dataclass, field
from typing import Any

PLAIN = string.ascii_letters + string.digits
PIECES = (
    *("é", "e\u0301", "Å", "\u212b", "ß", "İ", "ﬁ", "中文", "한국", "한국", "🚀", "👩\u200d💻"),
    *("'", '"', "`", "\u201c", "\u2019", "''", '\\"', "\\", "\\\\", "\\n", "/", "//", ".", ".."),
    *("../..", "%", "%25", "%2F", "%00", "%s", "{0}", "{}", "${HOME}", "$(id)", "&", "&amp;", "#"),
    *("<b>", "</td>", "<!--", "-->", "<script>alert(1)</script>", "'; DROP TABLE jobs; --", "_"),
    *("?", "*", "[a]", "[bold]", "]", "(", ")", "{", "}", "|", ";", ":", ",", "=", "==", "+", "-"),
    *("~", "~0", "~1", "^", "!", "@", "@me", "@last", "~/x", "--", "--name", "-1", "1e3", "0x10"),
    *("null", "true", "None", "NaN", "inf", "__proto__", "constructor", "toString", "length"),
    *("no", "on", "2026-01-01", "12:30", "=1+1", "\t", " ", "  ", "job-1", "a", "A", "x" * 60),
    *("\U0001d518", "/0", "a/1"),
)
"""Parts of texts that programs read in ways of their own."""
UNSEEN = (
    *("\0", "\x01", "\a", "\b", "\n", "\r\n", "\r", "\v", "\f", "\x1b[31m", "\x1b]0;x\a", "\x7f"),
    *("\x85", "\x9b31m", "\xa0", "\xad", "\u061c", "\u200b", "\u200e", "\u2028", "\u2029"),
    *("\u202e", "\u2066", "\u2069", "\ufeff", "\ufff9", "\ufffd", "\ufffe"),
    *("\U000e0041", "\U0010ffff"),
)
"""Characters that are not seen, or that turn, end or hide what is next to them."""
HALVES = ("\ud800", "\udc00", "\udfff")
"""Halves of a surrogate pair: JSON has words for them, UTF-8 has not."""
NUMBERS = (
    *(0.0, -0.0, 1.0, 0.1, 1 / 3, -1.5, 1e-5, 1e16, 1e22, 123456789.123456789, 5e-324, -5e-324),
    *(2.2250738585072014e-308, 2.225073858507201e-308, 1e308, -1.7976931348623157e308),
    *(2.0**53, 2.0**53 + 2, 2.0**63, -(2.0**63), 2.0**64, 1e-320, float("inf"), float("-inf")),
    float("nan"),
)
WHOLE = (0, 1, -1, 2**31, 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**30)


DOORS = ("http", "utf-8", "sdk", "json", "yaml", "program")
"""Two ways to write JSON, a mapping, two kinds of files, and a program with its options."""


@dataclass
class Case:
    """What is given to one job. Texts that a door refuses are taken out of it."""

    document: dict[str, Any]
    tags: list[str]
    notes: str
    metrics: dict[Any, list[Any]]
    """Values of the steps 1, 2, ... by name."""
    lines: list[str]
    """Lines that rank 0 prints."""
    files: dict[str, bytes]
    door: str
    refused: list[str] = field(default_factory=list)


class Draw:
    """Draws from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def word(self, most: int = 12) -> str:
        """Letters and digits."""
        return "".join(self.random.choices(PLAIN, k=self.random.randint(1, most)))

    def text(self, wild: float = 0.08) -> str:
        """Anything; `wild` is the share of texts with what no name may have."""
        if self.chance(0.15):
            return self.word()
        parts = [self._piece(wild) for _ in range(self.random.randint(1, 4))]
        text = "".join(parts)
        if self.chance(0.02):
            return ""
        return text * self.random.randint(10, 600) if self.chance(0.03) else text

    def _piece(self, wild: float) -> str:
        kind = self.random.random()
        if kind < wild / 2:
            return self.random.choice(UNSEEN)
        if kind < wild / 2 + wild / 20:
            return self.random.choice(HALVES)
        if kind < 0.6:
            return self.random.choice(PIECES)
        if kind < 0.75:
            return chr(
                self.random.choice((0x20, 0x100, 0x3000, 0x1F300)) + self.random.randrange(95)
            )
        if kind < 0.77:
            return chr(self.random.randrange(0x110000))
        return self.word(6)

    def key(self) -> str:
        """Of a label or a tag: usually one that is allowed."""
        if self.chance(0.15):
            return self.text()
        return self.word(5) + "".join(
            self.random.choices(PLAIN + "._/-", k=self.random.randint(0, 9))
        )

    def value(self) -> Any:
        """Of a parameter."""
        kind = self.random.random()
        if kind < 0.1:
            return self.chance(0.5)
        if kind < 0.35:
            return self.random.choice(WHOLE)
        return self.random.choice(NUMBERS) if kind < 0.6 else self.text()

    def number(self) -> float:
        if self.chance(0.5):
            return self.random.choice(NUMBERS)
        return self.random.uniform(-1, 1) * 10.0 ** self.random.randint(-300, 300)

    def several(self, most: int) -> range:
        return range(self.random.randint(0, most))

    def case(self) -> Case:
        script: dict[str, Any] = {
            "entrypoint": "a.py",
            "args": [self.text() for _ in self.several(3)],
            "parameters": {self.text(): self.value() for _ in self.several(4)},
        }
        variables = {f"V{n}_{self.word(4)}": self.text(0.3) for n in self.several(2)}
        labels = {self.key(): self.text() for _ in self.several(3)}
        if self.chance(0.4):
            labels["experiment"] = self.text()
        document: dict[str, Any] = {
            "name": self.text(),
            "labels": labels,
            "script": script,
            "environment": {"env": variables},
        }
        door = self.random.choice(DOORS)
        if door == "program":
            del document["labels"], script["parameters"]
        if door in ("json", "yaml"):  # JSON has no words for them, and YAML other ones
            script["parameters"] = {
                name: value
                for name, value in script["parameters"].items()
                if not isinstance(value, float) or math.isfinite(value)
            }
        return Case(
            document=document,
            tags=list(dict.fromkeys(self.key() for _ in self.several(3))),
            notes=self.text(0.2),
            metrics={
                self.text(): [self.number() for _ in range(self.random.randint(1, 4))]
                for _ in range(self.random.randint(1, 4))
            },
            lines=[self.text(0.3) for _ in self.several(5)],
            files={self.file(): self.text().encode(errors="replace") for _ in self.several(3)},
            door=door,
        )

    def file(self) -> str:
        return self.text() if self.chance(0.3) else f"{self.word()}/{self.word()}.{self.word(3)}"
