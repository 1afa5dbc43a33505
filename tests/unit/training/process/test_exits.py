"""The exits of a script and of its forked processes, compared with plain `python`."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ray_workers.node.forkserver import forked_child
from ray_workers.training.process import rank_main
from tests.marks import ONE_SET, soak_but
from tests.unit.training.ranks import frames, make_task

_context = multiprocessing.get_context("forkserver")

ENDS = [
    *("sys.exit()", "sys.exit(None)", "sys.exit(0)", "sys.exit(False)", "sys.exit(True)"),
    *("sys.exit(7)", "sys.exit(0.0)", "sys.exit(2.5)", "sys.exit('text')", "sys.exit('')"),
    *("sys.exit(255)", "sys.exit(256)", "sys.exit(257)", "sys.exit(-1)", "sys.exit(1 << 40)"),
    *("sys.exit((1 << 40) + 3)", "sys.exit(1 << 64)", "sys.exit(-(1 << 70))", "sys.exit((1, 2))"),
    *("sys.exit([])", "raise SystemExit", "raise SystemExit(3, 4)", "exit(5)", "os._exit(6)"),
    *("pass", "raise ValueError('red')", "int('x')", "atexit.register(print, 'bye')"),
    *("atexit.register(lambda: 1 / 0)", "atexit.register(sys.exit, 4)"),
    *("atexit.register(lambda: 1 / 0); sys.exit(9)", "sys.stdout.close()", "sys.stderr = None"),
    "os.kill(os.getpid(), 15)",
    *("threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",),
]
"""Last lines of programs."""
BEGIN = "import atexit, multiprocessing, os, sys, threading, time\n"
FORKS = """
for number, end in enumerate(sys.argv[1:]):
    child = os.fork()
    if child == 0:
        exec(end)
        break
    print(number, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
IN_A_FUNCTION = """
def work(end):
    exec(end)

def fork(end):
    try:
        child = os.fork()
        if child == 0:
            work(end)
            sys.exit(11)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except ValueError:
        print("handled")
        raise

codes = [fork(end) for end in sys.argv[1:]]
print(codes)
"""
POOLS = """
def work(end):
    exec(end)

fork = multiprocessing.get_context("fork")
for number, end in enumerate(sys.argv[1:]):
    process = fork.Process(target=work, args=(end,), name=f"p{number}")
    process.start()
    process.join()
    print(number, process.exitcode, flush=True)
"""


def compared(output: str) -> list[str]:
    """Return the lines of the output, without addresses, and with tracebacks reduced to their
    errors."""
    lines = re.sub("0x[0-9a-f]+", "0x", output).splitlines()
    return [line for line in lines if not line.startswith(("  ", "Traceback"))]


def by_python(path: Path, *args: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-u", str(path), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, compared(done.stdout)


def _start(request: str, output: str) -> None:
    assert rank_main  # imported before the fork, as in the forkserver
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    forked_child.run(json.loads(request), [fd], os.getppid())


def by_rank(folder: Path, path: Path, *args: str) -> tuple[int | None, list[str]]:
    task = make_task(folder, {"script": {"entrypoint": str(path), "args": list(args)}})
    request = json.dumps({"op": "rank", "task": json.loads(task.to_json())})
    process = _context.Process(target=_start, args=(request, str(folder / "output")))
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode, compared((folder / "output").read_text())


def program(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(BEGIN + textwrap.dedent(text))
    return path


SHORT = {
    *("sys.exit(0.0)", "sys.exit(256)", "sys.exit(1 << 64)", "sys.exit('text')", "pass"),
    *(
        "atexit.register(lambda: 1 / 0); sys.exit(9)",
        "sys.stderr = None",
        "raise ValueError('red')",
    ),
}


@pytest.mark.parametrize("end", soak_but(ENDS, short=SHORT))
def test_a_script_ends_as_under_python(tmp_path: Path, end: str) -> None:
    path = program(tmp_path, end)
    expected = by_python(path)
    assert by_rank(tmp_path, path) == expected
    assert len(frames(tmp_path, kind="error")) == (expected[0] > 0 and "_exit" not in end)


@ONE_SET
@pytest.mark.parametrize(
    "text",
    [FORKS, IN_A_FUNCTION, POOLS],
    ids=["at the top", "in a function", "by multiprocessing"],
)
def test_forked_children_end_as_under_python(tmp_path: Path, text: str) -> None:
    path = program(tmp_path, text)
    ends = [*ENDS, "raise KeyboardInterrupt", "sys.excepthook = lambda *_: print('own'); 1 / 0"]
    expected = by_python(path, *ends)
    assert expected[0] == 0
    assert by_rank(tmp_path, path, *ends) == expected
    assert frames(tmp_path, kind="error") == []


def test_a_child_leaves_the_files_of_its_rank_alone(tmp_path: Path) -> None:
    path = program(
        tmp_path,
        """
        from dray import train
        train.report(1, {"a": 1.0})
        if os.fork() == 0:
            raise ValueError("in the child")
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        train.report(2, {"a": 2.0})
        """,
    )
    code, output = by_rank(tmp_path, path)
    assert (code, output[-1]) == (0, "1"), output
    text = (tmp_path / "output").read_text()
    assert (text.count("Traceback"), text.count("ray_workers")) == (1, 0)
    assert [each["step"] for each in frames(tmp_path, kind="metrics")] == [1, 2]
