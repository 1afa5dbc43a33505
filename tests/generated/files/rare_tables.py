"""Generated tables that other seeds rarely produce: large ones, nearly empty ones, and files whose
content does not match their name."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from dray.spec import Data
from ray_workers.datasets import open_table
from ray_workers.shared.node_needs import DataPolicy
from tests.generated.files import tables
from tests.generated.files.cases import Refusal, outcome
from tests.generated.files.tables import Truth

BLOCK_BYTES = 1 << 20
"""The size of a read block, which is also the longest row."""
FEW_WORDS = ("ant", "bee", "Zoë", "日本")
LARGE_EVERY = 40
"""Only one seed in this many generates a large table."""


@dataclass(frozen=True)
class RareTable:
    seed: int
    form: str
    content: bytes = field(repr=False)
    truths: Mapping[str, Truth] = field(repr=False, default_factory=dict)
    """For each column, including the target `y`."""
    refusal: Refusal | None = None
    name: str = "table.csv"
    classifies: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def fault(self, folder: Path, policy: DataPolicy) -> str | None:
        path = folder / self.name
        path.write_bytes(self.content)
        data = Data(source=path.as_uri(), target="y", **{"format": "csv", **self.options})
        table, fault = outcome(
            lambda: open_table(data, policy, classifies=self.classifies),
            [self.refusal] if self.refusal else [],
        )
        if table is None:
            return fault
        features = {name: truth for name, truth in self.truths.items() if name != "y"}
        return tables.difference(table, features, ("y", self.truths["y"]))

    def smaller(self) -> Iterator[Self]:
        yield from ()


Made = dict[str, Any]
"""Fields of a RareTable."""


def _rows(dice: random.Random, count: int) -> list[tuple[int, int, str]]:
    return [
        (dice.randint(-9, 9), 10**17 + dice.randint(0, 10**6), dice.choice(FEW_WORDS))
        for _ in range(count)
    ]


def _written(rows: list[tuple[int, int, str]], *, end: str = "\n", mark: str = ",") -> str:
    return "".join(mark.join(map(str, row)) + end for row in [("y", "x", "word"), *rows])


def _truths(rows: list[tuple[int, int, str]]) -> dict[str, Truth]:
    y, x, words = zip(*rows, strict=True)
    return {
        "y": Truth("number", tuple(map(Fraction, y))),
        "x": Truth("number", tuple(map(Fraction, x))),
        "word": Truth("name", words),
    }


def _many_rows(dice: random.Random) -> Made:
    rows = _rows(dice, 100_000 + dice.randrange(9))
    text = _written(rows)
    at = dice.randrange(len(rows))
    match dice.randrange(4):
        case 0:
            lines = text.split("\n")
            lines[at + 1] = lines[at + 1].replace(str(rows[at][1]), "n.d.")
            text, refusal = "\n".join(lines), Refusal(f"line {at + 2:}:", "'n.d.'", "'x'")
            return {"content": text.encode(), "refusal": refusal}
        case 1:
            lines = text.split("\n")
            lines[at + 1] = lines[at + 1].rpartition(",")[0]
            refusal = Refusal(f"line {at + 2}:", "has 2 fields, but the header has 3")
            return {"content": "\n".join(lines).encode(), "refusal": refusal}
    return {"content": text.encode(), "truths": _truths(rows)}


def _many_columns(dice: random.Random) -> Made:
    count, num_rows = dice.choice((500, 3_000)), dice.randint(2, 4)
    names = ["y", *(f"x{at}" for at in range(count))]
    rows = [[dice.randint(-9, 9) for _ in names] for _ in range(num_rows)]
    text = "\n".join(",".join(map(str, row)) for row in [names, *rows])
    columns = zip(names, zip(*rows, strict=True), strict=True)
    truths = {name: Truth("number", tuple(map(Fraction, values))) for name, values in columns}
    return {"content": text.encode(), "truths": truths}


def _long_rows(dice: random.Random) -> Made:
    # Whether a row of one to two blocks can be read depends on its position.
    length = dice.choice((70_000, 700_000, 1_030_000, 2_500_000))
    letter = dice.choice("äb")
    words = [letter * (length // len(letter.encode())), "b", "c"]
    dice.shuffle(words)
    rows = [(number, number, word) for number, word in enumerate(words)]
    most = max(len(f"{number},{number},{word}\n".encode()) for number, _, word in rows)
    too_long = Refusal("has a row of more than 1,048,576 bytes")
    made: Made = {"content": _written(rows).encode(), "truths": _truths(rows)}
    return made | {"refusal": too_long if most > BLOCK_BYTES else None}


def _bad_byte(dice: random.Random) -> Made:
    """A byte that is not valid UTF-8, before, at or after the end of a block."""
    rows = _rows(dice, 3)
    text = _written(rows).encode()
    filler = dice.choice(("日", "é", "a")) * 999
    pad = f"1,2,{filler}\n".encode()
    at = dice.choice((40, BLOCK_BYTES - 2, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 5, 1 << 22))
    lines = pad * ((at - len(text)) // len(pad))
    start = text + lines + b"1,2," + b"a" * max(0, at - len(text) - len(lines) - 4)
    refusal = Refusal(f"offset {len(start):,} is invalid", "latin-1")
    return {"content": start + b"\xe9t\xe9\n1,2,ant\n", "refusal": refusal}


def _header_alone(dice: random.Random) -> Made:
    text = dice.choice(("y,x", "y,x\n", "\ny,x\n\n", '"y","x"\r\n'))
    return {"content": text.encode(), "refusal": Refusal("has column names but no row")}


def _nothing(dice: random.Random) -> Made:
    text, words = dice.choice(
        (("", "is an empty file"), ("\n\r\n", "has no header"), ("\ufeff", "has no header"))
    )
    return {"content": text.encode(), "refusal": Refusal(words)}


def _one_row(dice: random.Random) -> Made:
    rows = _rows(dice, 1)
    made: Made = {"content": _written(rows).encode(), "truths": _truths(rows)}
    if dice.random() < 0.5:
        made |= {"classifies": True, "refusal": Refusal("only one class")}
    return made


def _one_column(dice: random.Random) -> Made:
    text = "y\n" + "".join(f"{dice.randint(0, 9)}\n" for _ in range(3))
    return {"content": text.encode(), "refusal": Refusal("has no columns other than the target")}


def _json(dice: random.Random) -> Made:
    rows = [{"y": y, "x": x, "word": word} for y, x, word in _rows(dice, 3)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    text = dice.choice((lines, json.dumps(rows), json.dumps(rows, indent=1)))
    name = dice.choice(("table.jsonl", "table.json", "table.csv"))
    return {"content": text.encode(), "name": name, "refusal": Refusal("if it is JSON")}


def _comments(dice: random.Random) -> Made:
    """CSV has no comments: such a line is a header or a row."""
    rows = _rows(dice, 4)
    lines = _written(rows).splitlines(keepends=True)
    at = dice.randrange(len(lines))
    lines.insert(at, dice.choice(("# exported in 2026\n", "#\n", '# "a"\n')))
    refusal = Refusal(f"line {at + 1}:", "has 1 fields, but the header has 3")
    if at == 0:
        refusal = Refusal("data.target", "there is no column 'y'", "if this is a comment")
    return {"content": "".join(lines).encode(), "refusal": refusal}


def _packed(dice: random.Random) -> Made:
    rows = _rows(dice, 5)
    plain = _written(rows).encode()
    good: Made = {"name": "table.csv.gz", "truths": _truths(rows)}
    match dice.choice(("gz", "two gz", "cut gz", "bz2", "xz", "zst", "zip")):
        case "gz":
            return good | {"content": gzip.compress(plain)}
        case "two gz":
            return good | {"content": gzip.compress(plain[:9]) + gzip.compress(plain[9:])}
        case "cut gz":
            refusal = Refusal("can't be unpacked completely")
            return {"content": gzip.compress(plain)[:-12], "refusal": refusal}
        case "bz2":
            packed, kind = bz2.compress(plain), "bzip2"
        case "xz":
            packed, kind = lzma.compress(plain), "xz"
        case "zst":
            packed, kind = pa.Codec("zstd").compress(plain, asbytes=True), "Zstandard"
        case _:
            data = io.BytesIO()
            with zipfile.ZipFile(data, "w") as archive:
                archive.writestr("table.csv", plain)
            packed, kind = data.getvalue(), "zip"
    return {"content": packed, "refusal": Refusal(f"is compressed with {kind}")}


def _other_encoding(dice: random.Random) -> Made:
    """UTF-16 with a missing or wrong declaration."""
    rows = _rows(dice, 3)
    text = _written([(y, x, "ant") for y, x, _ in rows])
    match dice.randrange(3):
        case 0:
            refusal = Refusal("offset 0 is invalid", "such as utf-16")
            return {"content": text.encode("utf-16"), "refusal": refusal}
        case 1:
            return {"content": text.encode("utf-16-le"), "refusal": Refusal("utf-16-le")}
    content = _written(_rows(dice, 3)).encode("utf-16-le") + b"\x00\xd8"
    refusal = Refusal(
        "is not utf-16-le, the encoding in data.encoding", f"offset {len(content) - 2:,}"
    )
    return {"content": content, "options": {"encoding": "utf-16-le"}, "refusal": refusal}


def _marked(dice: random.Random) -> Made:
    """A byte order mark before a quoted header."""
    rows = _rows(dice, 3)
    text = _written(rows, end=dice.choice(("\n", "\r\n")))
    header, rest = text[: text.index("word") + 4], text[text.index("word") + 4 :]
    quoted = ",".join(f'"{name}"' for name in header.split(","))
    return {"content": ("\ufeff" + quoted + rest).encode(), "truths": _truths(rows)}


def _other_mark(dice: random.Random) -> Made:
    rows = _rows(dice, 3)
    mark = dice.choice((";", "\t", "|"))
    content = _written(rows, mark=mark).encode()
    if mark == "\t" and dice.random() < 0.5:
        return {"content": content, "name": "table.tsv", "truths": _truths(rows)}
    shown = "tab" if mark == "\t" else f'"{mark}"'
    return {
        "content": content,
        "refusal": Refusal(f"data.delimiter: {shown}, the header would have 3 columns"),
    }


def _open_quote(dice: random.Random) -> Made:
    rows = _rows(dice, dice.choice((4, 4, 50_000)))
    lines = _written(rows).splitlines(keepends=True)
    at = dice.randint(1, len(lines) - 1)
    lines[at] = lines[at].replace(rows[at - 1][2], '"' + rows[at - 1][2])
    refusal = Refusal(f"line {at + 1}:", "has a quotation mark that is never closed")
    if len("".join(lines[at:]).encode()) > BLOCK_BYTES:
        refusal = Refusal("quotation mark")
    return {"content": "".join(lines).encode(), "refusal": refusal}


def _nul(dice: random.Random) -> Made:
    """NUL bytes in a name, which are treated like any other text."""
    rows = _rows(dice, 4)
    y, x, _ = rows[-1]
    rows[-1] = (y, x, dice.choice(("a\0b", "\0", "ant\0")))
    return {"content": _written(rows).encode(), "truths": _truths(rows)}


LARGE: tuple[Callable[[random.Random], Made], ...] = (_many_rows, _many_columns, _long_rows)
SMALL: tuple[Callable[[random.Random], Made], ...] = (
    *(_bad_byte, _header_alone, _nothing, _one_row, _one_column, _json, _comments, _packed),
    *(_other_encoding, _marked, _other_mark, _open_quote, _nul),
)


def draw(seed: int) -> RareTable:
    dice = random.Random(f"rare tables {seed}")
    is_large = seed % LARGE_EVERY == LARGE_EVERY - 1
    made = dice.choice(LARGE if is_large else SMALL)
    return RareTable(seed, made.__name__.strip("_"), **made(dice))
