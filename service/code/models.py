"""Checks that a recipe's model exists in the uploaded code."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator

from dray.spec import Imported, JobSpec
from service.code.entrypoints import (
    LARGEST_PARSED_BYTES,
    code_unfit,
    syntax_fault,
    what_there_is,
)
from service.code.uploads import CodeUploads
from service.domain.errors import CodeNotFound, CodeUnfit

WHERE = "/model/import"


async def why_unfit(
    uploads: CodeUploads, spec: JobSpec, owner: str, storage_url: str
) -> CodeUnfit | None:
    """Return the reason why `model.import` can't be trained; None if it can. A model that is
    missing from the code might be in a package on the nodes."""
    model = spec.model
    if not isinstance(model, Imported):
        return None
    if not storage_url.startswith("file:"):
        return CodeUnfit(
            "a model class of your own requires the storage to be a local folder: a recipe's "
            "ranks write the checkpoints, but ranks that run your code don't receive the storage "
            "credentials",
            pointer=WHERE,
            hint="train the model with a script: dray.train passes checkpoints to a dray process, "
            "which writes them",
        )
    if model.code is None:
        return None
    try:
        files = {file.path: file for file in await uploads.files(owner, model.code)}
    except CodeNotFound:
        return code_unfit(model.code, "/model/code")
    base = model.module.replace(".", "/")
    file = files.get(f"{base}.py") or files.get(f"{base}/__init__.py")
    if file is None:
        return CodeUnfit(
            f"there is no module {model.module} in the code, which contains neither {base}.py nor "
            f"{base}/__init__.py",
            pointer=WHERE,
            hint=what_there_is(list(files.values())),
        )
    if file.size_bytes > LARGEST_PARSED_BYTES:
        return None
    source = b"".join([piece async for piece in uploads.pieces(file)])
    if (fault := syntax_fault(source)) is not None:
        return CodeUnfit(f"{file.path} is not Python: {fault}", pointer=WHERE)
    names = _names_of(source)
    if names is None or model.attribute in names:
        return None
    shown = ", ".join(sorted(names)[:10]) or "nothing"
    return CodeUnfit(
        f"{file.path} does not define {model.attribute}", pointer=WHERE, hint=f"it defines {shown}"
    )


def _names_of(source: bytes) -> set[str] | None:
    """Return the names defined at the top level of a module; None if the module's code might define
    additional names."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(source).body
    except (RecursionError, MemoryError):
        return None
    found: set[str] = set()
    for statement in body:
        match statement:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                if any(one.name == "*" for one in names):
                    return None
                found |= {one.asname or one.name.split(".")[0] for one in names}
            case ast.Assign(targets=targets):
                found |= {name for target in targets for name in _bound(target)}
            case ast.AnnAssign(target=target):
                found |= set(_bound(target))
            case ast.Expr(value=ast.Constant()):
                pass
            case _:  # a condition, a loop, a call: can define anything
                return None
    return found


def _bound(target: ast.expr) -> Iterator[str]:
    return (node.id for node in ast.walk(target) if isinstance(node, ast.Name))
