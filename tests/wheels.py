"""Wheels for tests of environments, built locally so that no test needs a package index."""

from __future__ import annotations

import contextlib
import functools
import threading
import zipfile
from collections.abc import Iterator, Sequence
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def make_wheel(
    folder: Path, name: str, version: str = "1.0", code: str = "", requires: Sequence[str] = ()
) -> Path:
    """Build a wheel with a single module of this name and the source `code`."""
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


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print no output."""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder of wheels and return its URL, because job documents can't contain paths of a
    node."""
    handler = functools.partial(_QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def from_wheels(folder: Path | str, *packages: str) -> dict[str, object]:
    """An `environment` that installs these packages only from the folder, or its URL."""
    lines = ["--no-index", f"--find-links {folder}", *packages]
    return {"requirements": "\n".join(lines) + "\n"}
