"""Generates what a user passes to a job: texts of all kinds, and numbers at their bounds."""

from __future__ import annotations

import math
import random
import string
import struct
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
"""Parts of texts that programs interpret in special ways."""
UNSEEN = (
    *("\0", "\x01", "\a", "\b", "\n", "\r\n", "\r", "\v", "\f", "\x1b[31m", "\x1b]0;x\a", "\x7f"),
    *("\x85", "\x9b31m", "\xa0", "\xad", "\u061c", "\u200b", "\u200e", "\u2028", "\u2029"),
    *("\u202e", "\u2066", "\u2069", "\ufeff", "\ufff9", "\ufffd", "\ufffe"),
    *("\U000e0041", "\U0010ffff"),
)
"""Invisible characters, and characters that turn, end or hide their neighbours."""
HALVES = ("\ud800", "\udc00", "\udfff")
"""Lone surrogates, which JSON can express but UTF-8 can't."""
NUMBERS = (
    *(0.0, -0.0, 1.0, 0.1, 1 / 3, -1.5, 1e-5, 1e16, 1e22, 123456789.123456789, 5e-324, -5e-324),
    *(2.2250738585072014e-308, 2.225073858507201e-308, 1e308, -1.7976931348623157e308),
    *(2.0**53, 2.0**53 + 2, 2.0**63, -(2.0**63), 2.0**64, 1e-320, float("inf"), float("-inf")),
    float("nan"),
)
WHOLE = (0, 1, -1, 2**31, 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**30)


DOORS = ("http", "utf-8", "sdk", "json", "yaml", "program")
"""Two JSON encodings, a mapping, two kinds of files, and a program with its options."""
LOGGERS = ("report", "tensorboard", "csv", "printed")
"""`dray.train.report`, two kinds of files, and lines for which the document has patterns."""
USERS = (
    *("default", "anonymous", "@me", "@last", "@", "admin", "None", "null", "true", "1e3", "007"),
    *("-", "--", ".", "..", "a@b.example", "Ann", "ann", "no", "x" * 128, "x" * 129, "all"),
)
QUEUES = (
    *("none", "null", "no", "true", "1e3", "0x10", "007", "1_000", "12-30", "all", "0", "a-", "a_"),
    *("x" * 63, "x" * 64, "Night", "-a", "default"),
)
SECRETS = ("_", "A", "__proto__", "no", "NULL", "true", "x" * 128, "K\u00c9Y", "1A", "A-B", "A B")
OF_URLS = (
    *(
        "a",
        "~",
        "%2F",
        "%2f",
        "%41",
        "%C3%A9",
        "%20",
        "%00",
        "%zz",
        "%",
        "/",
        "//",
        ".",
        "..",
        "/.",
    ),
    *(
        "?",
        "&",
        "=",
        ";",
        ":",
        "@",
        "+",
        "$",
        "!",
        "*",
        "'",
        '"',
        "(",
        ")",
        ",",
        "[",
        "]",
        "{",
        "|",
    ),
    *("^", "`", "<", "é", " ", "#", "\\", "\x7f", "key=1e3", "<b>", "${HOME}"),
)
"""Parts of the path and the query of a URL."""


@dataclass
class Case:
    """The input of one job. Texts that an entry refuses are removed from it."""

    document: dict[str, Any]
    tags: list[str]
    notes: str
    metrics: dict[Any, list[Any]]
    """Values for the steps 1, 2, ... by name."""
    lines: list[str]
    """Lines that rank 0 prints."""
    files: dict[str, bytes]
    door: str
    logger: str
    """How rank 0 reports its metrics."""
    user: str | None
    """The owner in the tokens file; None if the server has no tokens."""
    hook: dict[str, Any] | None
    """A webhook that is notified of the job: `path` is what follows the host in its URL."""
    refused: list[str] = field(default_factory=list)

    @property
    def owner(self) -> str:
        return "default" if self.user is None else self.user

    @property
    def queue(self) -> str:
        queue: str = self.document.get("queue", "default")
        return queue


