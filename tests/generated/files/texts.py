"""Generated texts: a file, or a folder of files."""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from dray.spec import Data
from ray_workers.datasets import open_text
from ray_workers.shared.node_needs import DataPolicy
from tests.generated.files.cases import Refusal, outcome, without

WORDS = ("a", "Zoë", "日本語", "🙂", "\ufeff", "x y", "\t", "", "e\u0301", "\u2028", "\x0c", "end.")
MARK = "\ufeff".encode()
NAMES = ("b.txt", "a.txt", "sub/c.txt", "B.TXT", "ü.txt", "10.txt", "9.txt")
PIECE_BYTES = 1 << 20
JUNK = (".hidden.txt", "notes.md", "__MACOSX/x.txt", ".git/y.txt")


@dataclass(frozen=True)
class TextCase:
    files: tuple[tuple[str, bytes, str], ...]
    """(name, content, part of a split)."""
    is_folder: bool
    is_packed: bool = False
    junk: tuple[str, ...] = ()

    def fault(self, folder: Path, policy: DataPolicy) -> str | None:
        source = folder / "set"
        if not self.is_folder:
            source = folder / ("a.txt.gz" if self.is_packed else "a.txt")
            content = self.files[0][1]
            source.write_bytes(gzip.compress(content) if self.is_packed else content)
        else:
            for name, content in (*self._named(), *((name, b"\xff") for name in self.junk)):
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                (source / name).write_bytes(content)
        found, fault = outcome(
            lambda: open_text(Data(source=source.as_uri(), format="text"), policy, None),
            self.refusals(),
        )
        if found is None:
            return fault
        training, validation = self.bytes_of("train"), self.bytes_of("val")
        if found.ids.tobytes() != training + validation:
            return _difference(found.ids.tobytes(), training + validation)
        if found.num_training not in (None, len(training)):
            return f"{found.num_training} for training, expected {len(training)}"
        return None

    def _named(self) -> list[tuple[str, bytes]]:
        is_divided = any(part != "train" for _, _, part in self.files)
        return [(f"{part}/{n}" if is_divided else n, data) for n, data, part in self.files]

    def bytes_of(self, part: str) -> bytes:
        if not self.is_folder:
            return self.files[0][1].removeprefix(MARK) if part == "train" else b""
        parts = {
            name: its for (name, _), (_, _, its) in zip(self._named(), self.files, strict=True)
        }
        whole = b""
        for name, data in sorted(self._named()):
            if parts[name] == part:
                text = data.removeprefix(MARK)
                whole += text + (b"\n" if text and not text.endswith(b"\n") else b"")
        return whole

    def refusals(self) -> list[Refusal]:
        found = []
        for name, data, part in self.files if self.is_folder else self.files[:1]:
            try:
                data.decode()
            except UnicodeDecodeError as error:
                if part != "test":
                    place = name.rsplit("/")[-1] if self.is_folder else "a.txt"
                    found.append(Refusal(place, f"offset {error.start:,} is invalid"))
        if not found and not self.bytes_of("train") + self.bytes_of("val"):
            found += [Refusal("contains no text"), Refusal("is an empty file")]
        return found

    def smaller(self) -> Iterator[Self]:
        for at in range(len(self.files) if len(self.files) > 1 else 0):
            yield replace(self, files=without(self.files, at))
        for at, (name, data, part) in enumerate(self.files):
            for half in (data[: len(data) // 2], data[len(data) // 2 :]):
                if half != data:
                    files = (*self.files[:at], (name, half, part), *self.files[at + 1 :])
                    yield replace(self, files=files)


def _difference(found: bytes, expected: bytes) -> str:
    pairs = enumerate(zip(found, expected, strict=False))
    shorter = min(len(found), len(expected))
    at = next((at for at, (one, other) in pairs if one != other), shorter)
    around = slice(max(0, at - 20), at + 20)
    return f"{found[around]!r}, expected {expected[around]!r}, from offset {around.start:,}"


def draw(seed: int) -> TextCase:
    dice = random.Random(f"texts {seed}")
    is_folder = dice.random() < 0.6
    is_divided = is_folder and dice.random() < 0.3
    files = []
    for at, name in enumerate(dice.sample(NAMES, dice.randint(2, 5) if is_folder else 1)):
        end = dice.choice(("\n", "\r\n", "\r"))
        lines = [dice.choice(WORDS) for _ in range(dice.choice((0, 1, 5, 30)))]
        text = end.join(lines) + dice.choice(("", end))
        if dice.random() < 0.03:  # longer than a read block
            text *= 1 + 1_200_000 // max(1, len(text.encode())) if text.strip() else 1
        encoding = dice.choice(("utf-16", "latin-1")) if dice.random() < 0.05 else "utf-8"
        content = text.encode(encoding, "replace")
        if dice.random() < 0.04:
            content = _with_bad_byte(dice)
        mark = MARK if dice.random() < 0.25 and encoding == "utf-8" else b""
        part = "train" if not is_divided or at == 0 else dice.choice(("train", "val", "test"))
        files.append((name, mark + content, part))
    junk = tuple(dice.sample(JUNK, 2)) if is_folder and dice.random() < 0.3 else ()
    return TextCase(tuple(files), is_folder, dice.random() < 0.3, junk)


def _with_bad_byte(dice: random.Random) -> bytes:
    """Text up to an invalid byte, near the end of a read block."""
    length = dice.choice((9, PIECE_BYTES, 2 * PIECE_BYTES)) + dice.randint(-3, 3)
    word = dice.choice(("a", "日本 ", "line\n")).encode()
    text = b"Z" * (length % len(word)) + word * (length // len(word))
    return text + dice.choice((b"\xff", b"\xe9t", b"\xe6\x97", b"\xed\xa0\x80")) + b" end"
