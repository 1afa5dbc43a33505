"""Checks that a job's program exists in the job's code and is valid Python."""

from __future__ import annotations

import ast
import posixpath
import warnings
from collections.abc import Sequence

from dray.spec import Script
from dray.spec.program.roles import Framework
from service.code.uploads import CodeUploads, StoredFile, code_not_found
from service.domain.errors import CodeNotFound, CodeUnfit

LARGEST_PARSED_BYTES = 256 << 10
"""Maximum size of a file to parse. Parsing takes 2 s per MiB and blocks the process."""
SHOWN = 10
"""Maximum number of files that an error message names."""


async def why_unfit(uploads: CodeUploads, script: Script | None, owner: str) -> CodeUnfit | None:
    """Return the reason why a script can't run; None if it can run, or has no uploaded code."""
    if script is None or not isinstance(script.code, str):
        return None  # the nodes check other code themselves
    try:
        files = await uploads.files(owner, script.code)
    except CodeNotFound:
        return code_unfit(script.code)
    if script.module is not None and (unfit := _without_module(script.module, files)) is not None:
        return unfit
    programs = {"/script/entrypoint": script.entrypoint} | {
        f"/script/roles/{name}/entrypoint": role.entrypoint for name, role in script.roles.items()
    }
    for pointer, entrypoint in programs.items():
        if entrypoint is None:
            continue
        unfit = await _why_program_unfit(uploads, files, entrypoint, pointer, script.framework)
        if unfit is not None:
            return unfit
    return None


async def _why_program_unfit(
    uploads: CodeUploads,
    files: Sequence[StoredFile],
    entrypoint: str,
    pointer: str,
    framework: Framework,
) -> CodeUnfit | None:
    """Return the reason why the program can't run. `pointer` is the JSON pointer of the field that
    names the program."""
    path = posixpath.normpath(entrypoint)
    file = next((file for file in files if file.path == path), None)
    if file is None or ".." in entrypoint.split("/"):  # `a/../b` needs a folder `a`
        return CodeUnfit(
            f"there is no file {entrypoint!r} in the code",
            pointer=pointer,
            hint=what_there_is(files),
        )
    if not path.endswith(".py") or file.size_bytes > LARGEST_PARSED_BYTES:
        return None
    source = b"".join([piece async for piece in uploads.pieces(file)])
    if (fault := syntax_fault(source)) is not None:
        return CodeUnfit(f"{path} is not Python: {fault}", pointer=pointer)
    if framework == "mpi" and (line := _imports_mpi4py(source)) is not None:
        return CodeUnfit(
            f"{path} imports mpi4py on line {line}: mpi4py's ranks find each other through the "
            "daemons of mpirun, which dray does not run",
            pointer=pointer,
            hint=(
                "use torch.distributed, whose gloo backend provides MPI's collectives, or "
                "dray.train.hvd"
            ),
        )
    return None


def code_unfit(identity: str, pointer: str = "/script/code") -> CodeUnfit:
    """Return the error for a job whose code has not been uploaded by its owner."""
    missing = code_not_found(identity)
    return CodeUnfit(missing.message, pointer=pointer, hint=missing.hint)


def _without_module(module: str, files: Sequence[StoredFile]) -> CodeUnfit | None:
    """Return the reason why the module can't be run; None if it can. A module that is missing from
    the code might be in a package on the nodes."""
    paths = {file.path for file in files}
    top = module.split(".")[0]
    if f"{top}.py" not in paths and not any(path.startswith(f"{top}/") for path in paths):
        return None
    base = module.replace(".", "/")
    if f"{base}.py" in paths or f"{base}/__main__.py" in paths:
        return None
    return CodeUnfit(
        f"there is no module {module} in the code, which contains neither {base}.py nor "
        f"{base}/__main__.py",
        pointer="/script/module",
        hint=what_there_is(files),
    )


def what_there_is(files: Sequence[StoredFile]) -> str:
    programs = [file.path for file in files if file.path.endswith(".py")]
    shown = sorted(programs, key=lambda path: (path.count("/"), path))[:SHOWN]
    more = f" and {len(programs) - len(shown)} more" if len(programs) > len(shown) else ""
    return f"it has {', '.join(shown)}{more}" if shown else "it has no Python file"


def _imports_mpi4py(source: bytes) -> int | None:
    """Return the line number of the top-level import of mpi4py; None if it is not imported."""
    for statement in ast.parse(source).body:
        match statement:
            case ast.Import(names=names) if any(n.name.split(".")[0] == "mpi4py" for n in names):
                return statement.lineno
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "mpi4py":
                return statement.lineno
    return None


def syntax_fault(source: bytes) -> str | None:
    """Return the line and message of a Python file's first syntax error; None if there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(source)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}" if error.lineno else str(error.msg)
    except ValueError as error:  # a NUL byte
        return str(error)
    except (RecursionError, MemoryError):
        return None  # nested too deeply to parse here: the worker reports any error
    return None
