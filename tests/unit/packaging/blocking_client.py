"""Writes the blocking client from the asynchronous one: `make blocking`.

The asynchronous client (`dray/aio.py` and `dray/_async`) is written by hand. This script writes
`dray/client.py` and `dray/_sync`, which are checked in, as httpcore and psycopg do it. A test
compares them with what the script would write.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
GENERATED = "dray/_sync"

# In this order, over the whole text of a file with its docstrings.
RULES = tuple(
    (re.compile(pattern, re.MULTILINE), replacement)
    for pattern, replacement in (
        (r"^.*# asynchronous only\n", ""),
        (r"await asyncio\.to_thread\(\s*([\w.]+)(?:,\s*)?", r"\1("),
        (r"\basync (def|with|for)\b", r"\1"),
        (r"\bawait ", ""),
        (r"\bAsyncGenerator\[(.+), None\]", r"Generator[\1, None, None]"),
        (r"\bAsync(?=[A-Z])", ""),
        (r"\basyncio\b", "time"),
        (r"\ba(closing|close|read|iter_bytes)\b", r"\1"),
        (r"__a(enter|exit|iter)__", r"__\1__"),
        (r"\basynchronous client\b", "blocking client"),
        (r"\bdray\.aio\b", "dray.client"),
        (r"\bdray\._async\b", "dray._sync"),
    )
)


def sources() -> dict[Path, Path]:
    """The files to write, by the file that each is made from."""
    found = {ROOT / "dray/aio.py": ROOT / "dray/client.py"}
    for source in sorted((ROOT / "dray/_async").glob("*.py")):
        found[source] = ROOT / GENERATED / source.name
    return found


def blocking(source: Path, target: Path) -> str:
    """The text of `target`."""
    text = source.read_text()
    for pattern, replacement in RULES:
        text = pattern.sub(replacement, text)
    name = source.relative_to(ROOT)
    text = f"# Written by `make blocking` from {name}: change that file instead.\n{text}"
    # Imports that only the asynchronous client uses go, and the others get their order; and a loop
    # that yields becomes `yield from`.
    fixes = ("--fix-only", "--unsafe-fixes", "--select", "F401,I,UP028")
    text = _ruff(text, target, "check", "--quiet", *fixes)
    return _ruff(text, target, "format")


def _ruff(text: str, target: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", str(target), "-"]
    run = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT)
    return run.stdout


def main() -> None:
    for source, target in sources().items():
        target.parent.mkdir(exist_ok=True)
        target.write_text(blocking(source, target))


if __name__ == "__main__":
    main()
