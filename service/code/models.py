"""Checks that a recipe's model or metrics exist in the uploaded code."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator

from dray.spec import Imported, JobSpec, Pretrained, Sft
from service.code.entrypoints import (
    LARGEST_PARSED_BYTES,
    code_unfit,
    syntax_fault,
    what_there_is,
)
from service.code.uploads import CodeUploads
from service.domain.errors import CodeNotFound, CodeUnfit


async def why_unfit(
    uploads: CodeUploads, spec: JobSpec, owner: str, storage_url: str
) -> CodeUnfit | None:
    """Return the reason why `model.import` can't be trained, or `method.metrics` can't be computed;
    None if there is none. A class that is missing from the code might be in a package on the
    nodes."""
    for where, options in _classes(spec):
        if not storage_url.startswith("file:"):
            return CodeUnfit(
                "a class of your own requires the storage to be a local folder: a recipe's "
                "ranks write the checkpoints, but ranks that run your code don't receive the "
                "storage credentials",
                pointer=where,
                hint="train the model with a script: dray.train passes checkpoints to a dray "
                "process, which writes them",
            )
        if (unfit := await _why_unfit(uploads, where, options, owner)) is not None:
            return unfit
    return None


def _classes(spec: JobSpec) -> Iterator[tuple[str, Imported]]:
    """Iterate over the user's own classes, with pointers to their names in the document."""
    if isinstance(spec.model, Imported):
        yield "/model/import", spec.model
    if isinstance(spec.model, Pretrained) and isinstance(spec.method, Sft):
        for name, target in spec.method.metrics.items():
            given = {"import": target, "code": spec.model.code}
            yield f"/method/metrics/{name}", Imported.model_validate(given)


async def _why_unfit(
    uploads: CodeUploads, where: str, model: Imported, owner: str
) -> CodeUnfit | None:
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
            pointer=where,
            hint=what_there_is(list(files.values())),
        )
    if file.size_bytes > LARGEST_PARSED_BYTES:
        return None
    source = b"".join([piece async for piece in uploads.pieces(file)])
    if (fault := syntax_fault(source)) is not None:
        return CodeUnfit(f"{file.path} is not Python: {fault}", pointer=where)
    names = _names_of(source)
    if names is None or model.attribute in names:
        return None
    shown = ", ".join(sorted(names)[:10]) or "nothing"
    return CodeUnfit(
        f"{file.path} does not define {model.attribute}", pointer=where, hint=f"it defines {shown}"
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
