"""Wheels for tests of environments, made here: no test needs an index of the network."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path


def make_wheel(
    folder: Path, name: str, version: str = "1.0", code: str = "", requires: Sequence[str] = ()
) -> Path:
    """A wheel with one module of this name, whose source is `code`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    contents = {
        f"{name}.py": code or f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*contents, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in {**contents, f"{info}/RECORD": record}.items():
            wheel.writestr(file, text)
    return path


def from_wheels(folder: Path, *packages: str) -> dict[str, object]:
    """An `environment` that takes these packages from the folder alone."""
    lines = ["--no-index", f"--find-links {folder}", *packages]
    return {"requirements": "\n".join(lines) + "\n"}
