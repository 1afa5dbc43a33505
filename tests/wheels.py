"""Wheels for tests of environments, made here: no test needs an index of the network."""

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


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of a folder of wheels, for jobs: their documents name no path of a node."""
    handler = functools.partial(_QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def from_wheels(place: Path | str, *packages: str) -> dict[str, object]:
    """An `environment` that takes these packages from the folder, or its URL, alone."""
    lines = ["--no-index", f"--find-links {place}", *packages]
    return {"requirements": "\n".join(lines) + "\n"}
