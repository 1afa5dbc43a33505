"""Run small trainings, and record their output and the files of their loggers.

    python -m tests.generated.loggers.record PYTHON [NAME ...]

PYTHON needs the packages of the programs: torch, transformers, accelerate, lightning, keras,
ultralytics, timm, tensorboard and tqdm; with NAMEs, only the packages of these programs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"
KEPT = ("metrics.csv", "results.csv", "summary.csv", "truth.json")
PROGRAMS: dict[str, tuple[str, ...]] = {
    "transformers-printed": ("transformers_trainer", "none"),
    "transformers-plain": ("transformers_trainer", "none", "plain"),
    "transformers-tensorboard": ("transformers_trainer", "tensorboard"),
    "tensorboard": ("tensorboard_writer",),
    "accelerate": ("accelerate_tracker",),
    "lightning-csv": ("lightning_folds", "csv"),
    "lightning-tensorboard": ("lightning_folds", "tensorboard"),
    "keras-bar": ("keras_fit", "1"),
    "keras-lines": ("keras_fit", "2"),
    "keras-csv": ("keras_fit", "0"),
    "ultralytics": ("ultralytics_classify",),
    "timm": ("timm_summary",),
    "tqdm": ("printed", "bar"),
    "logging": ("printed", "logged"),
    "print": ("printed", "printed"),
}
"""A program and its arguments, by the folder in `recorded`."""
PACKAGES = (
    *("torch", "transformers", "accelerate", "lightning", "keras", "ultralytics", "timm"),
    *("tensorboard", "tqdm"),
)
_VERSIONS = f"""
import json
from importlib.metadata import distributions
print(json.dumps({{one.name: one.version for one in distributions() if one.name in {PACKAGES}}}))
"""


def recorded(python: str, name: str) -> None:
    """Run a program in an empty folder, and keep its output, its truth and its loggers' files."""
    program, *arguments = PROGRAMS[name]
    target = RECORDED / name
    with tempfile.TemporaryDirectory() as folder:
        command = [python, str(HERE / "programs" / f"{program}.py"), *arguments]
        began = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"PYTHONPATH": str(HERE / "programs"), "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        pieces = []
        while piece := os.read(process.stdout.fileno(), 4096):
            at = round(time.monotonic() - began, 3)
            pieces.append((at, _without_machine(piece.decode(errors="replace"), folder, python)))
        if process.wait() != 0:
            raise SystemExit("".join(text for _, text in pieces))
        shutil.rmtree(target, ignore_errors=True)
        for path in sorted(Path(folder).rglob("*")):
            if path.name in KEPT or ".tfevents." in path.name:
                kept = target / _without_host(path.relative_to(folder))
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, kept)
        (target / "output.json").write_text(json.dumps(pieces))


def _without_machine(text: str, folder: str, python: str) -> str:
    for path, name in ((folder, "/work"), (str(Path(python).parents[1]), "/python")):
        text = text.replace(path, name)
    return re.sub(r"CPU \([^)]*\)", "CPU", text)


def _without_host(path: Path) -> Path:
    """The machine's name is in those of event files, `events.out.tfevents.TIME.HOST.PID.NUMBER`,
    and of folders, such as `Nov28_07-09-33_HOST`."""
    host = socket.gethostname()
    return Path(
        *(re.sub(rf"(?<=[._]){re.escape(host)}(?=\.|$)", "host", part) for part in path.parts)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    for name in options.names or PROGRAMS:
        recorded(options.python, name)
        print(name, flush=True)
    versions = subprocess.run(
        [options.python, "-c", _VERSIONS], capture_output=True, text=True, check=True
    )
    path = RECORDED / "versions.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | json.loads(versions.stdout)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
