"""Find and upload the folder with a job's code."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from dray.client import Client
    from dray.code.packing import PackedCode

MODULE = "-m"
"""First word of a command line that runs a Python module."""


def is_program(source: str) -> bool:
    """Whether the command line names a program rather than a document."""
    return source.endswith(".py") or source.startswith(MODULE)


def packed_folder(
    document: dict[str, Any], source: str, code: Path | None, include: list[str]
) -> PackedCode | None:
    """Pack the folder named by --code or the document; for a program, the default is the current
    folder. Return None if there is no folder to upload."""
    from dray.code.local import named_folder
    from dray.code.packing import pack
    from dray.documents import folder_of
    from dray.errors import SpecError

    code = code or named_folder(document, folder_of(source))
    script, model = document.get("script"), document.get("model")
    if not isinstance(script, dict):
        if code is None:
            return None
        if not isinstance(model, dict) or "import" not in model:
            raise SpecError(
                f"{source} has neither a script nor model.import: --code requires one of them"
            )
        return pack(code.absolute(), include)
    if code is None and not is_program(source):
        if include:
            raise typer.BadParameter(
                "--include requires --code, or a document with `code: FOLDER`: without either, no "
                "code is uploaded"
            )
        return None
    folder = (code or Path()).absolute()
    program = script.get("entrypoint")
    names = []
    if folder.is_dir() and isinstance(program, str):
        names = _within(folder, Path(program))
    packed = pack(folder, include)
    if names:
        paths = {file.path for file in packed.files}
        entrypoint = next((name for name in names if name in paths), None)
        if entrypoint is None:
            raise SpecError(
                f"{program} is excluded from the upload: add it with --include, or change the "
                ".gitignore or .drayignore that excludes it"
            )
        document["script"] = {**script, "entrypoint": entrypoint}
    return packed


def _within(folder: Path, program: Path) -> list[str]:
    """Return the program's paths relative to the uploaded folder: first as given, then with
    symbolic links resolved. The program can be given relative to that folder or to the current
    folder. Raises SpecError if the folder does not contain the program."""
    from dray.errors import SpecError

    candidates = [program.absolute(), folder / program]
    for candidate in candidates:
        if candidate.is_file() and candidate.resolve().is_relative_to(folder.resolve()):
            found = [candidate.resolve().relative_to(folder.resolve()).as_posix()]
            given, root = Path(os.path.normpath(candidate)), os.path.normpath(folder)
            if given.is_relative_to(root) and given.is_file() and given.samefile(candidate):
                found.insert(0, given.relative_to(root).as_posix())
            return found
    if candidates[0].is_file():
        raise SpecError(
            f"{program} is not in the uploaded folder {folder}: specify the program's folder with "
            "--code"
        )
    raise SpecError(f"there is no file {program} in the uploaded folder {folder}")


def upload(client: Client, document: dict[str, Any], packed: PackedCode) -> None:
    from dray.cli.display.output import size, warn
    from dray.code.packing import USELESS

    for note in packed.notes:
        warn(note)
    for entry in packed.left_out:
        if entry.why != USELESS:
            warn(f"not uploaded: {entry.path} {entry.why}")
    for file in packed.large:
        warn(
            f"{file.path} is {size(file.size_bytes)}: if it is data rather than code, add it to "
            ".drayignore"
        )
    sent = 0

    def count(done: int, _total: int) -> None:
        nonlocal sent
        sent = done

    uploaded = client.upload_code(packed, on_progress=count)
    name_code(document, packed)
    if sys.stderr.isatty():
        what = "1 file" if uploaded.num_files == 1 else f"{uploaded.num_files} files"
        warn(f"{uploaded.id}: {what}, {size(uploaded.size_bytes)} ({size(sent)} sent)")


def name_code(document: dict[str, Any], packed: PackedCode) -> None:
    """Set the id of the uploaded code in the document, and the commit of its work tree."""
    from dray.code.local import with_commit

    part = "script" if "script" in document else "model"
    named = with_commit({**document, part: {**document[part], "code": packed.id}}, packed)
    document.clear()
    document.update(named)