class Draw:
    """Random choices from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._around = random.Random(f"around {seed}")

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def word(self, most: int = 12) -> str:
        """Letters and digits."""
        return "".join(self.random.choices(PLAIN, k=self.random.randint(1, most)))

    def text(self, wild: float = 0.08) -> str:
        """Any text; `wild` is the share of texts with something that no name can contain."""
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
        """A label or tag, usually a valid one."""
        if self.chance(0.15):
            return self.text()
        return self.word(5) + "".join(
            self.random.choices(PLAIN + "._/-", k=self.random.randint(0, 9))
        )

    def value(self) -> Any:
        """A parameter name."""
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
        if door in ("json", "yaml"):  # JSON has no form for them, and YAML a different one
            script["parameters"] = {
                name: value
                for name, value in script["parameters"].items()
                if not isinstance(value, float) or math.isfinite(value)
            }
        case = Case(
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
            logger="report",
            user=None,
            hook=None,
        )
        self._surround(case)
        return case

    def _surround(self, case: Case) -> None:
        """Generate the other names: user, queue, secrets, webhook, and the logger's metrics."""
        own, self.random = self.random, self._around
        if self.chance(0.5):
            case.user = self._name(PLAIN + "._@-", USERS)
        if self.chance(0.6):
            case.document["queue"] = self._name(string.ascii_lowercase + string.digits, QUEUES)
        if self.chance(0.4) and case.door != "program":
            names = [self._name(PLAIN + "_", SECRETS) for _ in range(self.random.randint(1, 3))]
            case.document["environment"]["secrets"] = list(dict.fromkeys(names))
        if self.chance(0.5):
            case.hook = {
                "path": self._path(),
                "queue": self.chance(0.5),
                "labels": self.chance(0.5),
            }
        case.logger = self.random.choice(LOGGERS)
        if self.chance(0.15):
            self._add_twins(case.metrics)
            self._add_twins(case.document["script"].get("parameters", {}))
            self._add_twins(case.files)
        case.metrics = {_named(key, case): values for key, values in case.metrics.items()}
        if case.logger == "tensorboard":
            case.metrics = {key: list(map(single, of)) for key, of in case.metrics.items()}
        if case.logger == "printed":
            case.document["metrics"] = [
                {"name": key, "pattern": f"m{number}=(.*)"}
                for number, key in enumerate(case.metrics)
            ]
        labels = case.document.get("labels")
        if case.hook is not None and labels is not None and self.chance(0.2):
            case.hook["labels"] = True
            labels[self.word()] = f" {self.word()} "
        self.random = own

    def _add_twins(self, values: dict[str, Any]) -> None:
        """Two more names, which differ from a name only in their last character."""
        if values:
            key, value = self.random.choice(list(values.items()))
            for sign in self.random.choice(("%*", "?#", "aA", "é\u00e8", "._")):
                values[key[:100] + sign] = value

    def _name(self, signs: str, special: tuple[str, ...]) -> str:
        """Usually a valid name."""
        kind = self.random.random()
        if kind < 0.3:
            return self.random.choice(special)
        if kind < 0.4:
            return "".join(c for c in self.text(0.02) if c.isprintable() and c not in "# ") or "a"
        return self.random.choice(signs) + "".join(
            self.random.choices(signs + "_-", k=self.random.randint(0, 20))
        )

    def _path(self) -> str:
        parts = self.random.choices(OF_URLS[:-12], k=self.random.randint(0, 8))
        if self.chance(0.15):
            parts.append(self.random.choice(OF_URLS))
        path = self.random.choice(("/", "/", "/", "?")) + "".join(parts)
        return path.rstrip("?")  # an empty query counts as none

    def file(self) -> str:
        return self.text() if self.chance(0.3) else f"{self.word()}/{self.word()}.{self.word(3)}"


def single(value: float) -> float:
    """Return the nearest 32-bit number."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _named(key: str, case: Case) -> str:
    """Return the name of a metric without the parts that this case's format can't express."""
    if case.logger == "report":
        return key
    key = key.encode(errors="replace").decode()
    if case.logger == "csv":
        return "".join(c for c in key if c not in "\0\r\n").strip()
    return key.replace("=", "") if case.door == "program" else key


def is_odd(text: Any) -> bool:
    """Whether an entry is allowed to refuse a text; it must accept short letters and digits."""
    return not (isinstance(text, str) and 0 < len(text) <= 63 and set(text) <= set(PLAIN))
